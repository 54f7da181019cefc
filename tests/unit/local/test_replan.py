"""When the running plan gives way."""

from __future__ import annotations

import pytest

from kvantile_optimizer.local import replan
from kvantile_optimizer.observation import ClassObservation, Observations
from kvantile_optimizer.plan import PlanStatus
from kvantile_optimizer.spec import Demand, OutputLengths, PromptLengths, RequestClass, Slo
from kvantile_optimizer.workload import Workload, of_class
from tests.support.small_plan import make_group, make_plan, make_route


def make_workload(name: str = "chat") -> Workload:
    demand = Demand(
        requests_per_second="2",
        prompt_tokens=PromptLengths(mean=500, p99=2000),
        output_tokens=OutputLengths(p50=100, p90=200, max=400),
    )
    return of_class(RequestClass(name=name, slo=Slo(ttft_milliseconds=1000, tpot_milliseconds=50), demand=demand), 4096)


def observed(lengths: dict[int, int]) -> Observations:
    count = sum(lengths.values())
    found = ClassObservation(requests=count, arrival_seconds_sum=100.0, finished=lengths, prompts={500: count})
    return Observations(since_seconds=100.0, classes={"chat": found})


def test_answers_of_twice_the_length_are_a_drift() -> None:
    found = replan.seen([make_workload()], observed({350: 500, 390: 500}), observed_traffic=True)
    assert found.drifted == ["chat"]
    assert found.workloads[0].requests_per_second == pytest.approx(10.0)


def test_without_observed_traffic_the_planned_rate_stays() -> None:
    found = replan.seen([make_workload()], observed({350: 500, 390: 500}), observed_traffic=False)
    assert found.drifted == ["chat"]
    assert found.workloads[0].requests_per_second == pytest.approx(2.0)


def test_a_few_answers_are_no_drift() -> None:
    assert not replan.seen([make_workload()], observed({390: 9}), observed_traffic=True).drifted


def test_a_class_nobody_asked_for_stays_as_planned() -> None:
    prior = make_workload()
    assert replan.seen([prior], Observations(since_seconds=100.0), observed_traffic=True).workloads == [prior]


def test_other_reservations_on_the_same_replicas_are_adopted() -> None:
    running = make_plan()
    candidate = running.model_copy(update={"routes": [make_route("chat", "l4", reserve=256), running.routes[1]]})
    assert replan.adopts(running, candidate)
    assert not replan.adopts(running, running)


def test_other_replicas_are_adopted() -> None:
    assert replan.adopts(make_plan(make_group(replicas=2)), make_plan(make_group(replicas=3)))


def test_a_plan_that_serves_nothing_is_not_adopted() -> None:
    running = make_plan()
    nothing = running.model_copy(update={"groups": [], "routes": [], "status": PlanStatus.INFEASIBLE})
    assert not replan.adopts(running, nothing)
