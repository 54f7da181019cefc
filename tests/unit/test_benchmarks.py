"""The harness of `make bench-optimizer`, on rows of its own and, quickly, on real ones that need no traces."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from benchmarks.optimizer import __main__ as command
from benchmarks.optimizer import ambiguity, fleet, harness, heldout, hindsight, report, scenarios, table
from benchmarks.optimizer.row import Row, Run, Setting, Target, Watch
from click.testing import CliRunner

from kvantile_optimizer import geometry, hardware, load, traces, workload
from kvantile_optimizer.ambiguity import Losses
from kvantile_optimizer.workload import Lengths
from tests.support.specs import make_serving_plan


def make_row(*targets: Target, key: str = "mine") -> Row:
    return Row(key, "what I say", targets or (Target("speed", 10, "at least"),), lambda *_: Run({}), limit_s=1)


def make_options(folder: Path) -> harness.Options:
    return harness.Options.of(None, folder, quick=True, workers=1)


def test_keys_of_rows_are_unique() -> None:
    keys = [row.key for row in table.ROWS]
    assert len(set(keys)) == len(keys)


def test_rows_are_chosen_by_key_and_an_unknown_one_is_answered_with_what_there_is() -> None:
    assert [row.key for row in table.chosen("reservation, ambiguity")] == ["reservation", "ambiguity"]
    with pytest.raises(KeyError, match="found nothing-such, allowed ambiguity"):
        table.chosen("nothing-such")


def test_a_watch_counts_what_came_too_late_but_lets_the_first_pass() -> None:
    now = iter([0.0, 0.5, 2.0, 3.0])
    watch = Watch(1.0, clock=lambda: next(now))
    assert list(watch.within("abcd")) == ["a", "b"]
    assert watch.left_out == 2


def test_a_target_counts_the_median_or_the_worst_of_the_runs() -> None:
    assert Target("x", 1, "at most").value([1, 2, 9]) == 2
    assert Target("x", 1, "at most", over_runs="worst").value([1, 2, 9]) == 9
    assert Target("x", 1, "at least", over_runs="worst").value([1, 2, 9]) == 1


@pytest.mark.parametrize(("figure", "left_out", "met"), [(12.0, 0, True), (9.0, 0, False), (12.0, 3, False)])
def test_a_figure_is_met_at_its_bound_and_only_if_nothing_was_left_out(figure: float, left_out: int, met: bool) -> None:
    (line,) = report.lines([make_row()], {"mine": [Run({"speed": figure}, left_out=left_out)]})
    assert line.met == met


def test_a_figure_that_a_run_lacks_is_not_met() -> None:
    (line,) = report.lines([make_row()], {"mine": [Run({"speed": 11.0}), Run({})]})
    assert not line.met
    data = report.data([make_row()], {"mine": [Run({"speed": math.nan})]}, quick=False)
    assert data["runs"]["mine"][0]["figures"] == {"speed": None}


def test_a_case_that_several_runs_remark_on_is_written_once() -> None:
    runs = [Run({"speed": 11.0}, {"chat": f"slow by {seed}"} if seed else {}) for seed in range(5)]
    text = report.markdown([make_row()], {"mine": runs}, quick=False)
    assert "* chat (4 of 5 runs): slow by 1" in text
    assert "slow by 2" not in text


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    options = make_options(tmp_path)
    row = table.chosen("simulator-exact")[0]
    told: list[str] = []
    first = harness.measure([row], options, lambda done: told.append(done.key))
    again = harness.measure([row], options, lambda done: told.append(done.key))
    assert again == first
    assert told == ["simulator-exact"] * 2


def test_a_row_that_fails_is_told_and_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "burstgpt.csv.gz").write_bytes(b"")
    options = harness.Options.of(tmp_path, tmp_path / "build", quick=True, workers=1)
    (row,) = table.chosen("heldout")
    (run,) = harness.measure([row], options, lambda _: None)["heldout"]
    assert run.figures == {}
    assert "burstgpt.csv.gz" in run.notes["failed"]
    assert not list(options.kept.glob("heldout*"))


def test_the_command_writes_the_table_as_markdown_and_json(tmp_path: Path) -> None:
    ran = CliRunner().invoke(command.main, ["--quick", "--rows", "reservation", "--build", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    assert "too little of each row to be evidence" in ran.stdout
    data = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    assert [line["key"] for line in data["lines"]] == ["reservation"] * 3
    assert "order 2" in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_without_the_traces_the_command_says_which_rows_need_them(tmp_path: Path) -> None:
    ran = CliRunner().invoke(command.main, ["--rows", "heldout,ambiguity", "--traces", str(tmp_path)])
    assert ran.exit_code == 2
    assert "found no burstgpt.csv.gz in" in ran.stderr
    assert "which heldout need; --rows ambiguity need none" in ran.stderr


def test_the_transport_program_knows_scarfs_term() -> None:
    # Far from both ends an order-2 ball costs the radius times the root of both prices more.
    given = ambiguity.Instance(Lengths.of([500], [1], 10_000), Losses(1, 9), 2, 2.0, 1)
    assert ambiguity.transported(given, 500.0 + 2 * (9 - 1) / (2 * 3)) == pytest.approx(2 * 3, rel=1e-6)


def test_a_few_random_worst_cases_equal_their_transport_programs(tmp_path: Path) -> None:
    found = ambiguity.run(Setting(None, tmp_path, True, Watch(60)), 3)
    assert found.figures["loss"] < 1e-6
    assert found.figures["reservation"] < 1e-6


def test_moments_of_a_coarse_clock_are_spread_over_its_tick() -> None:
    assert scenarios.spread(np.array([0.0, 0, 0, 3, 9, 9])).tolist() == [0, 1, 2, 3, 9, 10.5]


def test_passes_through_a_trace_keep_its_requests_and_its_pace() -> None:
    trace = traces.bundled()
    passes = scenarios.rotated(trace, 1, 2 * len(trace))
    assert len(passes) == 2 * len(trace)
    assert np.array_equal(np.sort(passes.prompt), np.sort(np.tile(trace.prompt, 2)))
    assert np.all(np.diff(passes.arrival_s) >= 0)
    assert np.ptp(passes.arrival_s) == pytest.approx(2 * np.ptp(trace.arrival_s), rel=0.01)


def test_bursts_have_the_rate_on_average_and_four_times_their_calm() -> None:
    moments = scenarios.modulated(np.random.default_rng(0), 10.0, 20_000)
    assert moments[-1] == pytest.approx(2000)
    counts = np.bincount((moments / 5).astype(int))
    assert np.percentile(counts, 90) / np.percentile(counts, 10) > 3


def test_the_mean_wait_of_one_server_is_that_of_an_mm1_queue() -> None:
    assert fleet.mean_wait(0.8, 1.0, 1) == pytest.approx(0.8 / (1 - 0.8))
    assert fleet.mean_wait(1.0, 1.0, 1) == math.inf


def test_a_load_of_one_fills_the_cache_on_average() -> None:
    (work,) = workload.of_plan(make_serving_plan(), {})
    rate = hindsight.capacity([work], "L4")
    model, gpu = geometry.catalogue()["Llama-3.1-8B"], hardware.gpu_table()["L4"]
    step, part = hardware.step_time(model, gpu, 1, 1), load.moments(work, 99)
    rho = rate * load.engine_seconds(step, part)
    used = step.alpha * rate * part.footprint / (1 - rho)
    assert used == pytest.approx(hardware.kv_tokens(model, gpu, 1, 1, 2048, 256))


@pytest.mark.parametrize("quick", [True, False])
def test_rows_about_plans_have_as_many_scenarios_as_they_say(quick: bool) -> None:
    assert len(hindsight.cases(quick)) == (1 if quick else 60)
    for names in ([case.name for case in module.cases(quick)] for module in (hindsight, fleet)):
        assert len(set(names)) == len(names)
    assert len({scenario.name for scenario in heldout.scenarios(quick)}) == (2 if quick else 36)
