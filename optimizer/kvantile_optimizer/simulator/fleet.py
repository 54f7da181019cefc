"""Replays classified requests through a plan: its groups, their replicas, and what the routes reserve.

With a lobby, requests go through the gateway's own rules (`gateway`): hashed keys and the books of the fractions choose
groups, prefix and load choose replicas, and what finds every replica full waits, or is refused when that takes too
long. Without one, each request draws a group by its class's fractions among those that could hold it (what a class's
fractions leave unserved goes where the rest goes: the gateway sheds nothing), then takes its group's least loaded
replica and waits there. A request that no group could hold is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvantile_optimizer.errors import InputError
from kvantile_optimizer.figures import Answers
from kvantile_optimizer.plan import Group, Plan, Route
from kvantile_optimizer.simulator.lobby import Lobby, gateway_of, replica_hashes
from kvantile_optimizer.simulator.outcome import Outcome
from kvantile_optimizer.simulator.replica import (
    Policy,
    ReplicaSpec,
    Requests,
    check,
    replica_records,
    request_records,
    run,
)
from kvantile_optimizer.simulator.state import NOBODY, Floats, Ints, Structured


@dataclass(frozen=True, slots=True, eq=False)
class PlanOutcome:
    """What N requests got from a plan; `figures` turns it into rows."""

    plan: Plan
    requests: Requests
    class_index: Ints
    """(N,) into the plan's classes."""
    group_index: Ints
    """(N,) into the plan's groups; -1 for what was refused."""
    reserve: Ints
    """(N,) tokens set aside at first."""
    first_replicas: Ints
    """(G + 1,) where each group's replicas begin among all."""
    outcome: Outcome

    @property
    def answers(self) -> Answers:
        """The same for the arithmetic of `kvantile_optimizer.figures`."""
        slos = [item.slo for item in self.plan.classes]
        return Answers(
            arrival_s=self.outcome.arrival_s,
            first_s=self.outcome.first_s,
            last_s=self.outcome.last_s,
            tokens=self.outcome.output,
            whole=self.outcome.served,
            ttft_target_s=np.array([slo.ttft_seconds for slo in slos])[self.class_index],
            tpot_target_s=np.array([slo.tpot_seconds for slo in slos])[self.class_index],
        )


def simulate_plan(
    plan: Plan,
    requests: Requests,
    class_index: npt.ArrayLike,
    seed: int = 0,
    *,
    policy: Policy | None = None,
    lobby: Lobby | None = None,
) -> PlanOutcome:
    """What `requests` (N,) of the plan's classes `class_index` (N,) get from `plan`.

    The seed draws groups and breaks ties between replicas. A request's TTFT target is its class's, whatever
    `requests.ttft_s` says. A `policy` replaces what the routes reserve and their order. With a `lobby` the gateway's
    rules route and queue; a policy of another engine knows no gateway, so only one of the two may be given.
    Raises InputError as `simulate_replica` does, and for a plan without replicas.
    """
    check(requests)
    if not any(group.replicas for group in plan.groups):
        raise InputError("groups: found no replica, allowed a plan that serves something")
    if policy and lobby:
        raise InputError("lobby: found one beside a policy, allowed only with the plan's own routes")
    classes, rng = np.asarray(class_index, np.int64), np.random.default_rng(seed)
    drawn = rng.random(len(requests))
    holds = _holds(plan, requests)
    groups = _drawn_groups(plan, classes, holds, drawn)
    resident = {(prefix.class_, prefix.group): prefix.tokens for prefix in plan.resident_prefixes}
    if lobby:
        # Whichever group takes it later, it is refused at once only where none could hold it.
        groups = np.where(holds.any(axis=1), np.argmax(holds, axis=1), NOBODY)
        records = request_records(requests, Policy(), ReplicaSpec.of(plan.groups[0]))
        records["group"] = groups
    else:
        records = _records(plan, requests, classes, groups, policy, resident)
    records["chance"] = rng.random(len(records))
    machines = [
        replica_records(
            ReplicaSpec.of(group), policy or _engine(plan, group), group.replicas, pinned_blocks(plan, group)
        )
        for group in plan.groups
    ]
    for group, machine in zip(plan.groups, machines, strict=True):
        machine["name_hash"] = replica_hashes(group)
    at_gateway = gateway_of(plan, lobby, requests, classes, holds, drawn, resident) if lobby else None
    history = policy.history if policy else ()
    first_replicas = np.concatenate(([0], np.cumsum([group.replicas for group in plan.groups]))).astype(np.int64)
    outcome = run(records, np.concatenate(machines), first_replicas, history, requests.hash_ids, at_gateway)
    groups = np.where(outcome.served, records["group"], NOBODY)
    return PlanOutcome(plan, requests, classes, groups, records["reserve"].copy(), first_replicas, outcome)


