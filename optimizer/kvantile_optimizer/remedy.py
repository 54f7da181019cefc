"""What cannot be served, which row stands in the way, and what would lift it: a number a person can act on.

A class that no candidate fits has its nearest miss from the candidates. For the rest the program is solved once more
with pools that may grow, at a price: what it buys is what was missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvantile_optimizer.coefficients import Tables
from kvantile_optimizer.descent import whole_or_descent
from kvantile_optimizer.plan import Unserved
from kvantile_optimizer.problem import Problem
from kvantile_optimizer.program import Array, Instance, no_columns

EXTRA_GPU_PRICE = 1000.0
"""Times the pool's price: dear enough that none is bought where replicas could be moved instead."""


def unserved(
    problem: Problem,
    table: Tables,
    instance: Instance,
    fractions: Array,
    left_s: Callable[[], float],
    seed: int,
) -> list[Unserved]:
    """One entry for each class with traffic that is not served; `fractions` (C,) say how much."""
    short = [int(c) for c in np.flatnonzero(fractions > 0)]
    lacking = [c for c in short if c not in problem.misfits]
    more = _more_gpus(problem, table, instance, lacking, left_s, seed) if lacking else None
    return [_entry(problem, c, float(fractions[c]), more) for c in short]


def _entry(problem: Problem, c: int, fraction: float, more_gpus: str | None) -> Unserved:
    name = problem.workloads[c].name
    miss = problem.misfits.get(c)
    if miss is not None:
        constraint, remedy = miss.constraint, miss.remedy
    elif more_gpus is None:
        constraint, remedy = "gpus", "more GPUs; how many could not be worked out within the time limit"
    elif more_gpus:
        constraint, remedy = "gpus", more_gpus
    else:
        item = problem.serving_plan.spec.classes[c]
        constraint = "ttft"
        remedy = (
            f"no number of GPUs meets TTFT {item.slo.ttft_milliseconds} ms and TPOT {item.slo.tpot_milliseconds} ms at "
            f"P{item.slo.percentile} for arrivals of burstiness {problem.workloads[c].burstiness:.3g}: raise a target"
        )
    return Unserved.model_validate({"class": name, "fraction": fraction, "constraint": constraint, "remedy": remedy})


def _more_gpus(
    problem: Problem, table: Tables, instance: Instance, lacking: list[int], left_s: Callable[[], float], seed: int
) -> str | None:
    """What would have to be bought; empty when nothing helps, None when the time was over."""
    if not table.alone.any():
        return ""
    if left_s() <= 0:
        return None
    wider = replace(instance, extra_gpu_price=EXTRA_GPU_PRICE, keep_replicas=False, columns=no_columns())
    decision = whole_or_descent(problem, table, wider, left_s, seed)
    if decision is None:
        return None
    if any(decision.unserved[c] > 0 for c in lacking):
        return ""
    bought = [
        f"{count} more {pool.gpu.name} in pool {pool.name}"
        for pool in problem.pools
        if (count := decision.extra_gpus.get(pool.name, 0)) > 0
    ]
    return " and ".join(bought)
