"""Plans that have replayed their own answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvantile_optimizer import planner, workload
from kvantile_optimizer.errors import WorkError
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.rehearsal.requests import synthesise
from kvantile_optimizer.simulator.fleet import simulate_plan
from tests.support.specs import make_class, make_pool, make_serving_plan, planned

LONG_S = 600.0
"""More than any plan here takes on a busy machine, so that none is cut short."""


@pytest.mark.slow
def test_a_rehearsed_plan_holds_on_a_fresh_replay() -> None:
    classes = [make_class("chat", 8.0), make_class("code", 4.0, default=False, tpot=60)]
    plan = planned(rehearsed=True, classes=classes)
    workloads = workload.of_plan(make_serving_plan(classes=classes), {})
    requests, class_index = synthesise(plan, workloads, 12345, 20_000)
    seen = simulate_plan(plan, requests, class_index, 1).answers
    for place in range(2):
        mine = seen.only(class_index == place)
        assert (mine.ttft_s <= mine.ttft_target_s).mean() >= 0.98
        assert not any("does not surely meet" in note for note in plan.warnings)


@pytest.mark.slow
def test_a_lower_percentile_under_bursts_needs_no_more_gpus_in_slack_order_than_first_come() -> None:
    def gpus(order: str) -> int:
        slo = {"ttftMilliseconds": 3000, "tpotMilliseconds": 100, "percentile": 95}
        bursty = make_class(rate=12.0, slo=slo, burstiness=4.0)
        return planned(rehearsed=True, classes=[bursty], engine={"order": order}).gpu_count

    assert gpus("Slack") <= gpus("FirstCome")


@pytest.mark.slow
def test_bursty_classes_are_pooled_where_groups_of_their_own_would_need_more_gpus() -> None:
    code, code_answer = {"mean": 2000, "p99": 7000}, {"mean": 28, "p99": 140}
    talk, talk_answer = {"mean": 1200, "p99": 4000}, {"mean": 200, "p99": 600}
    classes = [
        make_class("code", 5.0, burstiness=4.0, ttft=2000, tpot=80, prompt=code, output=code_answer),
        make_class("talk", 5.0, default=False, burstiness=4.0, ttft=4000, prompt=talk, output=talk_answer),
    ]
    apart = planned(classes=classes, pools=[make_pool()])
    pooled = planned(time_limit_s=LONG_S, rehearsed=True, classes=classes, pools=[make_pool()])
    assert len(apart.groups) > 1
    assert len(pooled.groups) == 1
    assert not any("does not surely meet" in note for note in pooled.warnings)


def test_what_replays_have_shown_is_planned_with_the_next_time() -> None:
    plan = planned()
    better = plan.model_copy(update={"groups": [g.model_copy(update={"capacity_ratio": 2.0}) for g in plan.groups]})
    assert (
        planned(like=better, classes=[make_class(rate=30.0)]).gpu_count
        < planned(classes=[make_class(rate=30.0)]).gpu_count
    )


def by_turns() -> Callable[[], float]:
    """A clock on which a second passes whenever it is looked at."""
    seconds = iter(range(1_000_000))
    return lambda: float(next(seconds))


def planned_in(seconds: float) -> Plan:
    spec = make_serving_plan(classes=[make_class(rate=20.0)])
    return planner.make_plan(spec, workload.of_plan(spec, {}), time_limit_s=seconds, clock=by_turns())


def test_a_plan_that_was_found_is_never_lost_to_the_time_limit() -> None:
    with pytest.raises(WorkError):
        planned_in(1)
    # From the first that is enough for a plan on: one whose replays were cut anywhere is a whole one, and says so.
    for seconds in (6, 16, 32, 64):
        plan = planned_in(seconds)
        assert plan.groups
        assert len(plan.predictions) == len(plan.classes)
        assert seconds > 32 or any("no time was left to replay" in note for note in plan.warnings)


@pytest.mark.slow
def test_a_shape_whose_replay_fails_gives_way_to_another_one() -> None:
    # One pair of L40S and one of L4 look cheapest and miss; three single L40S would do for the tight targets alone.
    classes = [
        make_class("chat", 3.0, ttft=1000, tpot=60, burstiness=2.0),
        make_class("bulk", 4.0, default=False, ttft=4000, tpot=150, burstiness=2.0),
    ]
    plan = planned(time_limit_s=LONG_S, rehearsed=True, classes=classes, pools=[make_pool(), make_pool("l4", "L4")])
    assert not any("does not surely meet" in note for note in plan.warnings)
    assert plan.costs.gpu <= 3 * 1.80 + 1e-9


@pytest.mark.slow
def test_further_pools_never_make_a_rehearsed_plan_dearer() -> None:
    classes = [make_class(rate=20.0, burstiness=1.5)]
    alone = planned(time_limit_s=LONG_S, rehearsed=True, classes=classes, pools=[make_pool()])
    assert planned(time_limit_s=LONG_S, rehearsed=True, classes=classes).costs.gpu <= alone.costs.gpu + 1e-9
