"""The worst case over a ball, against transport programs that know nothing of the dual."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from kvantile_optimizer.ambiguity import Losses, Order, expected_loss, worst_case_loss
from kvantile_optimizer.workload import Array, Lengths

FAR = 1e8


def make_lengths(rng: np.random.Generator, points: int, upper: float) -> Lengths:
    return Lengths.of(rng.integers(1, int(min(upper, 1000)) + 1, points), rng.random(points), upper, points)


def make_instance(rng: np.random.Generator, *, on_line: bool, charged: bool) -> tuple[Lengths, Losses]:
    """Few atoms of equal or random weights; every third has kappa * N a whole number; either side may be dearer."""
    points, upper = int(rng.integers(1, 7)), int(rng.integers(6, 40))
    values = rng.choice(np.arange(1, upper + 1), points, replace=False)
    kind = rng.integers(3)
    over, under = rng.uniform(0.1, 5, 2)
    if kind == 0:
        below = int(rng.integers(1, points + 1))
        over, under = float(points + 1 - below), float(below)
    weights = rng.random(points) if kind == 2 else np.ones(points)
    fixed = float(rng.choice([0.3, 5.0, 80.0])) if charged else 0.0
    return Lengths.of(values, weights, np.inf if on_line else upper, points), Losses(over, under, fixed)


def transported(lengths: Lengths, losses: Losses, order: Order, radius: float, reserve: float) -> float:
    """The worst case by linear programs over all ways to move the atoms onto a grid.

    The grid gets finer around the places that the last program used; those that matter at order 1 are in it at once.
    """
    grid = np.union1d(first_grid(lengths, radius), [reserve])
    width = float(np.diff(grid[1:-1]).max())
    for _ in range(1 if order == 1 else 6):
        worst, used = transported_onto(grid, lengths, losses, order, radius, reserve)
        near = np.linspace(-width, width, 17) + used[:, None]
        grid = np.union1d(grid[:: max(1, len(grid) // 200)], np.append(near, [reserve, *lengths.values]))
        grid = np.append(grid[(grid >= first_grid(lengths, radius)[0]) & (grid <= lengths.upper)], lengths.values)
        width /= 8
    return worst


def first_grid(lengths: Lengths, radius: float) -> Array:
    """[0, L], or on the line as far as the lightest atom can get, and two places as good as endlessly far."""
    if np.isfinite(lengths.upper):
        return np.linspace(0.0, lengths.upper, 4 * int(lengths.upper) + 1)
    reach = np.ceil(2 * radius / lengths.weights.min())
    near = np.linspace(-reach, lengths.values[-1] + reach, 201)
    return np.concatenate(([-FAR], np.union1d(near, lengths.values), [FAR]))


def transported_onto(
    grid: Array, lengths: Lengths, losses: Losses, order: Order, radius: float, reserve: float
) -> tuple[float, Array]:
    """The worst case over distributions on `grid`, and the places that it uses."""
    atoms, places = len(lengths.values), len(grid)
    distance = np.abs(grid - lengths.values[:, None]) ** order
    unit = np.maximum(distance, 1.0).ravel()  # The unknowns are mass * distance, or nothing would be left to go far.
    loss = losses.over * np.maximum(reserve - grid, 0) + losses.under * np.maximum(grid - reserve, 0)
    loss += losses.fixed * (grid >= reserve) * (reserve < lengths.upper)
    found = optimize.linprog(
        -np.tile(loss, atoms) / unit,
        A_eq=np.kron(np.eye(atoms), np.ones((1, places))) / unit,
        b_eq=lengths.weights,
        A_ub=(distance.ravel() / unit)[None, :] / radius**order,
        b_ub=[1.0],
        method="highs",
    )
    assert found.fun is not None
    assert found.x is not None
    return float(-found.fun), grid[found.x.reshape(atoms, places).max(axis=0) > 1e-12]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("on_line", [False, True])
@pytest.mark.parametrize("charged", [False, True])
def test_the_worst_case_equals_the_transport_program(order: Order, on_line: bool, charged: bool) -> None:
    rng = np.random.default_rng([order, on_line, charged])
    for _ in range(25):
        lengths, losses = make_instance(rng, on_line=on_line, charged=charged)
        radius = float(rng.choice([0.2, 1.5, 6.0, 25.0]))
        highest = int(lengths.values[-1] + 5) if on_line else int(lengths.upper)
        reserve = float(rng.choice([0, rng.integers(0, highest + 1), lengths.values[0], highest]))
        expected = transported(lengths, losses, order, radius, reserve)
        assert worst_case_loss(lengths, losses, order, radius, [reserve]) == pytest.approx([expected], rel=1e-6)


@pytest.mark.parametrize("order", [1, 2])
def test_radius_zero_is_the_sample_average(order: Order) -> None:
    lengths = Lengths.of([3, 9, 12], [1, 2, 1], 20)
    losses = Losses(1, 4)
    reserve = np.arange(0.0, 21.0)
    plain = [float(losses.at(np.array([r]), lengths.values) @ lengths.weights) for r in reserve]
    assert expected_loss(lengths, losses, reserve) == pytest.approx(plain)
    assert worst_case_loss(lengths, losses, order, 0, reserve) == pytest.approx(plain)
    assert worst_case_loss(lengths, losses, order, 1e-9, reserve) == pytest.approx(plain, abs=1e-7)


@pytest.mark.parametrize("order", [1, 2])
def test_an_endless_radius_leaves_only_the_worse_end(order: Order) -> None:
    lengths = Lengths.of([3, 9, 12], [1, 2, 1], 20)
    reserve = np.arange(0.0, 21.0)
    worst = np.maximum(1 * reserve, 4 * (20 - reserve))
    assert worst_case_loss(lengths, Losses(1, 4), order, 1e4, reserve) == pytest.approx(worst)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), order=st.sampled_from([1, 2]), under=st.floats(0.01, 50), fixed=st.floats(0, 500))
def test_the_worst_case_never_falls_as_the_radius_grows(seed: int, order: Order, under: float, fixed: float) -> None:
    lengths = make_lengths(np.random.default_rng(seed), 12, 200)
    reserve = np.linspace(0, 200, 9)
    radii = (0.0, 0.5, 5.0, 50.0, 500.0)
    losses = [worst_case_loss(lengths, Losses(1, under, fixed), order, radius, reserve) for radius in radii]
    for smaller, larger in itertools.pairwise(losses):
        assert np.all(larger >= smaller - 1e-9 * np.abs(smaller))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("upper", [200.0, np.inf])
def test_scaling_all_costs_scales_the_worst_case(order: Order, upper: float) -> None:
    lengths = Lengths.of([3, 90, 120], [1, 2, 1], upper)
    reserve = np.arange(0.0, 201.0, 20)
    once = worst_case_loss(lengths, Losses(1, 4, 30), order, 7, reserve)
    assert worst_case_loss(lengths, Losses(1e-6, 4e-6, 3e-5), order, 7, reserve) == pytest.approx(once * 1e-6)


@pytest.mark.parametrize("order", [1, 2])
def test_a_length_at_the_reservation_counts_as_short_once_it_may_move_but_not_at_the_end(order: Order) -> None:
    lengths, losses = Lengths.of([10, 20], [1, 1], 20), Losses(1, 4, 100)
    assert expected_loss(lengths, losses, [10, 20]) == pytest.approx([70, 5])
    assert worst_case_loss(lengths, losses, order, 1e-9, [10, 20]) == pytest.approx([120, 5])
    assert worst_case_loss(lengths, losses, order, 1e-5, [10, 20]) == pytest.approx([120, 5], rel=1e-4)


def test_a_pure_chance_constraint_of_order_1_costs_the_probability_that_the_radius_can_buy() -> None:
    # One atom ten tokens below the reservation: a radius of one moves a tenth of it there.
    lengths = Lengths.of([10], [1], 100)
    assert worst_case_loss(lengths, Losses(0, 0, 5), 1, 1.0, [20]) == pytest.approx([0.5])
    assert worst_case_loss(lengths, Losses(0, 0, 5), 2, 1.0, [20]) == pytest.approx([0.05])


@pytest.mark.parametrize("radius", [0.1, 20.0])
def test_on_the_line_order_1_adds_the_dearer_side_times_the_radius(radius: float) -> None:
    lengths, losses = make_lengths(np.random.default_rng(4), 30, np.inf), Losses(3, 2)
    reserve = np.arange(0.0, 60.0, 7)
    plain = expected_loss(lengths, losses, reserve)
    assert worst_case_loss(lengths, losses, 1, radius, reserve) == pytest.approx(plain + 3 * radius)


@pytest.mark.parametrize("radius", [0.5, 40.0])
def test_on_the_line_order_2_adds_scarfs_term_and_moves_by_his_multiplier(radius: float) -> None:
    lengths, losses = Lengths.of(np.arange(4000, 6001, 4), np.ones(501), np.inf), Losses(1, 9)
    best = 5800 + radius * (9 - 1) / (2 * 3)
    reserve = best + np.linspace(-5, 5, 101)
    costs = worst_case_loss(lengths, losses, 2, radius, reserve)
    assert costs.min() == pytest.approx(expected_loss(lengths, losses, [5800.0])[0] + radius * 3, rel=1e-9)
    assert reserve[costs.argmin()] == pytest.approx(best, abs=4)


def test_order_2_far_from_both_ends_costs_scarfs_term_more() -> None:
    lengths = Lengths.of(np.arange(4000, 6001, 4), np.ones(501), 10_000)
    losses, radius = Losses(1, 9), 20.0
    reserve = np.arange(5700.0, 6000.0, 4)
    scarf = expected_loss(lengths, losses, [5800.0])[0] + radius * 3  # sqrt(over * under) = 3
    assert worst_case_loss(lengths, losses, 2, radius, reserve).min() == pytest.approx(scarf, rel=2e-3)
