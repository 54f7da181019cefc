"""The step time of a recorded run: found again where it is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvantile_optimizer import calibration, runs
from kvantile_optimizer.calibration import Engine, RecordedRun
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.plan import StepTime

KNOWN = StepTime(alpha=0.012, beta=1.5e-4, gamma=6e-8, delta=4e-5)
HEADER = "arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n"


def make_run(engine: Engine, count: int = 80, per_second: float = 4.0) -> RecordedRun:
    """A run as an engine with the known step time would have recorded it."""
    rng = np.random.default_rng(7)
    blank = RecordedRun(
        np.cumsum(rng.exponential(1 / per_second, count)),
        rng.integers(20, 3000, count),
        rng.integers(2, 400, count),
        np.zeros(count),
        np.zeros(count),
    )
    found = calibration.simulated(blank, engine, KNOWN)
    return RecordedRun(blank.arrival_s, blank.prompt, blank.output, found.first_s, found.last_s)


def test_known_coefficients_are_recovered() -> None:
    engine = Engine()
    found = calibration.calibrate(make_run(engine), engine)
    assert found.step_time.alpha == pytest.approx(KNOWN.alpha, rel=0.1)
    assert found.step_time.delta == pytest.approx(KNOWN.delta, rel=0.1)
    assert max(abs(error) for error in found.errors.values()) < 0.02


def test_a_run_that_preempts_is_repeated_with_its_preemptions() -> None:
    engine = Engine(kv_tokens=16_000)
    run = make_run(engine)
    found = calibration.calibrate(run, engine)
    recorded = int(calibration.simulated(run, engine, KNOWN).preemptions.sum())
    assert recorded > 5
    assert found.preemptions == pytest.approx(recorded, rel=0.5)
    assert abs(found.errors["e2eP99"]) < 0.05


def test_what_a_run_cannot_tell_is_decided_by_what_is_expected_of_the_hardware() -> None:
    # Nobody ever decodes beside another, at a context that hardly varies: only the sum of three terms shows.
    lone = make_run(Engine(), count=30, per_second=1e-3)
    blank = RecordedRun(lone.arrival_s, np.full(30, 1000), np.full(30, 50), lone.first_s, lone.last_s)
    found = calibration.simulated(blank, Engine(), KNOWN)
    run = RecordedRun(blank.arrival_s, blank.prompt, blank.output, found.first_s, found.last_s)
    expected = StepTime(alpha=0.03, beta=6e-4, gamma=3e-7, delta=1e-4)
    start = StepTime(alpha=0.01, beta=1e-5, gamma=1e-7, delta=4e-5)
    fitted = calibration.fit(run, Engine(), np.ones(30, np.bool_), [start], expected)
    assert fitted.gamma / fitted.alpha == pytest.approx(1e-5, rel=0.2)
    assert fitted.beta / fitted.alpha == pytest.approx(0.02, rel=0.2)
    paces = [step.alpha + step.beta + 1025 * step.gamma for step in (fitted, KNOWN)]
    assert paces[0] == pytest.approx(paces[1], rel=0.01)


def test_the_size_of_the_kv_cache_is_read_from_the_engines_log() -> None:
    lines = ["INFO 01-01 00:00:00 [kv_cache_utils.py:1] GPU KV cache size: 41,408 tokens", "INFO ready"]
    assert calibration.kv_tokens_of_log(lines) == 41_408
    assert calibration.kv_tokens_of_log(["INFO ready"]) is None


def test_too_little_to_fit_is_refused() -> None:
    run = make_run(Engine(), count=5)
    with pytest.raises(InputError, match="at least 20"):
        calibration.calibrate(run, Engine())
    with pytest.raises(InputError, match="kv tokens"):
        calibration.calibrate(make_run(Engine()), Engine(kv_tokens=64))


def write(path: Path, *lines: str) -> Path:
    path.write_text(HEADER + "".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_run_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    run = runs.read(write(tmp_path / "run.csv", "2.0,10,3,2.5,3.0", "1.0,20,4,1.5,2.0"))
    assert run.arrival_s.tolist() == [1.0, 2.0]
    assert run.prompt.tolist() == [20, 10]


@pytest.mark.parametrize(
    ("line", "message"),
    [("1,0,3,2,3", "prompt_tokens"), ("1,5,x,2,3", "output_tokens"), ("1,5,3,nan,3", "first_token_s")],
)
def test_a_broken_line_of_a_run_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(InputError, match=f"run.csv:3: {message}"):
        runs.read(write(tmp_path / "run.csv", "1,10,3,2,3", line))


def test_a_run_without_a_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("arrival_s,prompt_tokens\n1,2\n", encoding="utf-8")
    with pytest.raises(InputError, match="first_token_s"):
        runs.read(path)
