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


def make_lengths(rng: np.random.Generator, points: int, upper: int) -> Lengths:
    return Lengths.of(rng.integers(1, upper + 1, points), rng.random(points), upper, points)


def transported(lengths: Lengths, losses: Losses, order: Order, radius: float, reserve: float, grid: Array) -> float:
    """The worst case by a linear program over all ways to move the atoms onto `grid`."""
    atoms, places = len(lengths.values), len(grid)
    distance = np.abs(grid - lengths.values[:, None]) ** order
    rows = np.kron(np.eye(atoms), np.ones((1, places)))
    found = optimize.linprog(
        -np.tile(losses.at(np.array([reserve]), grid), atoms),
        A_eq=rows,
        b_eq=lengths.weights,
        A_ub=distance.reshape(1, -1),
        b_ub=[radius**order],
        method="highs",
    )
    assert found.fun is not None
    return float(-found.fun)


@pytest.mark.parametrize("seed", range(8))
def test_order_1_worst_case_equals_the_transport_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = make_lengths(rng, 6, 40)
    losses = Losses(*rng.uniform(0.1, 5, 2))
    grid = np.arange(0.0, 41.0)
    for radius, reserve in itertools.product((0.3, 4.0, 25.0), (0, 7, 40)):
        expected = transported(lengths, losses, 1, radius, reserve, grid)
        assert worst_case_loss(lengths, losses, 1, radius, [reserve]) == pytest.approx([expected], rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("radius", [0.4, 3.0])
def test_order_2_worst_case_equals_the_transport_program(seed: int, radius: float) -> None:
    rng = np.random.default_rng(seed)
    lengths = make_lengths(rng, 3, 8)
    losses = Losses(*rng.uniform(0.5, 5, 2))
    reserve = float(rng.integers(1, 8))
    grid = np.linspace(0, 8, 8 * 640 + 1)
    expected = transported(lengths, losses, 2, radius, reserve, grid)
    assert worst_case_loss(lengths, losses, 2, radius, [reserve]) == pytest.approx([expected], rel=1e-6)


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
@given(seed=st.integers(0, 10**6), order=st.sampled_from([1, 2]), under=st.floats(0.01, 50))
def test_the_worst_case_never_falls_as_the_radius_grows(seed: int, order: Order, under: float) -> None:
    lengths = make_lengths(np.random.default_rng(seed), 12, 200)
    reserve = np.linspace(0, 200, 9)
    radii = (0.0, 0.5, 5.0, 50.0, 500.0)
    losses = [worst_case_loss(lengths, Losses(1, under), order, radius, reserve) for radius in radii]
    for smaller, larger in itertools.pairwise(losses):
        assert np.all(larger >= smaller - 1e-9 * np.abs(smaller))


def test_order_2_far_from_both_ends_costs_scarfs_term_more() -> None:
    lengths = Lengths.of(np.arange(4000, 6001, 4), np.ones(501), 10_000)
    losses, radius = Losses(1, 9), 20.0
    reserve = np.arange(5700.0, 6000.0, 4)
    scarf = expected_loss(lengths, losses, [5800.0])[0] + radius * 3  # sqrt(over * under) = 3
    assert worst_case_loss(lengths, losses, 2, radius, reserve).min() == pytest.approx(scarf, rel=2e-3)
