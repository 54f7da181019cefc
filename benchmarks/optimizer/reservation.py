"""How long a robust reservation for a million samples takes, and that branch and bound finds the cheapest block.

256 reservations for 1,000,000 log-normal samples with L = 4,096 and a fixed charge, histogram included: all of them
priced at once, and the best one found on a grid of as many blocks. The larger of both times at two radii counts, the
median of three repetitions of each. Every block is searched on 40 further random instances a run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.optimizer.row import Row, Run, Setting, Target
from kvantile_optimizer.ambiguity import Losses, Order, worst_case_loss
from kvantile_optimizer.reservation import robust_reservation
from kvantile_optimizer.workload import Lengths

SAMPLES, QUICK_SAMPLES = 1_000_000, 20_000
LONGEST, LEVELS = 4096, 256
RADII = (5.0, 60.0)
REPETITIONS = 3
INSTANCES, QUICK_INSTANCES = 40, 4
ORDERS: tuple[Order, Order] = (1, 2)


def run(setting: Setting, seed: int) -> Run:
    """Milliseconds at each order, and how much dearer than the cheapest block the reservation is at most."""
    rng = np.random.default_rng(seed)
    samples = np.clip(np.rint(rng.lognormal(5, 1, QUICK_SAMPLES if setting.quick else SAMPLES)), 1, LONGEST)
    figures = {f"order {order}": max(_milliseconds(samples, order, radius) for radius in RADII) for order in ORDERS}
    dearer = [
        _dearer(rng, place) for place in setting.watch.within(range(QUICK_INSTANCES if setting.quick else INSTANCES))
    ]
    return Run({**figures, "dearer": max(dearer)})


def _milliseconds(samples: np.ndarray[tuple[int], np.dtype[np.float64]], order: Order, radius: float) -> float:
    losses, weights, block = Losses(over=1.0, under=9.0, fixed=100.0), np.ones(len(samples)), LONGEST // LEVELS
    levels = np.arange(1, LEVELS + 1) * float(block)

    def all_levels() -> None:
        worst_case_loss(Lengths.of(samples, weights, LONGEST, len(samples)), losses, order, radius, levels)

    def the_best() -> None:
        robust_reservation(Lengths.of(samples, weights, LONGEST, len(samples)), losses, order, radius, block)

    return max(_timed(all_levels), _timed(the_best))


def _timed(action: Callable[[], None]) -> float:
    found = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        action()
        found.append(1000 * (time.perf_counter() - began))
    return statistics.median(found)


def _dearer(rng: np.random.Generator, place: int) -> float:
    """Relative distance of a reservation from the cheapest of all blocks; the kind of instance goes by `place`."""
    points, upper = int(rng.integers(1, 40)), int(rng.integers(20, 600))
    on_line, order = place % 4 == 3, ORDERS[place % 2]
    weights = np.ones(points) if place % 3 else rng.random(points)
    lengths = Lengths.of(rng.integers(1, upper + 1, points), weights, math.inf if on_line else upper, points)
    over, under = rng.uniform(0.1, 5, 2)
    losses = Losses(float(over), float(under), float(rng.choice([0.0, 1.0, 30.0, 1000.0])))
    radius, block = float(rng.choice([0.0, 0.5, 8.0, 90.0])), int(rng.choice([1, 7, 16]))
    found = robust_reservation(lengths, losses, order, radius, block)
    every = np.arange(0, 20 * upper if on_line else upper + block, block)
    cheapest = float(worst_case_loss(lengths, losses, order, radius, every).min())
    return found.worst_case_loss / max(cheapest, 1e-12) - 1


ROWS = (
    Row(
        "reservation",
        f"robust reservation, {SAMPLES:,} samples, {LEVELS} levels, fixed charge",
        (
            Target("order 1", 30, "at most", "{:.0f} ms"),
            Target("order 2", 300, "at most", "{:.0f} ms"),
            Target("dearer", 1e-9, "at most", "{:.1e}", "worst", "dearer than the cheapest of all blocks by"),
        ),
        run,
        limit_s=60,
        alone=True,
    ),
)
