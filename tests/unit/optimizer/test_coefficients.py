"""The program's columns against the reservation's own functions."""

from __future__ import annotations

import numpy as np
import pytest

from kvantile_optimizer import coefficients, load, workload
from kvantile_optimizer.ambiguity import worst_case_loss
from kvantile_optimizer.problem import alone, capacities, first_guess, pose
from kvantile_optimizer.reservation import footprint
from tests.support.specs import make_class, make_serving_plan


@pytest.mark.parametrize(("radius", "tolerance"), [("0", 1e-9), ("25", 0.02)])
def test_a_column_costs_the_worst_case_loss_of_its_level(radius: str, tolerance: float) -> None:
    plan = make_serving_plan(
        classes=[make_class("chat", 6.0), make_class("code", 3.0, default=False, tpot=60)],
        robustness={"order": 2, "radius": radius},
    )
    problem = pose(plan, workload.of_plan(plan, {}))
    table = coefficients.tables(problem)
    capacity = capacities(problem, np.zeros(problem.allowed.shape), first_guess(problem))
    columns = coefficients.columns(problem, table, capacity, *coefficients.every_pair(table))
    for k in range(0, len(columns), 7):
        c, j = int(columns.class_index[k]), int(columns.candidate[k])
        price = coefficients.losses(problem, table, capacity, c, j)
        level = float(columns.reserve_tokens[k])
        lengths = problem.workloads[c].lengths
        worst = float(worst_case_loss(lengths, price, 2, problem.radii[c], [level])[0])
        cost = columns.memory_usd[k] + columns.preemption_usd[k]
        assert worst * (1 - 1e-9) <= cost <= worst * (1 + tolerance)
        held = footprint(problem.workloads[c], "pooled", [level], problem.pooling, problem.radii[c])[0]
        assert columns.footprint[k] == pytest.approx(held)
        assert columns.utilisation[k] == table.alone[c, j]


def test_levels_are_blocks_around_the_robust_one() -> None:
    plan = make_serving_plan()
    problem = pose(plan, workload.of_plan(plan, {}))
    levels = coefficients.tables(problem).levels[0]
    assert (levels % 16 == 0).all()
    assert 8 <= len(levels) <= 16
    assert (np.diff(levels) > 0).all()


def test_a_class_alone_takes_what_the_closed_forms_say() -> None:
    plan = make_serving_plan(classes=[make_class("chat", 6.0), make_class("code", 3.0, default=False, tpot=60)])
    problem = pose(plan, workload.of_plan(plan, {}))
    guess = first_guess(problem)
    found = alone(problem, guess)
    for j, candidate in enumerate(problem.candidates):
        for c in np.flatnonzero(problem.allowed[:, j]):
            one = load.capacity(
                candidate.step,
                problem.parts[c][0],
                candidate.tier.ttft_s,
                candidate.tier.tpot_s,
                candidate.tier.percentile,
                candidate.max_num_batched_tokens,
                candidate.kv_tokens,
                float(guess[j]),
            )
            assert one.utilisation - 0.021 <= found[c, j] <= one.utilisation


def test_the_step_and_the_sequences_of_a_group_follow_its_traffic() -> None:
    def sizes(tpot: int, output: int) -> set[tuple[int, int]]:
        answers = {"p50": output, "p90": 2 * output, "p99": 3 * output, "max": 4 * output}
        plan = make_serving_plan(classes=[make_class(rate=20.0, tpot=tpot, output=answers)])
        problem = pose(plan, workload.of_plan(plan, {}))
        return {(c.max_num_batched_tokens, c.max_num_seqs) for c in problem.candidates}

    assert max(step for step, _ in sizes(40, 200)) < max(step for step, _ in sizes(200, 200))
    assert max(seqs for _, seqs in sizes(100, 30)) < max(seqs for _, seqs in sizes(100, 900))
