"""`kvantile simulate` and `calibrate` as one calls them: output, messages and exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvantile_optimizer import cli
from kvantile_optimizer.calibration import Engine
from tests.support.small_plan import make_plan
from tests.unit.simulator.test_calibration import HEADER, KNOWN, make_run

Called = tuple[int, str, str]
TRACE = "arrival_s,prompt_tokens,output_tokens,class\n" + "".join(
    f"{n / 4},{100 + n},{20 + n % 50},{'chat' if n % 3 else 'code'}\n" for n in range(90)
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Called]:
    def call(*arguments: str | Path) -> Called:
        monkeypatch.setattr(sys, "argv", ["kvantile", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return call


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(make_plan().to_json()), encoding="utf-8")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE, encoding="utf-8")
    return path


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    found = make_run(Engine())
    columns = zip(found.arrival_s, found.prompt, found.output, found.first_s, found.last_s, strict=True)
    path = tmp_path / "run.csv"
    path.write_text(HEADER + "".join(",".join(map(str, row)) + "\n" for row in columns), encoding="utf-8")
    return path


def test_simulate_prints_what_each_class_and_group_saw(run: Callable[..., Called], plan: Path, trace: Path) -> None:
    code, out, _ = run("simulate", plan, trace, "-o", "json")
    result = json.loads(out)
    assert code == 0
    assert [row["requests"] for row in result["classes"]] == [60, 30]
    assert [row["group"] for row in result["groups"]] == ["l4"]
    assert result["rows"][0]["ttftP99Seconds"] > 0
    assert run("simulate", plan, trace, "-o", "json")[1] == out


def test_simulate_takes_another_form_and_order(run: Callable[..., Called], plan: Path, trace: Path) -> None:
    _, out, _ = run("simulate", plan, trace, "--engine-form", "none", "--order", "fcfs", "-o", "json")
    row = json.loads(out)["rows"][0]
    assert (row["form"], row["order"]) == ("none", "fcfs")
    assert row["kvCommittedFraction"] == row["kvUsedFraction"]


def test_simulate_prints_tables_for_people(run: Callable[..., Called], plan: Path, trace: Path) -> None:
    code, out, _ = run("simulate", plan, trace)
    assert code == 0
    assert "chat" in out
    assert "TTFT/SLO" in out


def test_simulate_says_what_is_wrong(run: Callable[..., Called], plan: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text(TRACE + "1,2,x,chat\n", encoding="utf-8")
    code, _, err = run("simulate", plan, bad)
    assert code == 2
    assert "bad.csv:92: output_tokens" in err
    assert run("simulate", tmp_path / "none.json", bad)[0] == 2


def test_calibrate_prints_the_coefficients(run: Callable[..., Called], recorded: Path) -> None:
    code, out, _ = run("calibrate", recorded, "-o", "json")
    assert code == 0
    assert json.loads(out)["stepTime"]["alpha"] == pytest.approx(KNOWN.alpha, rel=0.1)


def test_calibrate_shows_what_was_expected_of_the_hardware(run: Callable[..., Called], recorded: Path) -> None:
    known = ("--gpu", "H100-80", "--model", "meta-llama/Llama-3.1-8B-Instruct")
    code, out, _ = run("calibrate", recorded, *known)
    assert code == 0
    assert "alpha, per step" in out
    code, _, err = run("calibrate", recorded, *known[:2])
    assert code == 2
    assert "--model" in err


def test_calibrate_wants_the_line_of_the_log(run: Callable[..., Called], recorded: Path, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("INFO GPU KV cache size: 60,000 tokens\n", encoding="utf-8")
    assert json.loads(run("calibrate", recorded, "--engine-log", log, "-o", "json")[1])["kvTokens"] == 60_000
    log.write_text("INFO ready\n", encoding="utf-8")
    code, _, err = run("calibrate", recorded, "--engine-log", log)
    assert code == 2
    assert "GPU KV cache size" in err
