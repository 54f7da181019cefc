"""`kvantile plan` with a running plan, with GPUs that others use, and with sensitivities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.specs import make_class, make_pool
from tests.unit.optimizer.test_commands import Run, write_spec

QUICK = "--no-rehearse"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return write_spec(tmp_path, pools=[make_pool(maxGPUs=4)], classes=[make_class(rate=12.0)])


def test_a_change_comes_with_its_steps_within_what_others_leave(run: Run, spec: Path, tmp_path: Path) -> None:
    running = tmp_path / "running.json"
    code, out, _ = run("plan", spec, QUICK, "-o", "json")
    assert code == 0
    assert json.loads(out)["steps"] == []
    running.write_text(out)
    code, out, _ = run("plan", spec, QUICK, "--current", running, "--taken", "l40s=3", "-o", "json")
    plan = json.loads(out)
    assert code == 0
    assert sum(group["gpus"] for group in plan["groups"]) == 1
    assert plan["steps"][-1]["gpusInUse"] == {"l40s": 1}
    assert "Steps from the plan that runs" in run("plan", spec, QUICK, "--current", running, "--taken", "l40s=3")[1]


@pytest.mark.slow
def test_a_plan_is_rehearsed_unless_told_otherwise(run: Run, spec: Path) -> None:
    code, out, _ = run("plan", spec, "-o", "json")
    assert code == 0
    plan = json.loads(out)
    _, quick, _ = run("plan", spec, QUICK, "-o", "json")
    assert plan["predictions"] != json.loads(quick)["predictions"]
    assert not any("closed forms" in note for note in plan["warnings"])


def test_sensitivities_are_added_to_the_json(run: Run, spec: Path) -> None:
    code, out, err = run("plan", spec, QUICK, "--taken", "l40s=3", "--sensitivities", "-o", "json")
    assert (code, err) == (0, "")
    first = json.loads(out)["sensitivities"][0]
    assert first.keys() == {
        "change",
        "status",
        "objectiveUSDPerHour",
        "deltaUSDPerHour",
        "unservedFractionDelta",
        "gpus",
    }


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["l40=1"], "error: --taken: found l40, allowed a pool of the plan: l40s\n"),
        (["l40s=5"], "error: taken.l40s: found 5, allowed 0 to 4, the GPUs of the pool\n"),
        (["l40s=1", "l40s=2"], "error: --taken: found a pool twice, allowed each once\n"),
        (["l40s"], "found 'l40s', allowed a pool and a whole number, such as h100=8\n"),
        (["l40s=-1"], "found 'l40s=-1', allowed a pool and a whole number, such as h100=8\n"),
        (["=1"], "found '=1', allowed a pool and a whole number, such as h100=8\n"),
    ],
)
def test_what_others_take_is_refused_in_words(run: Run, spec: Path, given: list[str], told: str) -> None:
    code, out, err = run("plan", spec, *(word for item in given for word in ("--taken", item)))
    assert (code, out) == (2, "")
    assert err.endswith(told)
