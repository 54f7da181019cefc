"""Plans: they add up, and they move in the direction that a person expects."""

from __future__ import annotations

from typing import Any

import pytest

from kvantile_optimizer import explain
from kvantile_optimizer.errors import InputError, WorkError
from kvantile_optimizer.plan import Plan, PlanStatus
from tests.support.specs import make_class, make_pool, planned


def test_a_plan_adds_up() -> None:
    plan = planned(classes=[make_class("chat", 6.0), make_class("code", 3.0, default=False, tpot=60)])
    for item in plan.classes:
        assert sum(route.fraction for route in plan.routes_of(item.name)) == pytest.approx(1.0)
    costs = plan.costs
    parts = costs.gpu + costs.memory + costs.preemption + costs.switching
    assert plan.objective_usd_per_hour == pytest.approx(parts)
    assert costs.gpu == pytest.approx(sum(group.price_usd_per_hour for group in plan.groups))
    assert plan.bound_usd_per_hour <= plan.objective_usd_per_hour
    assert 0 <= plan.gap < 0.01
    assert plan.status == PlanStatus.OPTIMAL
    assert all(group.gpus == group.replicas * group.tensor_parallel for group in plan.groups)


def test_a_measured_engine_replaces_what_is_assumed_of_its_parallelism() -> None:
    measured = {
        "alphaNanoseconds": "30000000",
        "betaNanoseconds": "200000",
        "gammaNanoseconds": "250.5",
        "deltaNanoseconds": "90000",
        "kvTokens": 100_000,
    }
    pools = [make_pool(per_node=1, calibrations=[measured])]
    (group,) = planned(pools=pools).groups
    (assumed,) = planned(pools=[make_pool(per_node=1)]).groups
    assert group.step_time.model_dump() == pytest.approx(
        {"alpha": 0.03, "beta": 2e-4, "gamma": 2.505e-7, "delta": 9e-5}
    )
    assert assumed.step_time.alpha != pytest.approx(0.03)
    # The cache is of an engine with 256 sequences and steps of 2,048 tokens: larger steps leave less.
    assert group.kv_tokens == pytest.approx(100_000, rel=0.1)
    assert abs(assumed.kv_tokens - 100_000) > 10_000


def test_a_parallelism_is_measured_once() -> None:
    measured = {"alphaNanoseconds": "1", "betaNanoseconds": "0", "gammaNanoseconds": "0", "deltaNanoseconds": "1"}
    with pytest.raises(ValueError, match="different tensorParallel"):
        planned(pools=[make_pool(calibrations=[measured, measured])])


def test_what_is_predicted_meets_the_targets() -> None:
    plan = planned(classes=[make_class("chat", 9.0), make_class("code", 5.0, default=False, tpot=60)])
    targets = {item.name: item.slo for item in plan.classes}
    for seen in plan.predictions:
        assert seen.tpot_seconds <= targets[seen.class_].tpot_seconds * 1.02
        assert seen.ttft_seconds <= targets[seen.class_].ttft_seconds * 1.02
    for group in plan.group_predictions:
        assert 0 < group.utilisation < 1
        assert group.kv_mean_tokens < group.kv_p99_tokens <= plan.group(group.group).kv_tokens * 1.02


def test_memory_is_planned_at_p99_whatever_the_targets_percentile() -> None:
    slo = {"ttftMilliseconds": 3000, "tpotMilliseconds": 100, "percentile": 50}
    plan = planned(classes=[make_class(rate=20.0, slo=slo)], pools=[make_pool("rtx4090", "RTX4090", per_node=1)])
    for seen in plan.group_predictions:
        assert seen.kv_mean_tokens < seen.kv_p99_tokens <= plan.group(seen.group).kv_tokens * 1.02
    assert all(group.tail_margin > 1.1 for group in plan.groups)


def test_a_kept_plan_is_held_against_the_bound_of_a_free_one() -> None:
    running = planned(classes=[make_class(rate=30.0)])
    kept = planned(current=running, classes=[make_class(rate=15.0)], replan={"hysteresisPercent": 100})
    assert kept.history[-1].block == "keep"
    assert kept.gap > 0.1


def test_nothing_reserved_has_no_price_of_its_own() -> None:
    costs = planned(engine={"reservation": "None"}).costs
    assert (costs.memory, costs.preemption) == (0.0, 0.0)


@pytest.mark.parametrize(("order", "radius", "told"), [(1, "5", True), (2, "60", False), (2, "0", False)])
def test_a_plan_says_when_its_robust_reservation_is_the_sample_quantile(order: int, radius: str, told: bool) -> None:
    plan = planned(robustness={"order": order, "radius": radius})
    assert any("robust reservation at the sample quantile" in note for note in plan.warnings) == told


