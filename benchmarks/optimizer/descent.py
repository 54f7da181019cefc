"""Block coordinate descent against the exact program, how far it goes, and how its time grows.

Both solvers get the same program of random instances, columns and all; the exact one is HiGHS on every column there is.
Times are of the solvers alone, from the tables of coefficients to the answer; those of whole plans say so. A plan of a
thousand classes is made in a process of its own, so that its memory can be told.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np

from benchmarks.optimizer import instances
from benchmarks.optimizer.row import Row, Run, Setting, Target
from kvantile_optimizer import coefficients, descent, planner, program, workload
from kvantile_optimizer.coefficients import Tables
from kvantile_optimizer.problem import Problem
from kvantile_optimizer.program import Decision, Instance
from kvantile_optimizer.solver import SolveStatus

INSTANCES_A_RUN, QUICK_INSTANCES = 10, 2
"""Of five runs."""
EXACT_LIMIT_S = 60.0
LARGE, QUICK_LARGE = (100, 10), (20, 4)
"""Classes and pools of the timed comparison and of the re-plan."""
GAP = 0.01
HUGE, QUICK_HUGE = (1000, 50), (60, 10)
SIZES_OF_CLASSES, SIZES_OF_POOLS = (50, 100, 200, 400, 800), (5, 10, 20, 40, 50)
CLASSES_FOR_POOLS, POOLS_FOR_CLASSES = 200, 10
LONG_S = 300.0
MOVED = 1.1


def against_exact(setting: Setting, seed: int) -> Run:
    """How much dearer than the exact program's answer the descent's is, and whether it is below its bound."""
    above, below, notes = [], 0.0, {}
    for number in setting.watch.within(range(QUICK_INSTANCES if setting.quick else INSTANCES_A_RUN)):
        rng = np.random.default_rng((seed, number))
        size = int(rng.integers(3, 10)), int(rng.integers(2, 5))
        spec = instances.plan_of(*size, int(rng.integers(1 << 30)), gpus=int(rng.choice([4, 16])))
        problem, table, instance = instances.posed(spec)
        exact = program.solve(coefficients.with_every_column(problem, table, instance), EXACT_LIMIT_S)
        if exact is None or exact.status != SolveStatus.OPTIMAL:
            notes[spec.metadata.name] = "left out: the exact program did not close it"
            continue
        found = _descended(problem, table, instance)
        if abs((found.unserved - exact.unserved) @ problem.rates) > 1e-4 * problem.rates.sum():
            notes[spec.metadata.name] = "left out: what is served differs, so costs do not compare"
            continue
        above.append(100 * (found.objective / exact.objective - 1))
        below = max(below, 100 * (1 - found.objective / exact.bound))
        if above[-1] > 1:
            notes[spec.metadata.name] = f"{above[-1]:.2f} % above"
    return Run({"worst": max(above), "median": statistics.median(above), "below": below, "count": len(above)}, notes)


def _descended(problem: Problem, table: Tables, instance: Instance, gap: float = descent.ENOUGH) -> Decision:
    began = time.perf_counter()
    found = descent.descend(problem, table, instance, lambda: began + LONG_S - time.perf_counter(), 0, gap=gap)
    assert found is not None
    return found.decision


def speed(setting: Setting, seed: int) -> Run:
    """How many times as long as the descent the exact program takes to a gap of 1 %."""
    size = QUICK_LARGE if setting.quick else LARGE
    problem, table, instance = instances.posed(instances.plan_of(*size, seed, gpus=64, prefix_share=0.0))
    began = time.perf_counter()
    found = _descended(problem, table, instance, GAP)
    ours_s, began = time.perf_counter() - began, time.perf_counter()
    exact = program.solve(coefficients.with_every_column(problem, table, instance), LONG_S, gap=GAP)
    exact_s = time.perf_counter() - began
    assert exact is not None
    gap = 100 * (1 - found.bound / found.objective)
    notes = {f"{size[0]} classes, {size[1]} pools": f"exact {exact_s:.2f} s, descent {ours_s:.3f} s to {gap:.2f} %"}
    return Run({"ratio": exact_s / ours_s, "gap": gap, "dearer": 100 * (found.objective / exact.objective - 1)}, notes)


def scale(setting: Setting, seed: int) -> Run:
    """Seconds, memory and gap of a whole plan of a thousand classes and fifty pools, by the closed forms."""
    classes, pools = QUICK_HUGE if setting.quick else HUGE
    code = f"from benchmarks.optimizer import descent; descent.plan_alone({classes}, {pools}, {seed})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return Run(figures, {"candidates of a pool": f"{figures['candidates'] / pools:.1f}"})


def plan_alone(classes: int, pools: int, seed: int) -> None:
    """Makes one plan and prints its figures as JSON."""
    import resource

    spec = instances.plan_of(classes, pools, seed, gpus=8)
    began = time.perf_counter()
    workloads = workload.of_plan(spec, {})
    plan = planner.make_plan(spec, workloads, rehearsed=False, time_limit_s=LONG_S)
    seconds = time.perf_counter() - began
    gibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    candidates = len(instances.posed(spec)[0].candidates)
    print(json.dumps({"seconds": seconds, "GiB": gibibytes, "gap": 100 * plan.gap, "candidates": candidates}))


def replan(setting: Setting, seed: int) -> Run:
    """How many times as long as a re-plan, after one class's rate has moved by a tenth, the first plan takes."""
    spec = instances.plan_of(*(QUICK_LARGE if setting.quick else LARGE), seed)
    workloads = workload.of_plan(spec, {})
    began = time.perf_counter()
    running = planner.make_plan(spec, workloads, rehearsed=False, time_limit_s=LONG_S)
    cold_s = time.perf_counter() - began
    moved = int(np.random.default_rng(seed).integers(len(workloads)))
    faster = replace(workloads[moved], requests_per_second=MOVED * workloads[moved].requests_per_second)
    changed = [*workloads[:moved], faster, *workloads[moved + 1 :]]
    began = time.perf_counter()
    again = planner.make_plan(spec, changed, rehearsed=False, time_limit_s=LONG_S, current=running)
    warm_s = time.perf_counter() - began
    notes = {f"seed {seed}": f"cold {cold_s:.2f} s, warm {warm_s:.3f} s, then {again.objective_usd_per_hour:.2f} $/h"}
    return Run({"ratio": cold_s / warm_s}, notes)


