"""What the gateway's rules need to know of a plan and of requests, as the records that `gateway` works on.

Classes without a route go where the gateway would send them: to every group in proportion to its memory, with nothing
reserved. A request's prefix key is the id of the last stretch of its prompt that came before, as a client's earlier
messages make the gateway's; requests whose trace says nothing of the kind have none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvantile_optimizer.admission import FORMS, LATE_SHARE_PER_MILLE, PER_MILLE
from kvantile_optimizer.plan import Group, Plan, PlanClass, Route
from kvantile_optimizer.routing import NO_KEY, QUEUE_LENGTH, WORDS, hashed
from kvantile_optimizer.simulator.replica import Requests
from kvantile_optimizer.simulator.state import (
    NOBODY,
    ORDERS,
    PLACE,
    REPLICA,
    ROUTE,
    ROW,
    VISIT,
    Floats,
    Gateway,
    Ints,
    Structured,
)


@dataclass(frozen=True, slots=True)
class Lobby:
    """The gateway's queue, as `kvantile-router` is told of it."""

    queue_length: int = QUEUE_LENGTH
    """Requests of one class that may wait."""
    queue_wait_s: float | None = None
    """Longest wait; the class's target for the first token unless set."""


def replica_url(group: str, number: int) -> str:
    """What a simulated replica is called where the rule hashes names."""
    return f"http://{group}-{number}"


def gateway_of(
    plan: Plan,
    lobby: Lobby,
    requests: Requests,
    classes: Ints,
    allowed: npt.NDArray[np.bool_],
    group_chances: Floats,
    resident: dict[tuple[str, str], int],
) -> Gateway:
    """The gateway before `requests` (N,) of `classes` (N,) come.

    `allowed` (N, G) says which groups could hold them, `group_chances` (N,) in [0, 1) choose groups for those without a
    prefix, and `resident` are the prefix tokens of a class on a group.
    """
    routes = [_routes_of(plan, item) for item in plan.classes]
    orders = np.array([ORDERS[next((route.order for route in mine), "fcfs")] for mine in routes])
    lines, line = np.unique(np.column_stack([orders[classes], allowed]), axis=0, return_inverse=True)
    queues = np.zeros(len(lines), REPLICA)
    queues["order"], queues["late_share"] = lines[:, 0], LATE_SHARE_PER_MILLE
    for name in ("preempted_root", "on_time_root", "late_root"):
        queues[name] = NOBODY
    return Gateway(
        visits=_visits(plan, requests, classes, line.reshape(-1), group_chances),
        rows=_rows(plan, lobby),
        routes=_route_table(plan, routes, resident),
        places=_places(plan),
        allowed=allowed,
        lines=queues,
        line_groups=lines[:, 1:].astype(np.bool_),
        stuck=np.zeros(len(lines), np.bool_),
    )


def _routes_of(plan: Plan, item: PlanClass) -> list[Route]:
    """The class's routes in the plan, else those that the gateway makes up."""
    planned = plan.routes_of(item.name)
    if planned:
        return planned
    sizes = [group.kv_tokens * max(1, group.replicas) for group in plan.groups]
    return [
        Route(class_=item.name, group=group.name, fraction=size / sum(sizes), reserve_tokens=0)
        for group, size in zip(plan.groups, sizes, strict=True)
    ]


def _route_table(plan: Plan, routes: list[list[Route]], resident: dict[tuple[str, str], int]) -> Structured:
    columns = {group.name: place for place, group in enumerate(plan.groups)}
    table = np.zeros((len(routes), len(plan.groups)), ROUTE)
    for row, mine in zip(table, routes, strict=True):
        standing = [route for route in mine if plan.groups[columns[route.group]].replicas]
        total = sum(route.fraction for route in standing)
        for route in standing:
            cell = row[columns[route.group]]
            cell["fraction"] = route.fraction / total if total else 0.0
            cell["form"] = FORMS[route.form]
            cell["reserve"] = 0 if route.form == "none" else route.reserve_tokens
            cell["pooling"] = round(route.pooling_fraction * PER_MILLE)
            cell["share"] = route.pooling_fraction if route.form == "pooled" else 1.0
            cell["ordered"] = route.order != "fcfs"
            cell["resident"] = resident.get((route.class_, route.group), 0)
    return table


def _places(plan: Plan) -> Structured:
    places = np.zeros(len(plan.groups), PLACE)
    ends = np.cumsum([group.replicas for group in plan.groups])
    places["begin"], places["end"] = ends - [group.replicas for group in plan.groups], ends
    places["kv_tokens"] = [group.kv_tokens for group in plan.groups]
    places["max_num_seqs"] = [group.max_num_seqs for group in plan.groups]
    places["name_hash"] = [hashed(group.name.encode()) for group in plan.groups]
    return places


def replica_hashes(group: Group) -> list[int]:
    """What stands for the names of a group's replicas."""
    return [hashed(replica_url(group.name, number).encode()) for number in range(group.replicas)]


def _rows(plan: Plan, lobby: Lobby) -> Structured:
    rows = np.zeros(len(plan.classes), ROW)
    rows["ttft_s"] = [item.slo.ttft_seconds for item in plan.classes]
    rows["patience_s"] = rows["ttft_s"] if lobby.queue_wait_s is None else lobby.queue_wait_s
    rows["length"] = lobby.queue_length
    rows["head"] = rows["tail"] = NOBODY
    return rows


def _visits(plan: Plan, requests: Requests, classes: Ints, line: Ints, group_chances: Floats) -> Structured:
    visits = np.zeros(len(requests), VISIT)
    visits["arrival"], visits["class_index"], visits["line"] = requests.arrival_s, classes, line
    visits["due"] = requests.arrival_s + np.array([item.slo.ttft_seconds for item in plan.classes])[classes]
    visits["key"] = _keys(requests)
    drawn = np.floor(group_chances * WORDS).astype(np.int64)
    visits["group_key"] = np.where(visits["key"] == NO_KEY, drawn, visits["key"])
    visits["behind"] = NOBODY
    return visits


def _keys(requests: Requests) -> Ints:
    """Prefix keys (N,)."""
    ids = requests.hash_ids
    if ids is None:
        return np.full(len(requests), NO_KEY)
    known = np.minimum(np.broadcast_to(requests.cached, len(requests)) // ids.tokens, ids.count)
    last = ids.ids[ids.begin + np.maximum(known, 1) - 1]
    numbers = {int(number): hashed(key_bytes(int(number))) for number in np.unique(last)}
    return np.where(known > 0, [numbers[int(number)] for number in last], NO_KEY)


def key_bytes(identity: int) -> bytes:
    """The prefix key that stands for an id."""
    return identity.to_bytes(8, "little")
