"""Robust reservations: how long a million samples take, and how far the worst case is from a transport program.

    python benchmarks/bench_reservation.py

Bounds, on two cores: 256 reservations for 1,000,000 samples (seed 0, log-normal, L = 4,096), histogram included, within
30 ms at order 1 and 300 ms at order 2, both with a fixed charge; medians of five runs, the fastest and slowest beside
them. The worst case is held against the transport program of tests/unit/optimizer/test_ambiguity.py on 200 random
instances there; here the best reservation on the block grid is compared with a search of every block, on 200 others
(seed 1): order, support, charge, equal and random weights, whole kappa * N, and the dearer side all vary.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable

import numpy as np

from kvantile_optimizer.ambiguity import Losses, Order, worst_case_loss
from kvantile_optimizer.reservation import robust_reservation
from kvantile_optimizer.workload import Lengths

SAMPLES, LONGEST, LEVELS = 1_000_000, 4096, 256
RUNS = 5
BOUNDS_MS: dict[Order, float] = {1: 30, 2: 300}
INSTANCES = 200
ORDERS: tuple[Order, Order] = (1, 2)


def timed(action: Callable[[], object]) -> tuple[float, float, float]:
    """Median, least and most milliseconds of RUNS runs."""
    found = []
    for _ in range(RUNS):
        start = time.perf_counter()
        action()
        found.append(1000 * (time.perf_counter() - start))
    return statistics.median(found), min(found), max(found)


def speed() -> None:
    """Prints the times of 256 worst cases, and of a whole reservation on a grid of as many blocks."""
    rng = np.random.default_rng(0)
    samples = np.clip(np.rint(rng.lognormal(5, 1, SAMPLES)), 1, LONGEST)
    weights = np.ones(SAMPLES)
    losses = Losses(over=1.0, under=9.0, fixed=100.0)
    block = LONGEST // LEVELS
    levels = np.arange(1, LEVELS + 1) * float(block)
    print("order  radius  what          median ms   (least to most)   bound")
    for order, radius in itertools.product(ORDERS, (5.0, 60.0)):
        actions: dict[str, Callable[[], object]] = {
            "256 levels": lambda o=order, e=radius: worst_case_loss(  # type: ignore[misc]
                Lengths.of(samples, weights, LONGEST, SAMPLES), losses, o, e, levels
            ),
            "reservation": lambda o=order, e=radius: robust_reservation(  # type: ignore[misc]
                Lengths.of(samples, weights, LONGEST, SAMPLES), losses, o, e, block
            ),
        }
        for what, action in actions.items():
            median, least, most = timed(action)
            print(f"{order:5}  {radius:6}  {what:12}  {median:9.1f}   ({least:.1f} to {most:.1f})   {BOUNDS_MS[order]}")


def exactness() -> None:
    """Prints how often the reservation is a cheapest block, and the largest relative distance from it."""
    rng = np.random.default_rng(1)
    same, worst = 0, 0.0
    for number in range(INSTANCES):
        points, upper = int(rng.integers(1, 40)), int(rng.integers(20, 600))
        on_line = number % 4 == 3
        weights = np.ones(points) if number % 3 else rng.random(points)
        lengths = Lengths.of(rng.integers(1, upper + 1, points), weights, math.inf if on_line else upper, points)
        below = int(rng.integers(1, points + 1))
        over, under = (points + 1 - below, below) if number % 2 else rng.uniform(0.1, 5, 2)
        losses = Losses(float(over), float(under), float(rng.choice([0.0, 1.0, 30.0, 1000.0])))
        order, radius, block = ORDERS[number % 2], float(rng.choice([0.0, 0.5, 8.0, 90.0])), int(rng.choice([1, 7, 16]))
        found = robust_reservation(lengths, losses, order, radius, block)
        highest = 20 * upper if on_line else upper + block
        costs = worst_case_loss(lengths, losses, order, radius, np.arange(0, highest, block))
        same += found.tokens == block * int(np.argmax(costs <= costs.min() * (1 + 1e-9)))
        worst = max(worst, found.worst_case_loss / max(float(costs.min()), 1e-12) - 1)
    print(f"\nbest block found in {same} of {INSTANCES} instances; at most {worst:.1e} dearer")


def main() -> None:
    """Prints both tables."""
    speed()
    exactness()


if __name__ == "__main__":
    main()
