"""Makes a plan: pose the problem, solve until the answer holds, and put it into words.

A class that cannot be served is never an error: the plan says what stands in the way and what would lift it.
"""

from __future__ import annotations

import time

from kvantile_optimizer import remedy
from kvantile_optimizer.assembly import assemble
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.problem import pose
from kvantile_optimizer.settle import Method, prefer_current, settle
from kvantile_optimizer.spec import ServingPlan
from kvantile_optimizer.workload import Workload


def make_plan(
    serving_plan: ServingPlan,
    workloads: list[Workload],
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    current: Plan | None = None,
    method: Method = "bcd",
) -> Plan:
    """Plans `serving_plan` for `workloads`, one for each of its classes in order.

    `method` is block coordinate descent, or the whole program at once, which takes long beyond some twenty classes.
    `current` is the plan that runs: starting replicas costs, and it stays while the gain is below the hysteresis.
    The time limit is for all solves together. Raises InputError for a GPU or model that nobody knows, WorkError when
    the limit came before any plan.
    """
    started = time.perf_counter()

    def left_s() -> float:
        return started + time_limit_s - time.perf_counter()

    problem = pose(serving_plan, workloads)
    settled = settle(problem, left_s, seed, current, method)
    if current is not None and left_s() > 0:
        settled = prefer_current(problem, settled, current, left_s, seed)
    unserved = remedy.unserved(problem, settled.tables, settled.instance, settled.decision.unserved, left_s, seed)
    return assemble(problem, settled, unserved, method, seed, time.perf_counter() - started)
