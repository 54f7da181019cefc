"""Input that is wrong or extreme: `kvantile plan` names the field and exits with 2, or gives a plan that is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvantile_optimizer import planner, workload
from kvantile_optimizer.errors import TimeOverError
from kvantile_optimizer.sensitivity import sensitivities
from tests.support.specs import make_class, make_serving_plan, planned
from tests.unit.optimizer.test_commands import Run, write_spec

NO_TIME_S = 1e-9
NOTHING = "no plan was found within the time limit: allow more with --time-limit"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


def many_classes(count: int) -> list[dict[str, object]]:
    """That many classes, as they stand in YAML."""
    return [make_class(f"class{number}", 1.0, default=number == 0) for number in range(count)]


def test_without_time_the_plan_that_runs_stands_with_a_warning() -> None:
    running = planned(classes=[make_class(rate=4.0)])
    for _ in range(2):
        again = planned(running, NO_TIME_S, classes=[make_class(rate=40.0)])
        assert (again.groups, again.routes, again.classes) == (running.groups, running.routes, running.classes)
        assert again.warnings == [*running.warnings, planner.STANDS]
        assert again.solve_seconds != running.solve_seconds
        running = running.model_copy(update={"warnings": again.warnings[:-1]})


def test_without_time_and_without_a_running_plan_it_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(TimeOverError, match="--time-limit"):
        planned(time_limit_s=NO_TIME_S)


def test_a_sensitivity_that_found_no_plan_is_none_of_the_running_plan() -> None:
    running, serving_plan = planned(), make_serving_plan()
    workloads = workload.of_plan(serving_plan, {})
    # Enough to ask for the first of them, and too little to plan.
    entries = sensitivities(running, serving_plan, workloads, time_limit_s=2e-3, current=running)
    assert {entry.status for entry in entries} == {"unsolved"}


def test_the_command_keeps_the_running_plan_when_time_is_over(run: Run, tmp_path: Path) -> None:
    spec, running = write_spec(tmp_path), tmp_path / "running.json"
    code, out, _ = run("plan", spec, "--no-rehearse", "-o", "json")
    assert code == 0
    running.write_text(out)
    # To look up so many classes takes several times the shortest limit there is.
    large = write_spec(tmp_path, classes=many_classes(120))
    assert run("plan", large, "--time-limit", "0.1") == (1, "", f"error: {NOTHING}\n")
    code, out, err = run("plan", large, "--time-limit", "0.1", "--current", running, "-o", "json")
    assert (code, err) == (0, "")
    kept = json.loads(out)
    assert kept["groups"] == json.loads(running.read_text())["groups"]
    assert (kept["steps"], kept["warnings"][-1]) == ([], planner.STANDS)
