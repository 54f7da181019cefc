"""A plan replays its own answer: `rehearse` chooses, counts, predicts and prices by simulation.

Group by group: a race chooses how the engines admit; replays of the choice with several seeds give what the plan
predicts; a bisection finds how few replicas would do; replays at other reservations price a shortage. The first two
are done for all groups before the third, that before the last, and only then predictions that still vary get more
seeds: time that runs out takes what matters least. What was not replayed keeps the plan's closed forms, and a warning
says so. The number of replays depends on the plan and not on the clock: two rehearsals that are not cut short are the
same. `judge` asks only for the third, of a plan that is not yet sure to be the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from kvantile_optimizer.plan import Plan
from kvantile_optimizer.rehearsal import capacity, choice, costs, performance, revision
from kvantile_optimizer.rehearsal.capacity import Capacity
from kvantile_optimizer.rehearsal.costs import ReservationCosts
from kvantile_optimizer.rehearsal.performance import Performance
from kvantile_optimizer.rehearsal.scene import MOST_REPLICAS, Manner, Scene, scenes
from kvantile_optimizer.workload import Workload

RACE_SHARE = 0.5
"""Of the time that is left for each group, spent at most on its choice: a plan of unsure form that was replayed is
worth more than closed forms."""
MOST_REPLAYED = 60_000
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


def judge(
    plan: Plan,
    workloads: list[Workload],
    *,
    reservation: str,
    order: str,
    seed: int,
    left_s: Callable[[], float],
) -> dict[str, GroupRehearsal]:
    """Whether the groups of `plan` hold, by name, and how few replicas do: for a plan that may yet be thrown away.

    How the engines admit is not chosen at the planned load, only where capacity ends. Groups that there was no time for
    are absent.
    """
    cast = _shortened(scenes(plan, workloads))
    groups: dict[str, GroupRehearsal] = {}
    for place, scene in enumerate(cast):
        kept_s = left_s() * (1 - 1 / (len(cast) - place))

        def mine_s(kept_s: float = kept_s) -> float:
            return left_s() - kept_s

        if found := performance.preferred(scene, reservation, order, seed, mine_s):
            groups[scene.group.name] = _confirmed(found, *performance.confirm(found, mine_s))
    return groups


def rehearse(
    plan: Plan,
    workloads: list[Workload],
    *,
    reservation: str,
    order: str,
    seed: int,
    left_s: Callable[[], float],
    judged: Mapping[str, GroupRehearsal] | None = None,
) -> Rehearsal:
    """Rehearses `plan` with requests of `workloads`, one for each of its classes in order.

    `reservation` and `order` are the words of the spec's engine; what they fix is kept. `left_s` tells how many seconds
    there are; each replay takes a fraction of one, and none begins when they are over. How few replicas do is not asked
    again where the groups were `judged`.
    """
    known = judged or {}
    cast = _shortened(scenes(plan, workloads))
    played: dict[str, Performance] = {}
    for place, scene in enumerate(cast):
        name, race_until_s = scene.group.name, left_s() * (1 - RACE_SHARE / (len(cast) - place))
        confirmed = known[name].manner if name in known else None
        if found := performance.play(scene, reservation, order, seed, left_s, race_until_s, confirmed):
            played[name] = found
    groups = {
        name: _again(found, known[name]) if name in known else _confirmed(found, *performance.confirm(found, left_s))
        for name, found in played.items()
    }
    priced = {name: _priced(found, groups[name].replicas_needed, left_s) for name, found in played.items()}
    for found in played.values():
        performance.steady(found, left_s)
    # An engine that is only advised admits as if nothing were reserved; its hints stay what they are.
    chosen = plan if reservation == "Advisory" else revision.routed(plan, played)
    notes = [*plan.warnings, *_warnings(cast, groups)]
    whole = revision.predicted(chosen, played).model_copy(update={"warnings": notes})
    return Rehearsal(whole, groups, _by_class(played, priced))


def _shortened(cast: list[Scene]) -> list[Scene]:
    """The scenes with replays short enough for all of them together."""
    total = sum(scene.count for scene in cast)
    if total <= MOST_REPLAYED:
        return cast
    share = max(MOST_REPLAYED / total, 0.05)
    return [replace(scene, count=round(share * scene.count)) for scene in cast]


def _confirmed(played: Performance, found: Capacity, manner: Manner) -> GroupRehearsal:
    scene, takes = played.scene, played.takes
    names = tuple(part.item.name for part in scene.parts)
    missed = np.mean([take.misses for take in takes], axis=0).max(axis=0)
    return GroupRehearsal(
        manner=manner,
        classes=names,
        goodput=float(np.mean([take.goodput for take in takes])),
        misses=dict(zip(names, missed.tolist(), strict=True)),
        holds=capacity.Jury.of(scene).holds(takes),
        replicas_needed=found.replicas,
        confirmed_utilisation=found.utilisation(scene),
    )


def _again(played: Performance, known: GroupRehearsal) -> GroupRehearsal:
    """A group as it was played, with the capacity that is known of it and of its manner."""
    seen = _confirmed(played, Capacity(known.replicas_needed), played.manner)
    confirmed = played.manner == known.manner and known.replicas_needed == played.scene.group.replicas
    return replace(seen, holds=seen.holds or confirmed, confirmed_utilisation=known.confirmed_utilisation)


def _priced(played: Performance, replicas: int | None, left_s: Callable[[], float]) -> ReservationCosts | None:
    scene, manner = played.scene, played.manner
    if manner.form == "none":
        # Without a reservation none is too short.
        manner = choice.candidates(scene, "Pooled", "Slack")[0]
    return costs.calibrate(scene, manner, played.seed, replicas, left_s)


def _by_class(
    played: Mapping[str, Performance], priced: Mapping[str, ReservationCosts | None]
) -> dict[str, ReservationCosts]:
    parts: dict[str, list[tuple[float, ReservationCosts]]] = {}
    for name, performed in played.items():
        if found := priced[name]:
            for part in performed.scene.parts:
                parts.setdefault(part.item.name, []).append((part.route.fraction, found))
    return {name: costs.mean(weighted) for name, weighted in parts.items()}


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
    lift = f"{found.replicas_needed} would do" if found.replicas_needed else "no number was found that would do"
    return (
        f"group {name}: replayed with {replicas} replicas it does not surely meet its targets, {worst} misses "
        f"{found.misses[worst]:.1%}; {lift}"
    )
