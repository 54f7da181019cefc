"""Re-plans: what runs is kept where that is as good, with its names and sizes, and never at the cost of traffic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvantile_optimizer import planner, workload
from kvantile_optimizer.change import steps
from kvantile_optimizer.plan import Plan
from tests.support.fleets import random_serving_plan
from tests.support.specs import make_class, make_pool, planned


@pytest.mark.parametrize("seed", range(4))
def test_a_little_more_traffic_keeps_what_runs_and_leaves_nobody_out(seed: int) -> None:
    spec = random_serving_plan(6, 2, seed, gpus=24)
    workloads = workload.of_plan(spec, {})
    running = planner.make_plan(spec, workloads, rehearsed=False)
    assert not running.unserved
    more = [replace(workloads[0], requests_per_second=1.1 * workloads[0].requests_per_second), *workloads[1:]]
    again = planner.make_plan(spec, more, rehearsed=False, current=running)
    assert not again.unserved
    names = {group.name: group for group in running.groups}
    for group in again.groups:
        before = names.get(group.name)
        assert before is None or (before.max_num_seqs, before.max_num_batched_tokens) == (
            group.max_num_seqs,
            group.max_num_batched_tokens,
        )
    assert len(names.keys() & {group.name for group in again.groups}) >= len(names) - 1


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_has_the_replicas_that_its_own_mix_asks_for(seed: int) -> None:
    # Pools that are nearly full: what the first answer needs by its own figures does not fit.
    spec = random_serving_plan(8, 2, seed, gpus=8, prefix_share=0.0)
    plan = planner.make_plan(spec, workload.of_plan(spec, {}), rehearsed=False)
    assert not any("did not settle" in warning for warning in plan.warnings)


def tiers(rate: float, loose_rate: float) -> Plan:
    pools = [make_pool(per_node=1, maxGPUs=40)]
    classes = [make_class("tight", rate, ttft=800, tpot=60), make_class("loose", loose_rate, default=False, tpot=200)]
    return planned(pools=pools, classes=classes)


def test_a_group_keeps_its_name_when_the_other_tier_of_its_shape_goes() -> None:
    running = tiers(20.0, 40.0)
    pools = [make_pool(per_node=1, maxGPUs=40)]
    alone = planned(current=running, pools=pools, classes=[make_class("tight", 20.0, ttft=800, tpot=60)])
    kept = {group.name for group in running.groups} & {group.name for group in alone.groups}
    assert kept
    assert not [step for step in steps(running, alone, {}) if step.action == "start" and step.group in kept]


def test_what_stays_is_proved_best_where_that_is_little_work() -> None:
    running = planned(classes=[make_class(rate=8.0)])
    assert planned(current=running, classes=[make_class(rate=8.0)]).gap < 0.01


def test_what_was_planned_before_changes_nothing() -> None:
    spec = random_serving_plan(5, 2, 3, gpus=24)
    prices = {"memory": "3.0", "preemption": "0.2"}
    costs = spec.spec.costs.model_validate(prices)
    dear = spec.model_copy(update={"spec": spec.spec.model_copy(update={"costs": costs})})
    workloads = workload.of_plan(spec, {})
    longer = replace(workloads[0], output=np.full_like(workloads[0].output, workloads[0].upper / 2))

    def plans(items: list[workload.Workload]) -> list[str]:
        made = [planner.make_plan(each, items, rehearsed=False) for each in (spec, dear)]
        return [plan.model_copy(update={"solve_seconds": 0.0}).model_dump_json() for plan in made]

    first = plans(workloads)
    assert first == plans(workloads)
    assert first == plans([replace(each) for each in workloads])
    assert plans([longer, *workloads[1:]]) == plans([replace(each) for each in (longer, *workloads[1:])])