def test_a_class_may_have_a_radius_of_its_own() -> None:
    own = {**make_class("code", 3.0, default=False), "robustness": {"radius": "30"}}
    plan = planned(classes=[make_class("chat", 6.0), own], robustness={"radius": "4"})
    assert [item.radius for item in plan.classes] == [4, 30]


def test_json_is_read_back_as_it_was() -> None:
    plan = planned()
    assert Plan.model_validate(plan.to_json()) == plan


def test_the_same_seed_gives_the_same_plan() -> None:
    first, second = (planned().model_copy(update={"solve_seconds": 0.0}) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("easy", "hard"),
    [
        ({"tpot": 150}, {"tpot": 40}),
        ({"ttft": 6000}, {"ttft": 700}),
        ({}, {"rate": 30.0}),
        ({"burstiness": 1.0}, {"burstiness": 6.0}),
        (
            {"output": {"p50": 100, "p90": 200, "max": 400}},
            {"output": {"p50": 800, "p90": 1500, "max": 3000}},
        ),
        (
            {"prompt": {"p50": 200, "p90": 500, "max": 1000}},
            {"prompt": {"p50": 1500, "p90": 2000, "max": 3000}},
        ),
    ],
    ids=["tpot", "ttft", "rate", "burstiness", "longer answers", "longer prompts"],
)
def test_a_harder_demand_costs_more(easy: dict[str, Any], hard: dict[str, Any]) -> None:
    cheap, dear = (planned(classes=[make_class(**{"rate": 15.0, **item})]) for item in (easy, hard))
    assert not cheap.unserved
    assert not dear.unserved
    assert dear.costs.gpu > cheap.costs.gpu


def test_a_pool_is_used_when_it_becomes_cheap_and_left_when_it_becomes_dear() -> None:
    def gpus(plan: Plan, pool: str) -> int:
        return sum(group.gpus for group in plan.groups if group.pool == pool)

    def with_price(price: str) -> Plan:
        return planned(
            pools=[make_pool(pricePerGPUHour="1.80"), make_pool("a100", "A100-80", pricePerGPUHour=price)],
            classes=[make_class(rate=12.0)],
        )

    assert gpus(with_price("9.00"), "a100") == 0
    cheap = with_price("1.00")
    assert gpus(cheap, "a100") > 0
    assert gpus(cheap, "l40s") == 0
    assert cheap.objective_usd_per_hour < with_price("9.00").objective_usd_per_hour


def test_scaling_every_price_scales_the_cost() -> None:
    def with_prices(scale: float) -> Plan:
        pools = [
            make_pool(pricePerGPUHour=f"{1.8 * scale:.4f}"),
            make_pool("l4", "L4", pricePerGPUHour=f"{0.8 * scale:.4f}"),
        ]
        return planned(pools=pools)

    assert with_prices(3.0).objective_usd_per_hour == pytest.approx(
        3 * with_prices(1.0).objective_usd_per_hour, rel=1e-3
    )


def test_dearer_memory_reserves_less_and_dearer_preemptions_more() -> None:
    def fractile(**costs: str) -> float:
        plan = planned(costs=costs, engine={"reservation": "Held"}, classes=[make_class(rate=2.0)])
        return max(route.fractile for route in plan.routes)

    assert fractile(memory="20.0") < fractile() <= fractile(preemption="20.0")


def test_a_wider_ball_never_costs_less() -> None:
    costs = [planned(robustness={"order": 2, "radius": radius}).objective_usd_per_hour for radius in ("0", "20", "80")]
    assert costs == sorted(costs)


def test_the_order_of_classes_and_pools_does_not_matter() -> None:
    classes = [make_class("chat", 6.0), make_class("code", 3.0, default=False, tpot=60)]
    pools = [make_pool(), make_pool("l4", "L4"), make_pool("a10g", "A10G")]
    plain = planned(classes=classes, pools=pools)
    turned = planned(classes=classes[::-1], pools=pools[::-1])
    assert turned.objective_usd_per_hour == pytest.approx(plain.objective_usd_per_hour, rel=2e-4)


def test_forms_are_what_was_asked_for() -> None:
    held = planned(engine={"reservation": "Held", "order": "FirstCome"})
    assert {(route.form, route.order) for route in held.routes} == {("held", "fcfs")}
    none = planned(engine={"reservation": "None"})
    assert {(route.form, route.reserve_tokens) for route in none.routes} == {("none", 0)}
    assert {route.form for route in planned().routes} == {"pooled"}


