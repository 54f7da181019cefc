"""Block coordinate descent against the program that it descends on, and the relaxation that bounds both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from benchmarks.optimizer import instances

from kvantile_optimizer import coefficients, descent, program
from kvantile_optimizer.coefficients import Tables
from kvantile_optimizer.problem import Problem
from kvantile_optimizer.program import Instance
from kvantile_optimizer.relaxation import Relaxation
from kvantile_optimizer.solver import GrowingLinearProgram
from tests.support.fleets import random_problem


def plenty() -> float:
    return 30.0


def posed(classes: int, pools: int, seed: int, **options: int | float) -> tuple[Problem, Tables, Instance]:
    problem = random_problem(classes, pools, seed, **options)
    return problem, coefficients.tables(problem), coefficients.first_instance(problem)


@pytest.mark.parametrize("seed", range(4))
def test_generated_columns_come_to_the_optimum_of_all_of_them(seed: int) -> None:
    problem, table, instance = posed(8, 3, seed, gpus=64)
    relaxed = Relaxation(problem, table, instance)
    assert relaxed.solve(plenty)
    whole = program.build(coefficients.with_every_column(problem, table, instance), prefixes=False)
    most = whole.program.most
    most[whole.unserved] = 0.0
    most[whole.replicas] = np.inf
    optimum = GrowingLinearProgram(whole.program, None, most).solve(10).objective
    assert not relaxed.unserved.any()
    assert relaxed.objective == pytest.approx(optimum, rel=2e-4)
    assert relaxed.bound <= optimum * (1 + 1e-7)
    assert relaxed.bound == pytest.approx(optimum, rel=2e-4)


@pytest.mark.parametrize(("seed", "gpus"), [(0, 16), (1, 16), (2, 2), (3, 2)])
def test_the_descent_is_near_the_exact_program_and_never_better_than_its_bound(seed: int, gpus: int) -> None:
    problem, table, instance = posed(4, 2, seed, gpus=gpus)
    exact = program.solve(coefficients.with_every_column(problem, table, instance), 30)
    found = descent.descend(problem, table, instance, plenty, 0)
    assert exact is not None
    assert found is not None
    assert found.decision.unserved @ problem.rates <= exact.unserved @ problem.rates + 1e-3
    assert exact.bound * (1 - 1e-6) <= found.decision.objective <= exact.objective * 1.01
    assert found.decision.bound <= exact.objective * (1 + 1e-6)


def test_a_turn_that_gains_much_is_followed_by_another() -> None:
    """Its second turn has thousands of columns and branches for a tenth of the way; ending there left 8 %."""
    problem, table, instance = instances.posed(instances.plan_of(7, 3, 892969304, gpus=16))
    exact = program.solve(coefficients.with_every_column(problem, table, instance), 30)
    found = descent.descend(problem, table, instance, plenty, 0)
    assert exact is not None
    assert found is not None
    assert found.decision.objective <= 1.01 * exact.objective


@pytest.mark.parametrize("prefix_share", [0.0, 0.5])
def test_no_block_raises_the_objective(prefix_share: float) -> None:
    found = descent.descend(*posed(12, 4, 5, prefix_share=prefix_share), plenty, 0)
    assert found is not None
    relaxation, *rest = [block.objective for block in found.blocks]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(rest))
    assert relaxation <= rest[-1]


def test_the_replicas_that_run_stay_while_no_plan_can_be_much_cheaper() -> None:
    problem, table, instance = posed(6, 3, 1)
    found = descent.descend(problem, table, instance, plenty, 0)
    assert found is not None
    running = found.decision.replicas.astype(float)
    again = descent.descend(problem, table, instance, plenty, 0, running=running, keep_within=0.5)
    assert again is not None
    assert again.kept
    assert (again.decision.replicas == running).all()
    more = replace(
        problem, workloads=[replace(w, requests_per_second=20 * w.requests_per_second) for w in problem.workloads]
    )
    grown = replace(instance, rates=20 * instance.rates)
    moved = descent.descend(more, coefficients.tables(more), grown, plenty, 0, running=running, keep_within=0.5)
    assert moved is not None
    assert not moved.kept


@pytest.mark.parametrize("left_s", [lambda: 0.0, lambda: -1.0])
def test_without_time_there_is_no_descent_or_a_sound_one(left_s: Callable[[], float]) -> None:
    problem, table, instance = posed(4, 2, 0)
    found = descent.descend(problem, table, instance, left_s, 0)
    if found is not None:
        use = program.uses(found.instance, found.instance.columns) * found.decision.fractions
        for row in use:
            carried = np.bincount(found.instance.columns.candidate, row, len(problem.candidates))
            assert (carried <= found.decision.replicas * (1 + 1e-6) + 1e-9).all()


@pytest.mark.parametrize("seed", [5, 12])
def test_pools_without_room_for_the_last_replica_have_a_plan(seed: int) -> None:
    # One pool, nearly full: a dive that opens what there is no room for ends in a program without a solution.
    problem, table, instance = posed(6, 1, seed, gpus=8, prefix_share=0.0)
    found = descent.descend(problem, table, instance, plenty, 0)
    assert found is not None
    assert program.fits(found.instance, found.decision.replicas)
