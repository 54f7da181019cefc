"""How many replicas the replay confirms for a group, and how much load each of them can take.

A number of replicas holds when a fresh seed would meet every class's TTFT and TPOT target at the class's percentile:
the share of requests that miss, by the upper end of a one-sided prediction interval over the seeds (Student's t), is
what the percentile allows. The margin is thus the spread of the replays themselves, wide for bursts and narrow for
steady traffic. A single seed that misses settles that a number does not hold, since no interval ends below its own
largest value; so wrong guesses are cheap. The fewest replicas are found by bisection, then by how much faster the
requests may come there, which gives the load a replica can take without the rounding to whole ones. What order the
engines admit in is part of the replay: slack order gives up those that are late already, and so carries more at a
percentile than formulas about mean waiting say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from kvantile_optimizer.rehearsal.scene import Manner, Scene, Take
from kvantile_optimizer.simulator.state import Floats

SEEDS = 5
FEWEST_SEEDS = 3
"""For a verdict that a number holds."""
CONFIDENCE = 0.95
"""Of the prediction interval; plans are to hold in 95 of 100 cases."""
FEWEST_MISSES = 10
"""Classes of which less may miss a target in a replay are judged together: alone, one miss would be the verdict."""
MOST_GROWTH = 4
"""Times the planned replicas beyond which no more are tried: then memory or speed stands in the way, not number."""
PRECISION = 1.02
"""Ratio of the speeds between which the largest one that holds is left unknown."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the replay confirmed; None where it confirmed nothing or time was up."""

    replicas: int | None
    """The fewest that hold at the planned load."""
    speed: float = 1.0
    """How many times as fast the requests may come there."""

    def utilisation(self, scene: Scene) -> float | None:
        """Engine-seconds per second and replica there, counted as the plan's routes count them."""
        return scene.offered / self.replicas * self.speed if self.replicas else None


class _TimeUpError(Exception):
    """No time is left for another replay."""


@dataclass(frozen=True, slots=True, eq=False)
class Jury:
    """Judges replays of a scene, class by class, the rare ones together. U are what is judged apart."""

    weights: Floats
    """(U, C) how much each class counts, of sum 1."""
    allowed: Floats
    """(U,) share of the requests that may miss."""

    @classmethod
    def of(cls, scene: Scene) -> Jury:
        """The jury for a scene's classes and its usual number of requests."""
        rates = np.array([part.stream.per_second for part in scene.parts])
        allowed = np.array([part.allowed for part in scene.parts])
        rare = rates / rates.sum() * scene.count * allowed < FEWEST_MISSES
        rows = [row for row, alone in zip(np.eye(len(rates)), ~rare, strict=True) if alone]
        if rare.any():
            rows.append(np.where(rare, rates, 0.0) / rates[rare].sum())
        weights = np.array(rows)
        return cls(weights, weights @ allowed)

    def missed(self, take: Take) -> Floats:
        """(2, U) shares that missed TTFT and TPOT."""
        return np.asarray(take.misses @ self.weights.T)

    def holds(self, takes: list[Take]) -> bool:
        """Whether a fresh seed would meet all targets, judged by several.

        The bound for one future value of a normal sample, mean + t sd sqrt(1 + 1/n) (Hahn and Meeker, Statistical
        Intervals, 1991): nearly normal, since each miss is a mean of thousands of requests.
        """
        missed = np.array([self.missed(take) for take in takes])
        count = len(takes)
        width = stats.t.ppf(CONFIDENCE, count - 1) * math.sqrt(1 + 1 / count)
        upper = missed.mean(axis=0) + width * missed.std(axis=0, ddof=1)
        return bool((upper <= self.allowed + 1e-12).all())


def find(scene: Scene, manner: Manner, seed: int, takes: list[Take], left_s: Callable[[], float]) -> Capacity:
    """The capacity of `scene` under `manner`; `takes` are its replays by the SEEDS seeds from `seed` on, as planned."""
    jury = Jury.of(scene)

    def holds(replicas: int, speed: float = 1.0) -> bool:
        return _holds(scene, manner, jury, seed, replicas, speed, left_s)

    replicas: int | None = None
    try:
        replicas = _fewest(scene, jury.holds(takes), holds)
        return Capacity(replicas, _fastest(scene, replicas, 1.0, holds) if replicas else 1.0)
    except _TimeUpError:
        return Capacity(replicas)


def raised(scene: Scene, rival: Manner, seed: int, found: Capacity, left_s: Callable[[], float]) -> Capacity:
    """The capacity under `rival` if that holds where another manner ended, at `found`; else `found`."""
    jury = Jury.of(scene)

    def holds(replicas: int, speed: float = 1.0) -> bool:
        return _holds(scene, rival, jury, seed, replicas, speed, left_s)

    best = found
    try:
        if best.replicas is None or not holds(best.replicas, best.speed * PRECISION):
            return best
        best = Capacity(best.replicas, best.speed * PRECISION)
        while best.replicas and best.replicas - 1 >= scene.computing and holds(best.replicas - 1):
            best = Capacity(best.replicas - 1)
        return Capacity(best.replicas, _fastest(scene, best.replicas or 1, best.speed, holds))
    except _TimeUpError:
        return best


def _holds(
    scene: Scene, manner: Manner, jury: Jury, seed: int, replicas: int, speed: float, left_s: Callable[[], float]
) -> bool:
    takes: list[Take] = []
    for place in range(SEEDS):
        if left_s() <= 0:
            raise _TimeUpError
        takes.append(scene.replay(manner, seed + place, replicas=replicas, speed=speed))
        if (jury.missed(takes[-1]) > jury.allowed).any():
            return False
        # Of fewer seeds the interval is wider: what holds by them holds.
        if len(takes) >= FEWEST_SEEDS and jury.holds(takes):
            return True
    return False


def _fewest(scene: Scene, planned_holds: bool, holds: Callable[[int], bool]) -> int | None:
    """The fewest replicas that hold, by bisection; None when even MOST_GROWTH times the planned ones do not."""
    planned = scene.group.replicas
    # Fewer could not even do the computing.
    below, enough = math.ceil(scene.computing) - 1, planned
    if not planned_holds:
        below = planned
        while not holds(enough := min(2 * below, MOST_GROWTH * planned)):
            if enough >= MOST_GROWTH * planned:
                return None
            below = enough
    while enough - below > 1:
        middle = (below + enough) // 2
        if holds(middle):
            enough = middle
        else:
            below = middle
    return enough


def _fastest(scene: Scene, replicas: int, known: float, holds: Callable[[int, float], bool]) -> float:
    """The largest speed that `replicas` hold at, from the `known` one on, to PRECISION."""
    enough, beyond = known, replicas / scene.computing
    if replicas > 1:
        # One replica fewer did not hold, and there the load of each was this much higher.
        beyond = min(beyond, replicas / (replicas - 1))
    while beyond / enough > PRECISION:
        middle = math.sqrt(enough * beyond)
        if holds(replicas, middle):
            enough = middle
        else:
            beyond = middle
    return enough
