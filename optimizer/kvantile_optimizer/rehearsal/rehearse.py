"""A plan replays its own answer: `rehearse` chooses, counts, predicts and prices by simulation.

Group by group: a race chooses how the engines admit; replays of the choice with several seeds give what the plan
predicts; a bisection finds how few replicas would do; replays at other reservations price a shortage. The first two
are done for all groups before the third, that before the last, and only then predictions that still vary get more
seeds: time that runs out takes what matters least. What was not replayed keeps the plan's closed forms, and a warning
says so. The number of replays depends on the plan and not on the clock: two rehearsals that are not cut short are the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from kvantile_optimizer.plan import Plan, Prediction, Route
from kvantile_optimizer.rehearsal import capacity, choice, costs, predictions
from kvantile_optimizer.rehearsal.costs import ReservationCosts
from kvantile_optimizer.rehearsal.scene import MOST_REPLICAS, Manner, Part, Scene, Take, scenes
from kvantile_optimizer.workload import Workload

SEED_STEP = 1_000
"""Between the seeds of the race and those of the replays that judge its winner, who would else be judged by luck."""
RACE_SHARE = 0.5
"""Of the time that is left for each group, spent at most on its choice: a plan of unsure form that was replayed is
worth more than closed forms."""
MOST_SEEDS = 20
"""For predictions: near saturation each long queue is news, and no number of seeds would be enough."""
MOST_REPLAYED = 120_000
"""Requests in one replay of all groups together: with more groups each gets fewer, down to a twentieth of the usual."""


@dataclass(frozen=True, slots=True)
class GroupRehearsal:
    """What the replay says of one group."""

    manner: Manner
    """What was chosen; its reservations are in the order of `classes`."""
    classes: tuple[str, ...]
    goodput: float
    """Share of the requests that meet both targets, as planned."""
    misses: dict[str, float]
    """By class: the share that misses its TTFT or its TPOT target, whichever is larger, as planned."""
    holds: bool
    """Whether a fresh seed would meet every class's targets with the planned replicas."""
    replicas_needed: int | None = None
    """The fewest replicas that hold; None when no number did, or time was up."""
    confirmed_utilisation: float | None = None
    """Engine-seconds per second and replica, in the routes' own engine-seconds, that the replay confirms."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A plan after its rehearsal."""

    plan: Plan
    """With form, reservations, order and predictions as replayed."""
    groups: dict[str, GroupRehearsal] = field(default_factory=dict)
    """The groups that were replayed, by name."""
    costs: dict[str, ReservationCosts] = field(default_factory=dict)
    """By class; a class of several groups has their mean, by its fractions. Classes that time left out are absent."""


def rehearse(
    plan: Plan,
    workloads: list[Workload],
    *,
    reservation: str,
    order: str,
    seed: int,
    left_s: Callable[[], float],
) -> Rehearsal:
    """Rehearses `plan` with requests of `workloads`, one for each of its classes in order.

    `reservation` and `order` are the words of the spec's engine; what they fix is kept. `left_s` tells how many seconds
    there are; each replay takes a fraction of one, and none begins when they are over.
    """
    cast = _shortened(scenes(plan, workloads))
    played: dict[str, tuple[Scene, Manner, list[Take]]] = {}
    for place, scene in enumerate(cast):
        race_until_s = left_s() * (1 - RACE_SHARE / (len(cast) - place))
        found = _played(scene, reservation, order, seed, left_s, race_until_s)
        if found:
            played[scene.group.name] = found
    groups = {name: _judged(*found) for name, found in played.items()}
    for name, (scene, manner, takes) in played.items():
        confirmed = capacity.find(scene, manner, seed + SEED_STEP, takes, left_s)
        groups[name] = replace(
            groups[name], replicas_needed=confirmed.replicas, confirmed_utilisation=confirmed.utilisation
        )
    priced = {
        name: costs.calibrate(scene, _reserving(scene, manner), seed + SEED_STEP, groups[name].replicas_needed, left_s)
        for name, (scene, manner, _) in played.items()
    }
    for scene, manner, takes in played.values():
        takes += _more(scene, manner, seed, takes, left_s)
    # An engine that is only advised admits as if nothing were reserved; its hints stay what they are.
    changed = _predicted(plan if reservation == "Advisory" else _routed(plan, played), played)
    notes = _warnings(cast, groups)
    return Rehearsal(
        changed.model_copy(update={"warnings": [*plan.warnings, *notes]}), groups, _by_class(played, priced)
    )


def _shortened(cast: list[Scene]) -> list[Scene]:
    """The scenes with replays short enough for all of them together."""
    total = sum(scene.count for scene in cast)
    if total <= MOST_REPLAYED:
        return cast
    share = max(MOST_REPLAYED / total, 0.05)
    return [replace(scene, count=round(share * scene.count)) for scene in cast]


def _played(
    scene: Scene, reservation: str, order: str, seed: int, left_s: Callable[[], float], race_until_s: float
) -> tuple[Scene, Manner, list[Take]] | None:
    """The scene's best manner and its replays as planned; None when time was up.

    The race ends when no more than `race_until_s` is left; without a single heat the preferred manner wins.
    """
    manners = choice.candidates(scene, reservation, order)
    manner = choice.race(scene, manners, seed, lambda: left_s() - race_until_s) or manners[0]
    takes: list[Take] = []
    for place in range(capacity.SEEDS):
        if left_s() <= 0:
            return None
        takes.append(scene.replay(manner, seed + SEED_STEP + place))
    return scene, manner, takes


