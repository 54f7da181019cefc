"""Chooses how a group's engines admit, by a race: form, phi, reservation and, where it is free, order.

All candidates replay the same requests; the better half goes on to more of them (successive halving: Karnin, Koren and
Somekh 2013). What counts is goodput, the share of requests that meet both targets. Of the finalists within one standard
error of the best, on the same requests, those stay that have least to compute again, since that is money, and of them
those with the lowest P99 of TTFT, each time within one standard error; then the order of the list decides: what the
plan reserves comes first, because it costs nothing here and guards against what the record does not show. Nothing is
set by hand but the grid and the hundredth of goodput that ties may cost at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvantile_optimizer.plan import Form
from kvantile_optimizer.rehearsal.scene import Manner, Scene, Take
from kvantile_optimizer.simulator.state import Floats
from kvantile_optimizer.waiting import Order

PHIS = (0.1, 0.05, 0.02, 0.01, 0.25, 0.5)
"""Pooling fractions, geometric about the usual one: neighbours differ by less goodput than seeds do."""
FRACTILES = (0.9, 0.5, 0.99)
"""Reservations beside the plan's own. Under `pooled` a longer reservation acts like a larger phi, so few do."""
HEATS = ((1, 0.2), (2, 0.2), (2, 0.5), (4, 0.5))
"""New replays in each round and their share of the usual requests. Half as many candidates get about twice as many: a
queue that grows for long tells a good manner from a bad one late."""

SURE_HEATS = 3
"""After so many the preferred manner wins if it is perfect: those of the first two rounds."""

SURELY_LOST = 0.01
"""Goodput that may be given up for less to compute again: what the choice is held to against hindsight."""

ORDERS: dict[str, tuple[Order, ...]] = {
    "Slack": ("slack",),
    "Deadline": ("deadline",),
    "FirstCome": ("fcfs",),
    "Auto": ("slack", "deadline", "fcfs"),
}
FORMS: dict[str, tuple[Form, ...]] = {
    "Auto": ("pooled", "none", "held"),
    "Pooled": ("pooled",),
    "None": ("none",),
    "Held": ("held",),
    "Advisory": ("none",),
}
"""What `spec.engine.reservation` leaves open; an engine that is only advised admits as if nothing were reserved."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a candidate did in each heat (H,)."""

    goodput: Floats
    recomputed_s: Floats
    ttft_s: Floats
    """P99."""

    @classmethod
    def of(cls, takes: list[Take]) -> Score:
        """The scores of replays."""
        return cls(
            np.array([take.goodput for take in takes]),
            np.array([take.recomputed_s for take in takes]),
            np.array([np.percentile(take.ttft_s, 99) for take in takes]),
        )


def candidates(scene: Scene, reservation: str, order: str) -> list[Manner]:
    """What may be chosen under `reservation` and `order` of the spec's engine, the preferred first among equals."""
    return [
        Manner(form, phi, reserve, each)
        for each in ORDERS[order]
        for form in FORMS[reservation]
        for phi in (PHIS if form == "pooled" else (1.0,))
        for reserve in (_reserves(scene) if form != "none" else [tuple(0 for _ in scene.parts)])
    ]


def _reserves(scene: Scene) -> list[tuple[int, ...]]:
    """Tokens for each class: what the plan reserves, and quantiles of its answers, in whole blocks."""
    block = scene.group.block_size
    own = tuple(part.route.reserve_tokens for part in scene.parts)
    quantiles = [
        tuple(math.ceil(part.workload.lengths.quantile(fractile) / block) * block for part in scene.parts)
        for fractile in FRACTILES
    ]
    return list(dict.fromkeys([own, *quantiles] if any(own) else quantiles))


def race(
    scene: Scene,
    manners: list[Manner],
    seed: int,
    left_s: Callable[[], float],
    *,
    replicas: int | None = None,
    speed: float = 1.0,
) -> Manner | None:
    """The best of `manners` at the scene's load, or with `replicas` replicas and requests `speed` times as fast.

    None when no time was left for one heat.
    """
    alive, takes, heat = manners, {manner: list[Take]() for manner in manners}, 0
    if len(manners) == 1:
        return manners[0]
    for replays, share in HEATS:
        # All in the first round, which has nothing to go by.
        alive = _better_half(_different(alive, takes), takes) if heat else alive
        if len(alive) == 1 or (heat >= SURE_HEATS and _is_perfect(takes[alive[0]])):
            return alive[0]
        for _ in range(replays):
            if left_s() <= 0:
                return _best(alive, takes)
            for manner in alive:
                count = round(share * scene.count)
                takes[manner].append(scene.replay(manner, seed + heat, replicas=replicas, speed=speed, count=count))
            heat += 1
    return _best(alive, takes)


def _different(alive: list[Manner], takes: dict[Manner, list[Take]]) -> list[Manner]:
    """Those that did not admit every request exactly as an earlier one: with memory to spare one is left."""
    first: dict[tuple[float, ...], Manner] = {}
    for manner in alive:
        seen = [(take.recomputed_s, float(take.ttft_s.sum()), float(np.nansum(take.tpot_s))) for take in takes[manner]]
        first.setdefault(tuple(value for each in seen for value in each), manner)
    return list(first.values())


def _is_perfect(takes: list[Take]) -> bool:
    """Whether every request met its targets and nothing was computed again, so that no rival could be better."""
    return all(take.goodput == 1.0 and take.recomputed_s == 0.0 for take in takes)


def _better_half(alive: list[Manner], takes: dict[Manner, list[Take]]) -> list[Manner]:
    """Half of them, at least two where there are as many, by mean goodput; the earlier of equals."""
    goodput = np.array([np.mean([take.goodput for take in takes[manner]]) for manner in alive])
    kept = np.sort(np.argsort(-goodput, kind="stable")[: max(2, math.ceil(len(alive) / 2))])
    return [alive[place] for place in kept]


def _best(alive: list[Manner], takes: dict[Manner, list[Take]]) -> Manner | None:
    if not takes[alive[0]]:
        return None
    scores = [Score.of(takes[manner]) for manner in alive]
    missed = [1 - score.goodput for score in scores]
    places = _least(list(range(len(alive))), missed, SURELY_LOST)
    for costs in ([score.recomputed_s for score in scores], [score.ttft_s for score in scores]):
        places = _least(places, costs)
    return alive[places[0]]


def _least(places: list[int], costs: list[Floats], most: float = math.inf) -> list[int]:
    """Those of `places` whose `costs` (H,) are on average within one standard error of the least.

    And surely, by two more of them, within `most` of it: where heats differ much, all could be called equal.
    """
    least = min(places, key=lambda place: (costs[place].mean(), place))
    kept = []
    for place in places:
        above = costs[place] - costs[least]
        error = above.std(ddof=1) / math.sqrt(len(above)) if len(above) > 1 else 0.0
        if above.mean() <= error and above.mean() + 2 * error <= most:
            kept.append(place)
    return kept
