"""The best reservation against exhaustive search, and footprints against a step-by-step count."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvantile_optimizer.ambiguity import Losses, Order, expected_loss, worst_case_loss
from kvantile_optimizer.plan import Form
from kvantile_optimizer.reservation import (
    footprint,
    robust_reservation,
)
from kvantile_optimizer.workload import Lengths, Workload


def make_lengths(seed: int, points: int = 20, upper: int = 100) -> Lengths:
    rng = np.random.default_rng(seed)
    return Lengths.of(rng.integers(1, upper + 1, points), rng.random(points), upper, points)


def make_workload(prompt: list[int], output: list[int], upper: int = 64) -> Workload:
    count = len(prompt)
    return Workload(
        "chat",
        1.0,
        1.0,
        np.array(prompt, float),
        np.array(output, float),
        np.full(count, 1 / count),
        upper,
        1024,
        count,
    )


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    order=st.sampled_from([1, 2]),
    under=st.floats(0.05, 40),
    fixed=st.sampled_from([0.0, 3.0, 100.0, 5000.0]),
    radius=st.floats(0, 120),
    block=st.sampled_from([1, 7, 16]),
)
def test_no_block_is_better_than_the_robust_reservation(
    seed: int, order: Order, under: float, fixed: float, radius: float, block: int
) -> None:
    lengths, losses = make_lengths(seed), Losses(1, under, fixed)
    found = robust_reservation(lengths, losses, order, radius, block)
    grid = np.arange(0, 100 + block, block)
    everything = worst_case_loss(lengths, losses, order, radius, grid)
    assert found.tokens == grid[np.argmax(everything <= everything.min() * (1 + 1e-9))]
    assert found.worst_case_loss == pytest.approx(everything.min(), rel=1e-9)
    plain = expected_loss(lengths, losses, grid)
    assert found.sample_tokens == grid[np.argmax(plain <= plain.min() * (1 + 1e-9))]
    assert found.sample_loss == pytest.approx(plain.min())
    assert found.fractile == pytest.approx(lengths.weights[lengths.values <= found.tokens].sum())


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("fixed", [0.0, 40.0])
def test_on_the_line_the_search_looks_far_enough(order: Order, fixed: float) -> None:
    lengths = Lengths.of([10, 40, 50], [1, 1, 1], np.inf)
    found = robust_reservation(lengths, Losses(1, 30, fixed), order, 25.0, 4)
    grid = np.arange(0, 4000, 4)
    everything = worst_case_loss(lengths, Losses(1, 30, fixed), order, 25.0, grid)
    assert found.tokens == grid[everything.argmin()]
    assert found.tokens > 50 or order == 1


def test_on_the_line_free_idle_tokens_have_no_best_reservation() -> None:
    with pytest.raises(ValueError, match="need a longest answer"):
        robust_reservation(Lengths.of([10], [1], np.inf), Losses(0, 1), 2, 1.0)


def order_1_optimum(lengths: Lengths, losses: Losses, radius: float) -> float:
    """The best reservation over the ball of order 1 on [0, L] in closed form, in tokens, not rounded.

    With t the sample quantile at kappa, an adversary first lengthens the answers above it, for which the distance to L
    is `above` in the mean, and then shortens those below it, at most by `below` in the mean (or the other way round
    when idle tokens are the dearer ones); the atom at t is split at kappa. While the first stock lasts, t stays best;
    then the point that a two-point mix of t and an end has; when both are used up, kappa * L.
    """
    kappa, upper = losses.fractile, lengths.upper
    at = lengths.quantile(kappa)
    room_above = float(np.maximum(lengths.values - at, 0.0) @ lengths.weights)
    room_below = float(np.maximum(at - lengths.values, 0.0) @ lengths.weights)
    above = (1 - kappa) * (upper - at) - room_above
    below = kappa * at - room_below
    if losses.under >= losses.over:
        first, second, then = above, below, at + (2 * kappa - 1) * (upper - at)
    else:
        first, second, then = below, above, 2 * kappa * at
    if radius <= first:
        return at
    return then if radius <= first + second else kappa * upper


@pytest.mark.parametrize("under", [0.2, 1.0, 6.0])
@pytest.mark.parametrize("radius", [0.0, 2.0, 8.0, 20.0, 60.0, 200.0])
def test_order_1_is_the_sample_quantile_then_a_mix_then_kappa_of_the_end(under: float, radius: float) -> None:
    lengths, losses = make_lengths(3), Losses(1, under)
    best = order_1_optimum(lengths, losses, radius)
    found = robust_reservation(lengths, losses, 1, radius)
    assert worst_case_loss(lengths, losses, 1, radius, [best])[0] <= found.worst_case_loss * (1 + 1e-9)
    assert found.tokens == pytest.approx(best, abs=1) or under == 1.0  # where a whole interval is best


def test_a_charge_makes_order_1_move_although_it_would_be_the_sample_quantile_without() -> None:
    lengths = make_lengths(1, points=200)
    assert robust_reservation(lengths, Losses(1, 4), 1, 1.0).is_sample_quantile
    charged = robust_reservation(lengths, Losses(1, 4, 300), 1, 1.0)
    assert not charged.is_sample_quantile
    assert charged.tokens > charged.sample_tokens


def test_a_pure_chance_constraint_reserves_cvar_and_a_share_of_the_radius() -> None:
    # P(O > r) <= a for every distribution within eps holds from r = CVaR_(1-a) + eps / a on (order 1, far from L).
    lengths, share, radius = Lengths.of(np.arange(1, 101), np.ones(100), 10_000), 0.1, 3.0
    least = lengths.values[-10:].mean() + radius / share
    risk = worst_case_loss(lengths, Losses(0, 0, 1), 1, radius, np.arange(0.0, 200.0))
    assert np.flatnonzero(risk <= share + 1e-9)[0] == np.ceil(least)


def test_a_small_radius_at_order_1_is_told_to_be_the_sample_quantile() -> None:
    lengths, losses = make_lengths(1, points=200), Losses(1, 4)
    found = robust_reservation(lengths, losses, 1, 1.0)
    assert found.is_sample_quantile
    assert found.tokens == found.sample_tokens == lengths.quantile(0.8)
    assert found.worst_case_loss > found.sample_loss


def test_order_2_moves_up_for_dear_shortages_and_down_for_dear_memory() -> None:
    lengths = make_lengths(5, points=500, upper=1000)
    dear_shortage = robust_reservation(lengths, Losses(1, 20), 2, 30.0)
    dear_memory = robust_reservation(lengths, Losses(20, 1), 2, 30.0)
    assert dear_shortage.tokens > dear_shortage.sample_tokens
    assert dear_memory.tokens < dear_memory.sample_tokens


@pytest.mark.parametrize("order", [1, 2])
def test_a_huge_radius_saturates_at_kappa_of_the_end_not_at_the_end(order: Order) -> None:
    assert robust_reservation(make_lengths(2), Losses(1, 4), order, 1e5).tokens == 80


@pytest.mark.parametrize(("losses", "expected"), [(Losses(0, 1), 100), (Losses(1, 0), 0)])
def test_a_free_side_reserves_all_or_nothing(losses: Losses, expected: int) -> None:
    lengths = Lengths.of([10, 100], [1, 1], 100)
    assert robust_reservation(lengths, losses, 2, 0.0).tokens == expected


def stepped(prompt: int, output: int, form: Form, reserve: float, phi: float) -> float:
    total = 0.0
    for step in range(1, output):
        idle = max(0.0, reserve - step)
        total += prompt + step + {"none": 0.0, "held": idle, "pooled": phi * idle}[form]
    return total


@pytest.mark.parametrize("form", ["none", "held", "pooled"])
def test_footprints_equal_a_count_step_by_step(form: Form) -> None:
    workload = make_workload([5, 40, 9], [1, 30, 64])
    reserves = [0.0, 1.0, 16.0, 30.5, 64.0, 100.0]
    expected = [np.mean([stepped(p, o, form, r, 0.25) for p, o in [(5, 1), (40, 30), (9, 64)]]) for r in reserves]
    assert footprint(workload, form, reserves, 0.25) == pytest.approx(expected)


def test_pooling_nothing_is_no_reservation_and_pooling_all_is_held() -> None:
    workload, reserves = make_workload([5, 40], [20, 50]), [8.0, 32.0]
    assert footprint(workload, "pooled", reserves, 0.0) == pytest.approx(footprint(workload, "none", reserves))
    assert footprint(workload, "pooled", reserves, 1.0) == pytest.approx(footprint(workload, "held", reserves))


@pytest.mark.parametrize(("form", "phi"), [("none", 0.0), ("held", 1.0), ("pooled", 0.3)])
def test_the_robust_footprint_covers_every_shift_of_the_lengths(form: Form, phi: float) -> None:
    workload = make_workload([5, 40, 9, 100], [2, 30, 50, 12])
    rng, radius, reserve = np.random.default_rng(0), 3.0, 40.0
    bound = footprint(workload, form, [reserve], phi, radius)[0]
    for _ in range(200):
        move = rng.normal(size=4)
        move *= radius / np.sqrt(np.mean(move**2))
        output = np.maximum(1, workload.output + move)
        moved = make_workload([5, 40, 9, 100], [int(tokens) for tokens in output])
        assert footprint(moved, form, [reserve], phi)[0] <= bound


def test_the_robust_footprint_without_reservation_is_the_closed_form() -> None:
    workload = make_workload([5, 40], [20, 50])
    slopes = [5 - 0.5 + 20, 40 - 0.5 + 50]
    expected = footprint(workload, "none", [0.0])[0] + 7 * np.sqrt(np.mean(np.square(slopes))) + 49 / 2
    assert footprint(workload, "none", [0.0], radius=7)[0] == pytest.approx(expected)


def test_a_larger_radius_never_costs_less_memory() -> None:
    workload = make_workload([5, 40], [20, 50])
    costs = [footprint(workload, "held", [16.0], radius=radius)[0] for radius in (0, 1, 5, 20)]
    assert all(smaller < larger for smaller, larger in itertools.pairwise(costs))