def _more(scene: Scene, manner: Manner, seed: int, takes: list[Take], left_s: Callable[[], float]) -> list[Take]:
    """Further replays as planned, until the predictions are steady."""
    more: list[Take] = []
    while left_s() > 0 and len(takes) + len(more) < MOST_SEEDS and not predictions.are_steady(scene, takes + more):
        more.append(scene.replay(manner, seed + SEED_STEP + len(takes) + len(more)))
    return more


def _judged(scene: Scene, manner: Manner, takes: list[Take]) -> GroupRehearsal:
    names = tuple(part.item.name for part in scene.parts)
    missed = np.mean([take.misses for take in takes], axis=0).max(axis=0)
    return GroupRehearsal(
        manner=manner,
        classes=names,
        goodput=float(np.mean([take.goodput for take in takes])),
        misses=dict(zip(names, missed.tolist(), strict=True)),
        holds=capacity.Jury.of(scene).holds(takes),
    )


def _routed(plan: Plan, played: dict[str, tuple[Scene, Manner, list[Take]]]) -> Plan:
    """The plan with the routes of what was played."""
    routes = {
        (part.item.name, name): _route(part, manner, tokens)
        for name, (scene, manner, _) in played.items()
        for part, tokens in zip(scene.parts, manner.reserve, strict=True)
    }
    return plan.model_copy(update={"routes": [routes.get((route.class_, route.group), route) for route in plan.routes]})


def _predicted(plan: Plan, played: dict[str, tuple[Scene, Manner, list[Take]]]) -> Plan:
    """The plan with the predictions of what was played."""
    told = {name: predictions.of_group(scene, takes) for name, (scene, _, takes) in played.items()}
    return plan.model_copy(
        update={
            "predictions": [_prediction(plan, before, played) for before in plan.predictions],
            "group_predictions": [told.get(before.group, before) for before in plan.group_predictions],
        }
    )


def _route(part: Part, manner: Manner, tokens: int) -> Route:
    reserves = manner.form != "none"
    return part.route.model_copy(
        update={
            "form": manner.form,
            "pooling_fraction": manner.phi,
            "order": manner.order,
            "reserve_tokens": tokens,
            "fractile": float(part.workload.lengths.cdf(tokens)) if reserves else 0.0,
        }
    )


def _prediction(plan: Plan, before: Prediction, played: dict[str, tuple[Scene, Manner, list[Take]]]) -> Prediction:
    """The class as replayed, if all of its groups were."""
    names = [route.group for route in plan.routes_of(before.class_)]
    if not names or any(name not in played for name in names):
        return before
    item = next(item for item in plan.classes if item.name == before.class_)
    return predictions.of_class(item, [(played[name][0], played[name][2]) for name in names]) or before


def _reserving(scene: Scene, manner: Manner) -> Manner:
    """The manner itself, or the first that reserves: without a reservation none is too short."""
    return manner if manner.form != "none" else choice.candidates(scene, "Pooled", "Slack")[0]


def _by_class(
    played: dict[str, tuple[Scene, Manner, list[Take]]], priced: dict[str, ReservationCosts | None]
) -> dict[str, ReservationCosts]:
    parts: dict[str, list[tuple[float, ReservationCosts]]] = {}
    for name, (scene, _, _) in played.items():
        found = priced[name]
        if found is None:
            continue
        for part in scene.parts:
            parts.setdefault(part.item.name, []).append((part.route.fraction, found))
    return {name: _mean(weighted) for name, weighted in parts.items()}


def _mean(weighted: list[tuple[float, ReservationCosts]]) -> ReservationCosts:
    total = sum(weight for weight, _ in weighted)
    return ReservationCosts(
        sum(weight * item.under_usd_per_token for weight, item in weighted) / total,
        sum(weight * item.fixed_usd for weight, item in weighted) / total,
        sum(weight * item.idle_usd_per_token for weight, item in weighted) / total,
    )


def _warnings(cast: list[Scene], groups: dict[str, GroupRehearsal]) -> list[str]:
    notes = []
    for scene in cast:
        name, replicas = scene.group.name, scene.group.replicas
        found = groups.get(name)
        if found is None:
            notes.append(f"group {name}: no time was left to replay it, so what it predicts are closed forms")
            continue
        if replicas > MOST_REPLICAS:
            notes.append(
                f"group {name}: {MOST_REPLICAS} of its {replicas:,} replicas were replayed, at the same load each"
            )
        if not found.holds:
            notes.append(_missed(name, replicas, found))
    return notes


def _missed(name: str, replicas: int, found: GroupRehearsal) -> str:
    worst = max(found.misses, key=lambda item: found.misses[item])
    lift = f"{found.replicas_needed} would do" if found.replicas_needed else "no number of replicas that was tried does"
    return (
        f"group {name}: replayed with {replicas} replicas it does not surely meet its targets, {worst} misses "
        f"{found.misses[worst]:.1%}; {lift}"
    )
