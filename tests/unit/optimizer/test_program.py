"""The joint program against brute force, and the solver's borders."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvantile_optimizer.candidates import Candidate, Pool, Tier
from kvantile_optimizer.errors import WorkError
from kvantile_optimizer.hardware import gpu_table
from kvantile_optimizer.load import Capacity
from kvantile_optimizer.plan import StepTime
from kvantile_optimizer.program import Columns, Instance, fits, no_columns, solve
from kvantile_optimizer.solver import Program, SolveStatus

TIER = Tier(0.1, 3.0, 99)
STEP = StepTime(alpha=0.01, beta=0.0, gamma=0.0, delta=1e-4)


def make_candidate(pool: Pool, tp: int = 1) -> Candidate:
    return Candidate(pool, tp, 1, TIER, 256, 2048, 100_000, 8192, STEP)


def make_pool(name: str, price: float, gpus: int | None, per_node: int = 8) -> Pool:
    return Pool(name, gpu_table()["L40S"], per_node, gpus, price)


def make_capacity(count: int) -> Capacity:
    full = np.ones(count)
    return Capacity(0.8 * full, 0.05 * full, 0.01 * full, 1.2 * full, 50 * full, 0.8 * full)


def make_columns(seconds: list[float]) -> Columns:
    """Of one class, one on each candidate."""
    count = len(seconds)
    zeros, ones = np.zeros(count), np.ones(count)
    places = np.arange(count)
    return Columns(
        class_index=np.zeros(count, np.intp),
        candidate=places,
        reserve_tokens=np.zeros(count, np.int64),
        resident=np.zeros(count, bool),
        engine_seconds=np.array(seconds),
        utilisation=0.8 * ones,
        footprint=zeros,
        steps=ones,
        prefill_token_seconds=zeros,
        memory_usd=zeros,
        preemption_usd=zeros,
    )


def make_instance(candidates: list[Candidate], seconds: list[float], rate: float) -> Instance:
    return Instance(
        candidates=candidates,
        capacity=make_capacity(len(candidates)),
        columns=make_columns(seconds),
        rates=np.array([rate]),
        prefix_tokens=np.zeros(1),
        correction=np.ones(len(candidates)),
        replayed=np.ones(len(candidates)),
    )


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.integers(1, 40), st.sampled_from([1, 2, 4]), st.integers(0, 6)),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 12),
)
def test_replicas_are_the_cheapest_that_carry_the_load(rows: list[tuple[int, int, int, int]], rate: int) -> None:
    pools = [make_pool(f"p{i}", price / 10, count * tp) for i, (price, _, tp, count) in enumerate(rows)]
    candidates = [make_candidate(pool, tp) for pool, (_, _, tp, _) in zip(pools, rows, strict=True)]
    decision = solve(make_instance(candidates, [w / 100 for _, w, _, _ in rows], float(rate)), 10)
    assert decision is not None

    def served(counts: tuple[int, ...]) -> float:
        return sum(n * 0.8 / (w / 100) for n, (_, w, _, _) in zip(counts, rows, strict=True))

    def price(counts: tuple[int, ...]) -> float:
        return sum(n * c.price_usd_per_second for n, c in zip(counts, candidates, strict=True))

    every = list(itertools.product(*(range(count + 1) for *_, count in rows)))
    most = min(max(served(counts) for counts in every), float(rate))
    assert decision.unserved[0] == pytest.approx(1 - most / rate, abs=1e-5)
    enough = [counts for counts in every if served(counts) >= most * (1 - 1e-9)]
    assert price(tuple(decision.replicas)) == pytest.approx(min(map(price, enough)), rel=2e-4, abs=1e-9)
    assert decision.bound <= decision.objective + 1e-12


@settings(max_examples=40)
@given(st.integers(0, 20), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_packing_rows_say_exactly_what_fits_onto_nodes(gpus: int, ones: int, twos: int, fours: int) -> None:
    pool = make_pool("p", 1.0, gpus, per_node=4)
    candidates = [make_candidate(pool, tp) for tp in (1, 2, 4)]
    wanted = {"p-tp1": ones, "p-tp2": twos, "p-tp4": fours}
    instance = Instance(
        candidates=candidates,
        capacity=make_capacity(3),
        columns=no_columns(),
        rates=np.zeros(0),
        prefix_tokens=np.zeros(0),
        correction=np.ones(3),
        replayed=np.ones(3),
        current=wanted,
        keep_replicas=True,
    )
    nodes = [4] * (gpus // 4) + [gpus % 4]
    for size, count in ((4, fours), (2, twos), (1, ones)):
        for _ in range(count):
            roomy = next((i for i, left in enumerate(nodes) if left >= size), None)
            nodes = nodes if roomy is None else [left - size * (i == roomy) for i, left in enumerate(nodes)]
            if roomy is None:
                nodes = [-1]
    program_says = solve(instance, 10)
    assert (program_says is not None) == (min(nodes) >= 0)
    assert fits(instance, np.array([ones, twos, fours])) == (min(nodes) >= 0)


def test_unlimited_pools_have_no_row() -> None:
    decision = solve(make_instance([make_candidate(make_pool("p", 1.0, None))], [0.1], 100.0), 10)
    assert decision is not None
    assert decision.replicas[0] == math.ceil(100 * 0.1 / 0.8)


def test_the_solver_keeps_its_banner_to_itself() -> None:
    code = (
        "from kvantile_optimizer.solver import Program\n"
        "p = Program(); x = p.variable(3.0, -1.0, integer=True); p.row({x: 2.0}, upper=5.0)\n"
        "print(p.solve(5).objective)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("-2.0\n", "")


def test_an_infeasible_program_is_an_answer_and_a_broken_one_an_error() -> None:
    program = Program()
    x = program.variable(1.0, 1.0)
    program.row({x: 1.0}, lower=2.0)
    assert program.solve(5).status == SolveStatus.INFEASIBLE
    broken = Program()
    broken.row({broken.variable(1.0, 1.0): float("nan")}, upper=1.0)
    with pytest.raises(WorkError, match="not finite"):
        broken.solve(5)
