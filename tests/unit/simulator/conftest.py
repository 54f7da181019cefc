"""Compiling the kernel takes seconds, once for each change of it: outside of any test's own time."""

from __future__ import annotations

import pytest

from tests.unit.simulator.cases import make_case, simulated


@pytest.fixture(scope="session", autouse=True)
def compiled_kernel() -> None:
    simulated(make_case(0), shortcut=True)
