"""`kvantile validate`, `fit` and `reserve` as one calls them: output, messages and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from kvantile_optimizer import cli, specfile
from tests.support.specs import make_class, make_serving_plan

TRACE = "arrival_s,prompt_tokens,output_tokens,class\n" + "".join(
    f"{n},{100 + n},{20 + n % 50},{'chat' if n % 3 else 'code'}\n" for n in range(90)
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


class Run:
    """Calls `kvantile` in this process and gives exit code, stdout and stderr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["kvantile", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        said = self.capsys.readouterr()
        return code, said.out, said.err


def write_spec(tmp_path: Path, **overrides: object) -> Path:
    plan = make_serving_plan(**overrides)
    path = tmp_path / "spec.yaml"
    YAML(typ="safe", pure=True).dump(plan.model_dump(mode="json", by_alias=True, exclude_none=True), path)
    return path


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "file"
    path.write_text(text)
    return path


@pytest.mark.parametrize("command", ["validate", "fit", "reserve"])
def test_every_command_shows_an_example(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"kvantile {command} " in out
    assert "Example" in out


def test_validate_says_what_a_good_file_holds(run: Run, tmp_path: Path) -> None:
    assert run("validate", write_spec(tmp_path)) == (0, "default/test is valid: 1 class, 3 pools\n", "")


def test_validate_names_what_only_the_tables_know(run: Run, tmp_path: Path) -> None:
    pools = [{"name": "a", "gpu": {"type": "H10-80"}}]
    spec = write_spec(tmp_path, pools=pools, model={"name": "nobody/knows", "maxModelLen": 4096})
    code, out, err = run("validate", spec)
    assert (code, out) == (2, "")
    assert "spec.model" in err
    assert "spec.nodePools[0].gpu.type" in err


def test_validate_notes_lengths_that_only_a_cluster_has(run: Run, tmp_path: Path) -> None:
    demand = {"requestsPerSecond": "5", "samples": {"configMapRef": {"name": "lengths", "key": "trace.csv"}}}
    code, _, err = run("validate", write_spec(tmp_path, classes=[make_class() | {"demand": demand}]))
    assert code == 0
    assert err.startswith("not checked: spec.classes[0].demand.samples.configMapRef: found default/lengths/trace.csv")


def test_validate_refuses_a_broken_file(run: Run, tmp_path: Path) -> None:
    code, _, err = run("validate", write(tmp_path, "kind: ServingPlan\n"))
    assert code == 2
    assert "spec: found nothing" in err


def test_fit_writes_classes_that_a_plan_takes(run: Run, tmp_path: Path) -> None:
    code, out, err = run("fit", write(tmp_path, TRACE))
    assert code == 0
    assert "slo: 2000 ms" in err
    fitted = YAML(typ="safe", pure=True).load(out)["classes"]
    plan = make_serving_plan().model_dump(mode="json", by_alias=True, exclude_none=True)
    read = specfile.serving_plan(plan | {"spec": plan["spec"] | {"classes": fitted}})
    assert [item.name for item in read.spec.classes] == ["chat", "code"]
    assert read.spec.classes[0].default


def test_fit_prints_json_and_tables(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path, TRACE)
    code, out, _ = run("fit", path, "--classes", "2", "-o", "json")
    assert code == 0
    assert [item["default"] for item in json.loads(out)["classes"] if "default" in item] == [True]
    code, out, _ = run("fit", path, "--window", "30", "-o", "table")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["class", "chat", "code"]


def test_fit_refuses_what_it_cannot_read_with_the_line(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path, TRACE.replace("3,103,", "3,x,"))
    assert run("fit", path) == (
        2,
        "",
        f'error: {path}:5: prompt_tokens: found "x", allowed a whole number from 1 to 10000000\n',
    )
    assert run("fit", path, "--classes", "0")[0] == 2
    assert run("fit", write(tmp_path, "num_prefill_tokens,num_decode_tokens\n1,2\n"), "--window", "5")[0] == 2
    assert run("fit", path, "--window", "nan")[0] == 2


def test_reserve_prints_the_contract(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path, "10\n20\n\n30\n40\n50\n")
    code, out, _ = run("reserve", path, "--under", "4", "--radius", "0", "--at", "0,100", "-o", "json")
    found = json.loads(out)
    assert code == 0
    assert (found["reserveTokens"], found["isSampleQuantile"]) == (40, True)
    assert found["fractile"] == pytest.approx(0.8)
    assert found["sampleAverage"] == {"reserveTokens": 40, "cost": pytest.approx(20)}
    assert found["worstCaseCost"] == pytest.approx(20)
    assert found["costsAt"] == pytest.approx([120, 70])


def test_reserve_weighs_a_fixed_charge_for_any_shortage(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path, "10\n20\n30\n40\n50\n")
    arguments = ["--radius", "0", "--fixed", "100", "--at", "40,50", "-o", "json"]
    code, out, _ = run("reserve", path, *arguments)
    found = json.loads(out)
    assert code == 0
    assert (found["reserveTokens"], found["costsAt"]) == (50, [pytest.approx(14 + 20), pytest.approx(20)])
    assert (found["isSampleQuantile"], found["upperTokens"]) == (True, None)
    moved = json.loads(run("reserve", path, "--radius", "2", "--fixed", "100", "--order", "1", "-o", "json")[1])
    assert moved["reserveTokens"] > 50
    assert moved["worstCaseCost"] >= moved["sampleAverage"]["cost"]
    assert moved["sampleAverage"] == {"reserveTokens": 50, "cost": pytest.approx(20)}


def test_reserve_without_an_upper_end_moves_by_scarfs_multiplier(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path, "\n".join(str(length) for length in range(1001, 2001)))
    code, out, _ = run("reserve", path, "--under", "9", "--radius", "30", "-o", "json")
    assert code == 0
    assert json.loads(out)["reserveTokens"] == pytest.approx(1900 + 30 * 8 / 6, abs=1)
    # One unit of cost a token at kappa L: with an end that all answers may reach, the middle is as far as it goes.
    code, out, _ = run("reserve", path, "--radius", "100000", "--upper", "4000", "-o", "json")
    assert json.loads(out)["reserveTokens"] == 2000


def test_reserve_says_how_the_radius_was_chosen(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path, "\n".join(str(100 + length * 37 % 101) for length in range(400)))
    _, out, _ = run("reserve", path, "--under", "9")
    assert "radius 0, validated on 5 windows" in out
    _, out, _ = run("reserve", write(tmp_path, "10\n12\n60\n"), "--order", "1")
    assert "sd / sqrt(N)" in out


def test_reserve_counts_cut_off_answers_as_longer(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path, "10\n20+\n30\n40+\n")
    code, out, _ = run("reserve", path, "--under", "9", "--radius", "0", "--upper", "100", "-o", "json")
    assert code == 0
    assert json.loads(out)["reserveTokens"] == 100
    assert json.loads(out)["meanTokens"] == pytest.approx(10 / 4 + 30 * 3 / 8 + 100 * 3 / 8)


def test_reserve_takes_a_trace_and_says_when_robustness_changes_nothing(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("reserve", write(tmp_path, TRACE), "--order", "1", "--block", "16")
    assert code == 0
    assert out.startswith("reserve         ")
    assert "is the sample quantile" in out


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("10\nx\n", [], "file:2: found 'x', allowed a whole number from 1 to 10000000"),
        ("0\n", [], "file:1: found '0', allowed a whole number from 1"),
        ("-3\n", [], "file:1: found '-3', allowed a whole number from 1"),
        ("", [], "file: found nothing, allowed at least one length"),
        ("10\n", ["--upper", "5"], "--upper: found 5, allowed at least the longest recorded answer, 10"),
        ("10\n", ["--under", "0", "--over", "0"], "found 0, 0 and 0, allowed at least one above 0"),
        ("10\n", ["--fixed", "-1"], "-1.0 is not in the range x>=0"),
        ("10\n", ["--over", "0"], "--over: found 0 without --upper"),
        ("10\n", ["--fixed", "1e300"], "--fixed: found 1e+300, allowed 0 or from 1e-09 to 1e+09"),
        ("10\n", ["--over", "1e-300"], "--over: found 1e-300"),
        ("10\n", ["--radius", "-1"], "found -1, allowed auto or tokens of at least 0"),
        ("10\n", ["--under", "nan"], "found nan, allowed a finite number"),
        ("10\n", ["--at", "1,x"], "found 1,x, allowed whole numbers separated by commas"),
    ],
)
def test_reserve_refuses_bad_input_in_words(
    run: Run, tmp_path: Path, text: str, arguments: list[str], message: str
) -> None:
    code, out, err = run("reserve", write(tmp_path, text), *arguments)
    assert (code, out) == (2, "")
    assert message in err
