"""Input that is wrong or extreme: `kvantile plan` names the field and exits with 2, or gives a plan that is one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import highspy
import numpy as np
import pytest

from kvantile_optimizer import coefficients, descent, planner, program, specfile, workload
from kvantile_optimizer.errors import InputError, TimeOverError, WorkError
from kvantile_optimizer.plan import Plan, PlanStatus
from kvantile_optimizer.relaxation import Relaxation
from kvantile_optimizer.sensitivity import sensitivities
from kvantile_optimizer.settle import Method
from kvantile_optimizer.solver import GrowingLinearProgram, Program
from kvantile_optimizer.workload import Workload
from tests.support.fleets import random_problem
from tests.support.specs import make_class, make_pool, make_serving_plan, planned
from tests.unit.optimizer.test_commands import Run, write, write_spec

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
    # To look up what balls around these cost takes several times the shortest limit there is.
    large = write_spec(tmp_path, classes=many_classes(5), robustness={"radius": "20"})
    assert run("plan", large, "--time-limit", "0.1") == (1, "", f"error: {NOTHING}\n")
    code, out, err = run("plan", large, "--time-limit", "0.1", "--current", running, "-o", "json")
    assert (code, err) == (0, "")
    kept = json.loads(out)
    assert kept["groups"] == json.loads(running.read_text())["groups"]
    assert (kept["steps"], kept["warnings"][-1]) == ([], planner.STANDS)


class FaultySolver(highspy.Highs):
    """HiGHS, but the first `faults` of its runs end as `fault` says."""

    fault, faults, runs = "", 0, 0

    def run(self) -> highspy.HighsStatus:
        answer = super().run()
        FaultySolver.runs += 1
        return highspy.HighsStatus.kError if self._broken("error") else answer

    def getModelStatus(self) -> highspy.HighsModelStatus:  # noqa: N802 - HiGHS's name
        if self._broken("status"):
            return highspy.HighsModelStatus.kSolveError
        if self._broken("unknown"):
            return highspy.HighsModelStatus.kUnknown
        return super().getModelStatus()

    def getSolution(self) -> Any:  # noqa: N802
        solution = super().getSolution()
        if self._broken("nan"):
            solution.col_value = [math.nan] * len(solution.col_value)
        elif self._broken("rows"):
            solution.col_value = [0.0] * len(solution.col_value)
        elif self._broken("fraction"):
            solution.col_value = [value + 0.3 for value in solution.col_value]
        return solution

    def _broken(self, fault: str) -> bool:
        return self.fault == fault and 0 < self.runs <= self.faults


def use_faulty(monkeypatch: pytest.MonkeyPatch, fault: str, faults: int) -> None:
    for name, value in (("fault", fault), ("faults", faults), ("runs", 0)):
        monkeypatch.setattr(FaultySolver, name, value)
    monkeypatch.setattr(highspy, "Highs", FaultySolver)


def small_program() -> Program:
    """The fewest whole x of at least 2.5."""
    program = Program()
    program.row({program.variable(10.0, 1.0, integer=True): 1.0}, lower=2.5)
    return program


@pytest.mark.parametrize("fault", ["error", "status", "unknown", "nan", "rows", "fraction"])
def test_a_solve_that_went_wrong_is_tried_once_more_and_then_an_error(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    use_faulty(monkeypatch, fault, 1)
    assert small_program().solve(5).values == pytest.approx([3.0])
    use_faulty(monkeypatch, fault, 10)
    with pytest.raises(WorkError, match="the solver stopped with"):
        small_program().solve(5)
    assert FaultySolver.runs == 2


@pytest.mark.parametrize("fault", ["error", "status", "unknown", "nan", "rows"])
def test_a_linear_program_that_went_wrong_is_factorised_afresh_and_then_an_error(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    use_faulty(monkeypatch, fault, 1)
    assert GrowingLinearProgram(small_program()).solve(5).values == pytest.approx([2.5])
    use_faulty(monkeypatch, fault, 10)
    with pytest.raises(WorkError, match="the solver stopped with"):
        GrowingLinearProgram(small_program()).solve(5)


@pytest.mark.parametrize("method", ["bcd", "exact"])
@pytest.mark.parametrize("fault", ["error", "status", "nan"])
def test_a_solver_in_trouble_never_gives_a_wrong_plan(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, method: str
) -> None:
    spec = write_spec(tmp_path)
    right = run("plan", spec, "--no-rehearse", "--method", method, "-o", "json")
    for faults in (1, 2, 3, 1000):
        use_faulty(monkeypatch, fault, faults)
        code, out, err = run("plan", spec, "--no-rehearse", "--method", method, "-o", "json")
        if code:
            assert (code, out) == (1, "")
            assert err.startswith("error: the solver stopped with ")
        else:
            assert json.loads(out)["groups"] == json.loads(right[1])["groups"]
    assert code == 1


def test_a_seed_beyond_the_solvers_is_still_a_seed() -> None:
    assert small_program().solve(5, seed=2**40 + 1).values == pytest.approx([3.0])


def test_prices_far_from_1_change_nothing() -> None:
    """Tolerances and the absolute gap of the solver are made for figures near 1."""
    for scale in (1e-12, 1e9):
        program = Program()
        many, few = (program.variable(10.0, scale * cost, integer=True) for cost in (1.0, 1.3))
        program.row({many: 1.0, few: 1.5}, lower=4.0)
        found = program.solve(5)
        assert found.values == pytest.approx([1.0, 2.0])
        assert found.objective == pytest.approx(3.6 * scale)


def served(plan: Plan) -> dict[str, float]:
    """The fraction of each class that groups with replicas serve, within what their engines can do."""
    fractions = dict.fromkeys((item.name for item in plan.classes), 0.0)
    rates = {item.name: item.requests_per_second for item in plan.classes}
    busy: dict[str, float] = {}
    for route in plan.routes:
        fractions[route.class_] += route.fraction
        seconds = rates[route.class_] * route.fraction * route.engine_seconds_per_request
        busy[route.group] = busy.get(route.group, 0.0) + seconds
    for name, seconds in busy.items():
        assert plan.group(name).replicas >= max(1, seconds)
    return fractions


@pytest.mark.parametrize("rate", ["0.000000001", "0.000001", "1000000", "999999999"])
@pytest.mark.parametrize("method", ["bcd", "exact"])
def test_every_rate_gets_replicas_that_carry_it(rate: str, method: Method) -> None:
    serving_plan = make_serving_plan(classes=[make_class("chat", rate), make_class("code", 3.0, default=False)])
    plan = planner.make_plan(serving_plan, workload.of_plan(serving_plan, {}), rehearsed=False, method=method)
    assert not plan.unserved
    assert served(plan) == pytest.approx({"chat": 1.0, "code": 1.0})


@pytest.mark.parametrize("rate", [50.0, 1e6])
def test_too_few_gpus_are_counted_however_many_are_missing(rate: float) -> None:
    classes = [make_class(rate=rate)]
    plan = planned(classes=classes, pools=[make_pool(maxGPUs=2)])
    (entry,) = plan.unserved
    assert entry.constraint == "gpus"
    assert served(plan)["chat"] == pytest.approx(1 - entry.fraction)
    count = int(entry.remedy.split()[0])
    if 2 + count <= 100_000:
        assert not planned(classes=classes, pools=[make_pool(maxGPUs=2 + count)]).unserved
    else:
        assert count == pytest.approx(planned(classes=classes, pools=[make_pool()]).gpu_count, rel=0.05)


def test_a_pool_without_gpus_says_how_many_it_needs() -> None:
    plan = planned(pools=[make_pool(maxGPUs=0)])
    (entry,) = plan.unserved
    assert (plan.status, plan.groups, entry.constraint) == (PlanStatus.INFEASIBLE, [], "gpus")
    assert entry.remedy == "1 more L40S in pool l40s"
    assert not planned(pools=[make_pool(maxGPUs=1)]).unserved


def test_a_pool_of_a_hundred_thousand_gpus_is_as_good_as_an_unlimited_one() -> None:
    assert planned(pools=[make_pool(maxGPUs=100_000)]).groups == planned(pools=[make_pool()]).groups


@pytest.mark.parametrize("price", ["0.000000001", "999999999"])
def test_prices_of_any_size_give_the_same_fleet(price: str) -> None:
    def with_price(price: str) -> Plan:
        pools = [make_pool(pricePerGPUHour=price), make_pool("l4", "L4", pricePerGPUHour=price)]
        return planned(pools=pools, classes=[make_class("chat", 6.0), make_class("code", 3.0, default=False, tpot=60)])

    usual, extreme = with_price("1"), with_price(price)
    assert [(group.name, group.replicas) for group in extreme.groups] == [
        (group.name, group.replicas) for group in usual.groups
    ]
    assert extreme.objective_usd_per_hour == pytest.approx(float(price) * usual.objective_usd_per_hour, rel=1e-6)


def test_a_pool_that_costs_nothing_beside_a_dear_one_is_bought_no_further_than_needed() -> None:
    pools = [
        make_pool(pricePerGPUHour="0.000000001", maxGPUs=1),
        make_pool("l4", "L4", pricePerGPUHour="999999999", maxGPUs=1),
    ]
    plan = planned(pools=pools, classes=[make_class(rate=40.0)])
    (entry,) = plan.unserved
    assert 1 <= int(entry.remedy.split()[0]) <= 20


def test_a_radius_larger_than_the_support_is_as_if_every_answer_were_the_longest() -> None:
    costs = {radius: planned(robustness={"radius": radius}) for radius in ("0", "1000", "2000", "999999999")}
    assert costs["2000"].objective_usd_per_hour == pytest.approx(costs["999999999"].objective_usd_per_hour)
    objectives = [plan.objective_usd_per_hour for plan in costs.values()]
    assert objectives == sorted(objectives)
    longest = planned(classes=[make_class(output={"p1": 2000, "max": 2000})], robustness={"radius": "0"})
    assert costs["999999999"].costs.gpu == pytest.approx(longest.costs.gpu, rel=0.1)


def test_answers_of_one_token_have_no_time_between_tokens() -> None:
    plan = planned(classes=[make_class(output={"p50": 1, "max": 1}, tpot=1000)])
    assert served(plan) == pytest.approx({"chat": 1.0})


@pytest.mark.parametrize("costs", [{"memory": "0", "preemption": "0"}, {"memory": "999999999", "preemption": "0"}])
def test_weights_of_costs_may_be_nothing_or_huge(costs: dict[str, str]) -> None:
    assert served(planned(costs=costs)) == pytest.approx({"chat": 1.0})


RATE = ("classes", 0, "demand", "requestsPerSecond")
OUTPUT = ("classes", 0, "demand", "outputTokens")
PROMPT = ("classes", 0, "demand", "promptTokens")
SECOND = [make_class(), make_class(default=False)]
GEOMETRY = {
    "layers": 32,
    "hiddenSize": 4096,
    "attentionHeads": 32,
    "kvHeads": 8,
    "headDim": 128,
    "parametersMillions": 8000,
}


def changed(spec: Any, path: Sequence[str | int], value: object) -> None:
    """Gives the field at `path` another value."""
    *way, last = path
    for step in way:
        spec = spec[step]
    spec[last] = value


def as_yaml(spec: object, *more: object) -> str:
    """A ServingPlan with `spec`, and other documents."""
    head = {"apiVersion": "kvantile.dev/v1alpha1", "kind": "ServingPlan", "metadata": {"name": "test"}}
    return "\n---\n".join(json.dumps(document) for document in ({**head, "spec": spec}, *more))


def usual_spec() -> dict[str, Any]:
    return make_serving_plan().spec.model_dump(mode="json", by_alias=True, exclude_none=True)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        *((RATE, value, "requestsPerSecond") for value in ("NaN", "inf", "-1", "0", "0.0", "1e3", "1000000000", "")),
        *((RATE, value, "requestsPerSecond") for value in (math.nan, math.inf, -math.inf, 12.5, None, True)),
        *((("classes", 0, "demand", "burstiness"), value, "burstiness") for value in ("NaN", "-1", math.inf)),
        *((("classes", 0, "slo", "percentile"), value, "slo.percentile") for value in (100, 101, 0, 99.5, math.nan)),
        *((("classes", 0, "slo", "ttftMilliseconds"), value, "slo.ttftMilliseconds") for value in (0, -1, math.nan)),
        *((("nodePools", 0, "maxGPUs"), value, "spec.nodePools[0].maxGPUs") for value in (1_000_000, -1, math.inf)),
        *((("nodePools", 0, "pricePerGPUHour"), value, "pricePerGPUHour") for value in ("0", "-1", "NaN", math.inf)),
        *((("robustness",), {"radius": value}, "spec.robustness.radius") for value in ("NaN", "-1", "1e9", math.inf)),
        *((("costs",), {"memory": value}, "spec.costs.memory") for value in ("NaN", "-1", math.inf)),
        (OUTPUT, {"p50": 0, "max": 10}, "spec.classes[0].demand.outputTokens.p50"),
        (OUTPUT, {"mean": 0, "p99": 10}, "spec.classes[0].demand.outputTokens.mean"),
        (OUTPUT, {"p50": 10, "max": 5}, "spec.classes[0].demand.outputTokens"),
        (OUTPUT, {}, "spec.classes[0].demand.outputTokens"),
        (PROMPT, {"p50": 0, "max": 10}, "spec.classes[0].demand.promptTokens.p50"),
        (PROMPT, {"p1": 8192, "max": 9000}, "spec.classes[0].demand.promptTokens"),
        (PROMPT, {"mean": 100_000, "p99": 100_001}, "spec.classes[0].demand.promptTokens"),
        (("classes",), [], "spec.classes"),
        (("nodePools",), [], "spec.nodePools"),
        (("classes",), SECOND, "chat twice"),
        *((("classes", 0, "name"), name, "spec.classes[0].name") for name in ("Chat", "a b", "a\nb", "é", "", "[red]")),
        *((("nodePools", 0, "name"), name, "spec.nodePools[0].name") for name in ("L4", "a/b", "x" * 64, "..")),
        *((("model", "name"), name, "spec.model.name") for name in ("a\x1b[31m", "a\nb", "\ud800", "[/nope]")),
        (("nodePools", 0, "gpu", "type"), "[/nope]", "spec.nodePools[0].gpu.type"),
    ],
)
def test_what_is_no_quantity_or_no_name_is_refused_by_its_field(
    run: Run, tmp_path: Path, path: Sequence[str | int], value: object, field: str
) -> None:
    spec = usual_spec()
    changed(spec, path, value)
    code, out, err = run("plan", write(tmp_path, as_yaml(spec)), "--no-rehearse")
    assert (code, out) == (2, "")
    assert field in err
    assert "found" in err
    assert "allowed" in err
    assert "\x1b" not in err


@pytest.mark.parametrize("name", ["[bold]x[/nope]", "[/]", "é漢", " ", "{x}"])
def test_names_are_printed_as_they_are(run: Run, tmp_path: Path, name: str) -> None:
    spec = usual_spec() | {"model": {"name": name, "maxModelLen": 8192, "geometry": GEOMETRY}}
    path = write(tmp_path, as_yaml(spec))
    code, out, _ = run("plan", path, "--no-rehearse")
    assert code == 0
    assert out.startswith(f"default/test: {name}\n")
    assert json.loads(run("plan", path, "--no-rehearse", "-o", "json")[1])["model"]["name"] == name


HEADER = "arrival_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "configMapRef: found nothing"),
        (HEADER, "configMapRef: found no answered request"),
        (HEADER + "0,0,5\n", "configMapRef:2: prompt_tokens: found"),
        (HEADER + "0,5,0\n", "configMapRef:2: output_tokens: found"),
        (HEADER + "0,5,nan\n", "configMapRef:2: output_tokens: found"),
        (HEADER + "inf,5,5\n", "configMapRef:2: arrival_s: found"),
        (HEADER + "0,8192,5\n", "spec.classes[0]: found prompts of 8192 tokens and more, allowed some under 8192"),
        (HEADER + "0,100,50\n", ""),
        (HEADER + "0,100,1\n", ""),
        (HEADER + "0,8191,1\n", ""),
    ],
)
@pytest.mark.parametrize("radius", ["auto", "10000"])
def test_a_class_of_no_sample_is_refused_and_one_of_a_single_sample_planned(
    run: Run, tmp_path: Path, text: str, told: str, radius: str
) -> None:
    spec = usual_spec() | {"robustness": {"radius": radius}}
    reference = {"configMapRef": {"name": "lengths", "key": "trace"}}
    changed(spec, ("classes", 0, "demand"), {"requestsPerSecond": "2", "samples": reference})
    config_map = {"kind": "ConfigMap", "metadata": {"name": "lengths"}, "data": {"trace": text}}
    path = write(tmp_path, as_yaml(spec, config_map))
    code, out, err = run("plan", path, "--no-rehearse", "-o", "json")
    if told:
        assert (code, out) == (2, "")
        assert told in err
    else:
        assert code == 0
        assert served(Plan.model_validate(json.loads(out))) == pytest.approx({"chat": 1.0})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("requests_per_second", value) for value in (math.nan, math.inf, 0.0, -1.0)),
        *(("burstiness", value) for value in (math.nan, math.inf, -1.0)),
        *((field, np.zeros(0)) for field in ("prompt", "output", "weight")),
        *((field, np.array([value])) for field in ("prompt", "output") for value in (0.0, -1.0, math.nan, math.inf)),
        *(("weight", np.array([value])) for value in (0.5, -1.0, math.nan, math.inf)),
        *(("upper", value) for value in (math.nan, math.inf, 0.0, 19.0)),
    ],
)
def test_a_workload_that_is_none_is_refused_by_its_field(field: str, value: object) -> None:
    right = Workload("chat", 1.0, 1.0, np.array([10.0]), np.array([20.0]), np.array([1.0]), 30.0, 8192)
    serving_plan = make_serving_plan()
    assert not planner.make_plan(serving_plan, [right], rehearsed=False).unserved
    wrong = replace(right, **{field: value})  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InputError, match=f"^class chat: .*{field if field != 'upper' else ''}.*: found .*, allowed "):
        planner.make_plan(serving_plan, [wrong], rehearsed=False)


def test_workloads_are_as_many_as_classes_and_a_time_limit_is_a_number() -> None:
    with pytest.raises(InputError, match=r"^workloads: found 0, allowed 1, one for each class$"):
        planner.make_plan(make_serving_plan(), [])
    with pytest.raises(InputError, match=r"^time_limit_s: found nan, allowed seconds$"):
        planned(time_limit_s=math.nan)


def test_ten_thousand_classes_are_a_spec_and_one_more_is_told() -> None:
    """Names are compared in one pass, and all described lengths together stay within a bound."""
    document = make_serving_plan().model_dump(mode="json", by_alias=True, exclude_none=True)
    classes = [make_class(f"class{number}", default=number == 0) for number in range(10_001)]
    document["spec"]["classes"] = classes[:-1]
    serving_plan = specfile.serving_plan(document)
    made = workload.of_plan_class(serving_plan, 5, {})
    assert len(made.weight) * len(serving_plan.spec.classes) <= workload.MOST_POINTS
    usual = workload.of_class(serving_plan.spec.classes[5], 8192)
    assert made.lengths.mean == pytest.approx(usual.lengths.mean, rel=0.01)
    assert made.lengths.quantile(0.99) == pytest.approx(usual.lengths.quantile(0.99), rel=0.05)
    document["spec"]["classes"] = classes
    with pytest.raises(
        InputError, match=r"^spec.classes: found a list of 10001, allowed a list of 1 to 10000 mappings$"
    ):
        specfile.serving_plan(document)


def test_a_search_that_is_cut_short_after_its_relaxation_still_has_a_plan() -> None:
    """Rounded up from the relaxation, whatever else there was no time for."""
    problem = random_problem(30, 3, 0, gpus=64)
    table = coefficients.tables(problem)
    relaxed = Relaxation(problem, table, coefficients.first_instance(problem))
    assert relaxed.solve(lambda: 30.0)
    relaxed.pin()
    found = descent._rounded(relaxed)
    assert found is not None
    posed, decision = found
    use = program.uses(posed, posed.columns) * decision.fractions
    carried = np.array([np.bincount(posed.columns.candidate, row, len(problem.candidates)) for row in use])
    assert (carried <= decision.replicas * (1 + 1e-6) + 1e-6).all()
    assert not decision.unserved.any()
    assert decision.objective >= relaxed.bound