def test_a_shared_prefix_that_stays_resident_saves_time() -> None:
    plain = planned(classes=[make_class(rate=12.0)])
    shared = planned(classes=[make_class(rate=12.0, sharedPrefix={"tokens": 300, "share": "1"})])
    assert shared.resident_prefixes
    assert shared.objective_usd_per_hour <= plain.objective_usd_per_hour


def test_a_target_that_no_gpu_meets_is_unserved_with_the_number_that_would_do() -> None:
    plan = planned(classes=[make_class("chat"), make_class("fast", 1.0, default=False, tpot=2)])
    (entry,) = plan.unserved
    assert (entry.class_, entry.fraction, entry.constraint) == ("fast", 1.0, "tpot")
    assert entry.remedy.startswith("TPOT 2 ms to ")
    lifted = int(entry.remedy.removeprefix("TPOT 2 ms to ").removesuffix(" ms"))
    again = planned(classes=[make_class("chat"), make_class("fast", 1.0, default=False, tpot=2 * lifted)])
    assert not again.unserved
    assert sum(route.fraction for route in plan.routes_of("chat")) == pytest.approx(1.0)


def test_a_first_token_target_below_the_prefill_is_unserved_with_the_number_that_would_do() -> None:
    plan = planned(classes=[make_class(ttft=20)], pools=[make_pool()])
    (entry,) = plan.unserved
    assert entry.constraint == "ttft"
    assert entry.remedy.startswith("TTFT 20 ms to ")
    assert plan.status == PlanStatus.INFEASIBLE
    assert not plan.groups


def test_too_few_gpus_serve_what_they_can_and_say_how_many_more_it_takes() -> None:
    pools = [make_pool(maxGPUs=1)]
    plan = planned(pools=pools, classes=[make_class(rate=20.0)])
    (entry,) = plan.unserved
    assert 0 < entry.fraction < 1
    assert entry.constraint == "gpus"
    count = int(entry.remedy.split()[0])
    assert not planned(pools=[make_pool(maxGPUs=1 + count)], classes=[make_class(rate=20.0)]).unserved
    assert planned(pools=[make_pool(maxGPUs=count)], classes=[make_class(rate=20.0)]).unserved


def test_a_model_too_large_for_every_pool_is_unserved_and_says_what_it_needs() -> None:
    plan = planned(
        model={"name": "meta-llama/Llama-3.1-70B-Instruct", "maxModelLen": 8192},
        pools=[make_pool("l4", "L4", per_node=1, maxGPUs=4)],
    )
    (entry,) = plan.unserved
    assert (entry.fraction, entry.constraint) == (1.0, "weights")
    assert "131 GiB" in entry.remedy


def test_gpus_are_packed_onto_whole_nodes() -> None:
    # Three nodes of one GPU each hold no replica that needs two.
    plan = planned(
        model={"name": "Qwen/Qwen2.5-32B-Instruct", "maxModelLen": 8192},
        pools=[make_pool(per_node=1, maxGPUs=3)],
    )
    assert plan.unserved
    whole = planned(
        model={"name": "Qwen/Qwen2.5-32B-Instruct", "maxModelLen": 8192},
        pools=[make_pool(per_node=4, maxGPUs=8)],
        classes=[make_class(rate=1.0)],
    )
    assert not whole.unserved


def test_a_time_limit_that_ends_before_any_plan_is_an_error_that_says_so() -> None:
    with pytest.raises(WorkError, match="--time-limit"):
        planned(time_limit_s=1e-9)


def test_the_running_plan_stays_while_the_gain_is_small() -> None:
    running = planned(classes=[make_class(rate=10.0)])
    same = planned(current=running, classes=[make_class(rate=9.6)], replan={"hysteresisPercent": 30})
    assert [(g.name, g.replicas) for g in same.groups] == [(g.name, g.replicas) for g in running.groups]
    more = planned(current=running, classes=[make_class(rate=40.0)])
    assert more.gpu_count > running.gpu_count
    assert more.costs.switching > 0


def test_unknown_hardware_and_models_are_named() -> None:
    with pytest.raises(InputError, match=r"spec.nodePools\[0\].gpu.type: found 'H1OO-80' \(did you mean H100-80\?\)"):
        planned(pools=[make_pool("h100", "H1OO-80")])
    with pytest.raises(InputError, match=r"spec.model.name: found 'org/nothing-known'"):
        planned(model={"name": "org/nothing-known", "maxModelLen": 8192})


def test_the_explanation_gives_a_reason_for_each_group_and_each_reservation() -> None:
    plan = planned()
    text = "\n".join(explain.reasons(plan))
    for group in plan.groups:
        assert f"{group.name}: {group.replicas} replica" in text
    for route in plan.routes:
        assert f"{route.reserve_tokens} are set aside" in text
