"""`make bench-engine`: the command, and that stepping the emulator gives what the simulator gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.engine import __main__ as command
from benchmarks.engine import emulator, table
from click.testing import CliRunner

from kvantile_optimizer.plan import StepTime
from kvantile_optimizer.simulator.replica import Policy, ReplicaSpec, Requests, simulate_replica


def test_keys_of_rows_are_unique() -> None:
    keys = [row.key for row in table.ROWS]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--rows", "nothing-such"], "allowed recorded"), (["--rows", "recorded"], "recorded need")],
)
def test_a_wrong_command_is_told_what_is_allowed(tmp_path: Path, arguments: list[str], message: str) -> None:
    ended = CliRunner().invoke(command.main, [*arguments, "--build", str(tmp_path)])
    assert ended.exit_code == 2
    assert message in " ".join(ended.output.split())


def test_the_emulator_steps_as_the_simulator_does() -> None:
    rng = np.random.default_rng(0)
    requests = Requests(np.cumsum(rng.exponential(0.1, 60)), rng.integers(1, 300, 60), rng.integers(1, 300, 60))
    spec = ReplicaSpec(2_000, StepTime(alpha=0.01, beta=1e-4, gamma=1e-7, delta=1e-4))
    stepped, simulated = emulator.step_through(requests, spec), simulate_replica(requests, spec, Policy())
    assert stepped.preemptions == simulated.preemptions.sum() > 0
    np.testing.assert_allclose(stepped.first_s, simulated.first_s, rtol=1e-9)
    np.testing.assert_allclose(stepped.last_s, simulated.last_s, rtol=1e-9)
