"""Radii chosen from records whose future is known to be like, or unlike, their past."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvantile_optimizer import radius
from kvantile_optimizer.ambiguity import Losses
from kvantile_optimizer.reservation import robust_reservation
from kvantile_optimizer.spec import ClassRobustness, Robustness
from kvantile_optimizer.workload import Array, Lengths, Record, Workload


def make_record(tokens: Array, upper: float = 2000) -> Record:
    return Record(np.asarray(tokens, float), np.zeros(len(tokens), bool), upper)


def answers(seed: int, count: int, mean: float = 200, sd: float = 50) -> Array:
    return np.clip(np.random.default_rng(seed).normal(mean, sd, count).round(), 1, 2000)


def make_workload(name: str, tokens: Array, upper: float = 2000) -> Workload:
    count = len(tokens)
    prompt, weight = np.full(count, 10.0), np.full(count, 1 / count)
    return Workload(name, 1.0, 1.0, prompt, tokens, weight, upper, 4096, count)


def test_a_future_like_the_past_needs_no_radius() -> None:
    assert radius.validated(make_record(answers(1, 1500)), 2) == 0


def test_a_drift_that_goes_on_is_worth_a_radius() -> None:
    drifting = np.concatenate([answers(seed, 100, 200 + 40 * seed, 20) for seed in range(6)])
    assert radius.validated(make_record(drifting), 2, [Losses(1, 19)]) > 0


def test_the_raw_distance_of_two_windows_is_never_the_radius() -> None:
    # A single jump makes the windows far apart, but no radius would have paid in the windows that follow.
    jump = np.concatenate([answers(1, 300, 400), answers(2, 900, 100)])
    assert radius.validated(make_record(jump), 2, [Losses(1, 4)]) == 0


def test_order_1_without_a_charge_is_the_sample_quantile_at_any_radius_so_none_is_taken() -> None:
    drifting = np.concatenate([answers(seed, 60, 200 + 40 * seed, 20) for seed in range(6)])
    assert radius.validated(make_record(drifting), 1) == 0


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([[1, 1, 1], [1, 1, 1]], 0),
        ([[1, 0.8, 0.7], [1, 0.8, 0.7]], 2),
        ([[1, 0.8, 0.6], [1, 0.8, 0.9]], 1),
        ([[1, 0.9, 0.2], [1, 0.9, 1.5]], 0),
    ],
)
def test_the_smallest_radius_within_one_standard_error_of_the_best_is_taken(
    costs: list[list[float]], expected: int
) -> None:
    assert radius.smallest_within_one_standard_error(np.array(costs, float)) == expected


def test_few_answers_get_the_standard_error_and_described_ones_nothing() -> None:
    tokens = answers(3, 60)
    assert radius.validated(make_record(tokens), 2) == pytest.approx(tokens.std() / np.sqrt(60))
    assert radius.standard_error(Lengths.of([10, 30], [1, 1], 100)) == 0


def test_an_asked_radius_is_taken_as_it_is_the_class_s_own_before_the_plan_s() -> None:
    workload = make_workload("chat", answers(4, 400))
    assert radius.of_class(workload, Robustness(radius="12.5")) == 12.5
    assert radius.of_class(workload, Robustness(radius="12.5"), ClassRobustness(radius="3")) == 3
    assert radius.of_class(workload, Robustness()) == pytest.approx(workload.lengths.std / 20)
    recorded = replace(workload, record=make_record(workload.output))
    assert radius.of_class(recorded, Robustness()) == radius.validated(make_record(workload.output), 2)


def test_the_ball_around_the_mean_reserves_what_scarf_says() -> None:
    ball = radius.around_mean(Lengths.of([100, 300], [1, 1], np.inf, 2))
    reserve = robust_reservation(ball.center, Losses(1, 9), 2, ball.radius).tokens
    assert reserve == pytest.approx(200 + 100 * (9 - 1) / (2 * 3), abs=1)


def test_ten_answers_are_weighed_by_leaving_one_out() -> None:
    losses = Losses(1, 9)
    chosen = [radius.automatic(make_record(answers(seed, 10)), losses, 2) for seed in range(6)]
    assert {ball.rule for ball in chosen} == {"sd / sqrt(N)", "mean and sd (Scarf)"}
    assert radius.automatic(make_record(answers(0, 10)), losses, 1).rule == "sd / sqrt(N)"


def test_the_better_of_both_rules_is_taken_where_one_is_clearly_better() -> None:
    # The sample quantile of two values is never between them, where half of the answers would have been cheap.
    record = make_record(np.array([100.0, 100.0, 100.0, 100.0]))
    assert radius.automatic(record, Losses(1, 9), 2).radius == 0


def test_a_single_answer_is_no_reason_to_fail() -> None:
    ball = radius.automatic(make_record(np.array([7.0])), Losses(1, 9), 2)
    assert (ball.radius, ball.center.mean) == (0, 7)


def test_a_tiny_class_borrows_from_all_classes_and_a_large_one_does_not() -> None:
    tiny, large = make_workload("tiny", answers(1, 10)), make_workload("large", answers(2, 400, 500))
    described = make_workload("described", answers(3, 20))
    borrowed, same, untouched = radius.borrowed([tiny, large, described])
    own = 10 / (10 + radius.FEW)
    assert borrowed.weight.sum() == pytest.approx(1)
    assert borrowed.lengths.mean > tiny.lengths.mean
    assert borrowed.weight[:10].sum() == pytest.approx(own)
    assert same is large
    assert any("only 10 requests are recorded" in note for note in borrowed.warnings)
    assert large.warnings == []
    assert untouched is not described  # 20 requests are few as well


def test_what_is_borrowed_fits_the_class() -> None:
    tiny, large = make_workload("tiny", answers(1, 10, 50, 5), 100), make_workload("large", answers(2, 400, 500))
    assert radius.borrowed([tiny, large])[0].output.max() <= 100
