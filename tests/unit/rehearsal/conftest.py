"""Compiling the simulator's kernel takes seconds, once for each change of it: outside of any test's own time."""

from __future__ import annotations

import pytest

from kvantile_optimizer.rehearsal.requests import synthesise
from kvantile_optimizer.simulator.fleet import simulate_plan
from tests.unit.rehearsal.cases import make_bursty_plan, make_workload


@pytest.fixture(scope="session", autouse=True)
def compiled_kernel() -> None:
    plan = make_bursty_plan()
    simulate_plan(plan, *synthesise(plan, [make_workload()], seed=0, count=10))