def growth(setting: Setting, seed: int) -> Run:
    """The exponents with which the time of a whole plan grows with classes and with pools."""
    most = 2 if setting.quick else len(SIZES_OF_CLASSES)
    by_classes = {size: _plan_seconds(size, POOLS_FOR_CLASSES, seed) for size in SIZES_OF_CLASSES[:most]}
    by_pools = {size: _plan_seconds(CLASSES_FOR_POOLS, size, seed) for size in SIZES_OF_POOLS[:most]}
    notes = {
        name: ", ".join(f"{size}: {seconds:.2f} s" for size, seconds in found.items())
        for name, found in (("classes", by_classes), ("pools", by_pools))
    }
    return Run({"classes": _exponent(by_classes), "pools": _exponent(by_pools)}, notes)


def _plan_seconds(classes: int, pools: int, seed: int) -> float:
    spec = instances.plan_of(classes, pools, seed, gpus=64)
    workloads = workload.of_plan(spec, {})
    began = time.perf_counter()
    planner.make_plan(spec, workloads, rehearsed=False, time_limit_s=LONG_S)
    return time.perf_counter() - began


def _exponent(seconds: dict[int, float]) -> float:
    """The slope of log time over log size, by least squares."""
    sizes, times = np.log(list(seconds)), np.log(list(seconds.values()))
    return float(np.polyfit(sizes, times, 1)[0])


ROWS = (
    Row(
        "descent",
        "BCD against the exact program where that closes, %",
        (
            Target("worst", 1.0, "at most", over_runs="worst", what="above the exact answer, worst instance"),
            Target("median", 0.2, "at most", what="above it, median instance"),
            Target("below", 0.01, "at most", over_runs="worst", what="below the exact bound"),
        ),
        against_exact,
        limit_s=900,
    ),
    Row(
        "descent-speed",
        "BCD against the exact program to 1 % gap, 100 classes, 10 pools",
        (
            Target("ratio", 20.0, "at least", what="times as fast"),
            Target("gap", 1.0, "at most", over_runs="worst", what="its own gap, %"),
        ),
        speed,
        limit_s=600,
        alone=True,
    ),
    Row(
        "descent-scale",
        "1,000 classes, 50 pools, 12 candidates and more in each",
        (
            Target("seconds", 30.0, "at most", what="seconds of a whole plan"),
            Target("GiB", 2.0, "at most", what="memory, GiB"),
            Target("gap", 2.0, "at most", over_runs="worst", what="gap to a proven bound, %"),
        ),
        scale,
        limit_s=900,
        alone=True,
    ),
    Row(
        "descent-replan",
        "re-plan when one class's rate moved by 10 %, 100 classes, 10 pools",
        (Target("ratio", 10.0, "at least", what="times as fast as the first plan"),),
        replan,
        limit_s=300,
        alone=True,
    ),
    Row(
        "descent-growth",
        "growth of a plan's time over five sizes, exponents",
        (
            Target("classes", 2.0, "at most", what="with classes"),
            Target("pools", 2.0, "at most", what="with pools"),
        ),
        growth,
        limit_s=900,
        alone=True,
    ),
)