def _holds(plan: Plan, requests: Requests) -> npt.NDArray[np.bool_]:
    """(N, G) whether the group has replicas that could hold the request."""
    longest = np.array([longest_tokens(plan, group) if group.replicas else 0 for group in plan.groups])
    # What its own prefix saves a request here is left out: near the limit it is sent elsewhere rather than refused.
    return np.asarray((requests.prompt + requests.output)[:, None] <= longest)


def _drawn_groups(plan: Plan, classes: Ints, holds: npt.NDArray[np.bool_], drawn: Floats) -> Ints:
    """The group of each request (N,), NOBODY where none could hold it; `drawn` (N,) are uniform."""
    fractions = np.zeros((len(plan.classes), len(plan.groups)))
    places = {item.name: place for place, item in enumerate(plan.classes)}
    columns = {group.name: place for place, group in enumerate(plan.groups)}
    for route in plan.routes:
        if plan.groups[columns[route.group]].replicas:
            fractions[places[route.class_], columns[route.group]] = route.fraction
    bounds = np.cumsum(fractions[classes] * holds, axis=1)
    return np.where(bounds[:, -1] > 0, np.argmax(bounds > drawn[:, None] * bounds[:, -1:], axis=1), NOBODY)


def longest_tokens(plan: Plan, group: Group) -> int:
    """Prompt and answer that a replica of the group can hold at most."""
    free = group.kv_tokens - pinned_blocks(plan, group) * group.block_size
    return min(free, group.max_model_len or plan.model.max_model_len)


def pinned_blocks(plan: Plan, group: Group) -> int:
    """Blocks of each replica of the group that resident prefixes keep for good; a part of a block is not cached."""
    tokens = [prefix.tokens for prefix in plan.resident_prefixes if prefix.group == group.name]
    return sum(count // group.block_size for count in tokens)


def _shared_blocks(records: Structured, resident_tokens: int, group: Group) -> Ints:
    """Blocks (N,) of the resident prefix that each request begins with; its last token is always computed."""
    shared = np.minimum(np.minimum(records["cached"], records["prompt"] - 1), resident_tokens)
    return np.asarray(shared // group.block_size)


def _records(
    plan: Plan,
    requests: Requests,
    classes: Ints,
    groups: Ints,
    policy: Policy | None,
    resident: dict[tuple[str, str], int],
) -> Structured:
    """The requests as records (N,), each as its route has it."""
    records = request_records(requests, Policy(), ReplicaSpec.of(plan.groups[0]))
    routes = {(route.class_, route.group): route for route in plan.routes}
    pairs = np.where(groups == NOBODY, NOBODY, classes * len(plan.groups) + groups)
    by_pair = np.argsort(pairs, kind="stable")
    for mine in np.split(by_pair, np.flatnonzero(np.diff(pairs[by_pair])) + 1):
        if pairs[mine[0]] == NOBODY:
            continue
        item, group = plan.classes[classes[mine[0]]], plan.groups[groups[mine[0]]]
        ours = policy.only(mine, len(records)) if policy else _policy(routes[item.name, group.name])
        ttft_s = math.inf if ours.order == "fcfs" else item.slo.ttft_seconds
        records[mine] = request_records(requests.only(mine, ttft_s), ours, ReplicaSpec.of(group))
        records["shared"][mine] = _shared_blocks(records[mine], resident.get((item.name, group.name), 0), group)
    records["group"] = groups
    return records


def _policy(route: Route) -> Policy:
    """What the gateway tells the engine: no target where first come is first served."""
    return Policy(route.form, route.reserve_tokens, route.pooling_fraction, route.order)


def _engine(plan: Plan, group: Group) -> Policy:
    """How the group's engines order what waits; a request without a target comes last, first come first served."""
    orders = {route.order for route in plan.routes if route.group == group.name}
    return Policy(order="deadline" if "deadline" in orders else "slack")
