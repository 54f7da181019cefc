"""Sensitivities are plans for a slightly different world, and what others take lowers the pools."""

from __future__ import annotations

from typing import Any

import pytest

from kvantile_optimizer import sensitivity, taken, workload
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.spec import ServingPlan
from kvantile_optimizer.workload import Workload
from tests.support.specs import make_class, make_pool, make_serving_plan, planned

Case = tuple[Plan, ServingPlan, list[Workload]]


def make_case(**overrides: Any) -> Case:
    """A plan with what it was made from."""
    serving_plan = make_serving_plan(**overrides)
    return planned(**overrides), serving_plan, workload.of_plan(serving_plan, {})


def changes(case: Case) -> list[str]:
    """What would be looked at, in this order."""
    return [variation.change for variation in sensitivity.variations(*case)]


@pytest.fixture(scope="module")
def short() -> Case:
    """One GPU, and traffic for more."""
    return make_case(pools=[make_pool(maxGPUs=1)], classes=[make_class(rate=12.0)])


def test_every_entry_is_the_plan_for_its_world(short: Case) -> None:
    told: list[tuple[int, int]] = []
    entries = sensitivity.sensitivities(*short, progress=lambda done, total, _: told.append((done, total)))
    assert told == [(number, len(entries)) for number in range(len(entries))]
    first = entries[0]
    again = planned(pools=[make_pool(maxGPUs=2)], classes=[make_class(rate=12.0)])
    assert first.change == "one more GPU in pool l40s"
    assert first.gpus == again.gpu_count
    assert first.objective_usd_per_hour == pytest.approx(again.objective_usd_per_hour)
    assert first.delta_usd_per_hour == pytest.approx(again.objective_usd_per_hour - short[0].objective_usd_per_hour)
    assert first.unserved_fraction_delta is not None
    assert first.unserved_fraction_delta < -0.1
    by_change = {entry.change: entry.unserved_fraction_delta or 0.0 for entry in entries}
    assert by_change["10 % less traffic of chat"] < 0 < by_change["10 % more traffic of chat"]


def test_pools_targets_that_bind_and_traffic_are_varied() -> None:
    case = make_case(
        pools=[make_pool(pricePerGPUHour="1.80"), make_pool("l4", "L4", maxGPUs=4)],
        classes=[make_class("chat", tpot=120), make_class("code", default=False, tpot=100)],
    )
    assert set(changes(case)) >= {
        "one more GPU in pool l4",
        "a GPU-hour of pool l40s for $0.90 less",
        "a GPU-hour of pool l4 for $0.40 less",
        "TPOT of code 110 ms instead of 100 ms",
        "10 % less traffic of chat",
        "10 % more traffic of chat",
        "10 % less traffic of code",
        "10 % more traffic of code",
    }
    assert "one more GPU in pool l40s" not in changes(case)


def test_the_most_promising_comes_first() -> None:
    names = changes(
        make_case(
            pools=[make_pool(pricePerGPUHour="1.80"), make_pool("a100", "A100-80", pricePerGPUHour="9.00")],
            classes=[make_class("chat", rate=12.0), make_class("code", 1.0, default=False)],
        )
    )
    assert names.index("a GPU-hour of pool l40s for $0.90 less") < names.index("a GPU-hour of pool a100 for $1.00 less")
    assert names.index("10 % more traffic of chat") < names.index("10 % more traffic of code")


def test_what_was_not_solved_in_time_says_so(short: Case) -> None:
    entries = sensitivity.sensitivities(*short, time_limit_s=0.0)
    assert entries
    assert {entry.status for entry in entries} == {"unsolved"}
    plan = short[0].model_copy(update={"sensitivities": entries})
    assert plan.to_json()["sensitivities"][0] == {"change": entries[0].change, "status": "unsolved"}
    assert Plan.model_validate(plan.to_json()) == plan


def test_what_others_take_lowers_limited_pools_only() -> None:
    serving_plan = make_serving_plan(pools=[make_pool(maxGPUs=8), make_pool("l4", "L4")])
    left = taken.without(serving_plan, {"l40s": 3, "l4": 5})
    assert [pool.max_gpus for pool in left.spec.node_pools] == [5, None]
    assert [pool.max_gpus for pool in serving_plan.spec.node_pools] == [8, None]
    assert taken.without(serving_plan, {}) == serving_plan


def test_faults_in_what_others_take_are_named_together() -> None:
    serving_plan = make_serving_plan(pools=[make_pool(maxGPUs=8), make_pool("l4", "L4")])
    with pytest.raises(InputError) as error:
        taken.without(serving_plan, {"l40s": 9, "h100": 1, "l4": -1})
    assert str(error.value).splitlines() == [
        "taken.l40s: found 9, allowed 0 to 8, the GPUs of the pool",
        "taken.h100: found no such pool, allowed l40s, l4",
        "taken.l4: found -1, allowed 0 or more",
    ]
