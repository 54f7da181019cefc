"""What a plan says to a person: why so many replicas and so much reserved, how to get there, and what if."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from kvantile_optimizer import explain, headroom
from kvantile_optimizer.headroom import Limit
from kvantile_optimizer.plan import Plan
from tests.support.plans import make_class, make_group, make_plan, make_route


def make_loaded(replicas: int = 4, **given: Any) -> Plan:
    """A group at half load, its KV cache less than half full, with times that are a third of their targets."""
    group = {"utilisation": 0.5, "kvMeanTokens": 3_000.0, "kvP99Tokens": 4_000.0} | given.pop("group", {})
    times = {"ttftSeconds": 0.33, "tpotSeconds": 0.016} | given.pop("times", {})
    route = given.pop("route", {})
    return make_plan(
        groups=[make_group(replicas=replicas, gpus=replicas)],
        classes=[make_class(requestsPerSecond=2.0, radius=given.pop("radius", 0.0))],
        routes=[make_route(meanTokens=50.0, fractile=0.9, **route)],
        predictions=[{"class": "chat", "percentile": 99, "preemptionProbability": 0.0, **times}],
        groupPredictions=[{"group": "g", **group}],
        **given,
    )


def rendered(plan: Plan) -> str:
    console = Console(file=io.StringIO(), width=120)
    explain.render(plan, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_with_the_planned_replicas_the_predictions_are_what_is_used() -> None:
    plan = make_loaded()
    used = {use.limit: use.used for use in headroom.uses(plan, plan.groups[0], 4)}
    assert used[Limit.LOAD] == 0.5
    assert used[Limit.TTFT] == pytest.approx(0.33)
    assert used[Limit.TPOT] == pytest.approx(0.016)
    assert used[Limit.KV] == pytest.approx(4_000)
    # 2 req/s of 50 tokens at 10 ms / (1 - 0.5) each, over four replicas, with the tail of the KV.
    assert used[Limit.SEQUENCES] == pytest.approx(2 * 50 * 0.02 / 4 * 4 / 3)


def test_fewer_replicas_stretch_times_and_fill_memory() -> None:
    plan = make_loaded()
    used = {use.limit: use.used for use in headroom.uses(plan, plan.groups[0], 3)}
    assert used[Limit.LOAD] == pytest.approx(2 / 3)
    assert used[Limit.TPOT] == pytest.approx(0.016 * 0.5 / (1 / 3))
    assert used[Limit.KV] == pytest.approx(4_000 * 4 / 3 * 1.5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"group": {"utilisation": 0.8}}, "with one fewer, its engines' time (107% of it) would be too much"),
        ({"group": {"kvP99Tokens": 6_000.0}}, "with one fewer, its KV cache (P99 at 120%) would be too much"),
        ({"times": {"tpotSeconds": 0.05}}, "chat's TPOT (about 75 ms, 150% of its target) would be too much"),
        ({"times": {"ttftSeconds": 0.9}}, "chat's TTFT (about 1.35 s, 135% of its target) would be too much"),
        ({"times": {"ttftSeconds": 0.62}}, "chat's TTFT (about 0.93 s, 93% of its target) would leave nothing for"),
        ({"group": {"kvMeanTokens": 20.0}}, "its sequences (about 200 at P99, 312% of what may run) would be too much"),
        ({"group": {"kvP99Tokens": 3_000.0}}, "would come nearest to its limit and hold by these figures"),
    ],
    ids=["load", "KV", "TPOT", "TTFT", "just", "sequences", "nothing"],
)
def test_the_limit_that_one_fewer_would_miss_is_named(changed: dict[str, Any], said: str) -> None:
    (line, _) = explain.reasons(make_loaded(**changed))
    assert line.startswith("g: 4 replicas carry chat; ")
    assert said in line


def test_a_lone_replica_is_told_with_what_comes_nearest() -> None:
    line = explain.reasons(make_loaded(replicas=1, group={"kvP99Tokens": 6_000.0}))[0]
    assert line == "g: 1 replica carries chat; its KV cache (P99 at 60%) comes nearest to its limit"


def test_too_few_gpus_are_the_reason_for_what_they_leave_unserved() -> None:
    missing = {"class": "chat", "fraction": 0.2, "constraint": "gpus", "remedy": "2 more L4 in pool p"}
    line = explain.reasons(make_loaded(unserved=[missing]))[0]
    assert line.endswith("more would serve more, but there are no GPUs for them")


def test_a_group_without_routes_is_told_as_such() -> None:
    assert explain.reasons(make_plan(routes=[]))[0] == "g: 1 replica, though nothing is routed to it"


def test_the_fractile_is_told_by_what_a_missing_and_an_idle_token_cost() -> None:
    prices = {"idleUSDPerToken": 1e-9, "shortageUSDPerToken": 4e-8, "shortageUSD": 4e-6}
    line = explain.reasons(make_loaded(route=prices, radius=12.0))[1]
    assert "100 are set aside (pooled, of which 10% count), which covers 90.0% of them" in line
    assert "a missing token costs 40 times what an idle one does, and any shortage that of 100 more" in line
    assert "so the fractile to cover is 97.6%, robust to a shift of 12 tokens" in line


def test_idle_tokens_that_cost_nothing_are_all_reserved() -> None:
    line = explain.reasons(make_loaded(route={"idleUSDPerToken": 0.0, "shortageUSDPerToken": 4e-8}))[1]
    assert "a missing token costs something and an idle one nothing, so the fractile to cover is 100.0%" in line


def test_a_plan_without_prices_still_says_why() -> None:
    assert "an idle token costs more than a preemption saves" in explain.reasons(make_loaded())[1]


def test_what_replays_chose_is_told_beside_what_prices_ask_for() -> None:
    prices = {"idleUSDPerToken": 1e-9, "shortageUSDPerToken": 4e-8}
    other = explain.reasons(make_loaded(route=prices | {"pricedTokens": 300}))[1]
    assert (
        "100 are set aside (pooled, of which 10% count), which covers 90.0% of them. Prices alone ask for 300" in other
    )
    assert "but replays met as many targets with this: the KV cache is full to 40% at P99" in other
    assert "and 0.0% of the requests are preempted" in other
    same = explain.reasons(make_loaded(route=prices | {"pricedTokens": 100}))[1]
    assert same.endswith("so the fractile to cover is 97.6%, and replays found nothing better")
    none = explain.reasons(make_loaded(route=prices | {"pricedTokens": 300, "form": "none", "reserveTokens": 0}))[1]
    assert "none are set aside. Prices alone ask for 300" in none
    asked = explain.reasons(make_loaded(route={"pricedTokens": 0, "form": "none", "reserveTokens": 0}))[1]
    assert asked == "chat on g: nothing is reserved, as the plan was asked to"


def make_step(action: str, replicas: int, **given: Any) -> dict[str, Any]:
    usual = {"group": "g", "plan": "target", "gpusInUse": {"p": 3, "q": 0}, "reason": "there is room for it"}
    return {"action": action, "replicas": replicas} | usual | given


def test_steps_are_told_in_order_with_the_gpus_they_use() -> None:
    stop = make_step("stop", 0, plan="running", uncovered=["chat"], reason="its requests are done")
    plan = make_loaded(steps=[make_step("start", 2), stop])
    assert explain.steps(plan) == [
        "1. start g (2 then): there is room for it (GPUs: 3 p)",
        "2. stop the old g (0 left): its requests are done (GPUs: 3 p); chat without a group",
    ]
    assert "2. stop the old g" in rendered(plan)


def test_long_changes_are_cut() -> None:
    lines = explain.steps(make_loaded(steps=[make_step("start", number) for number in range(30)]))
    assert len(lines) == 21
    assert lines[-1].startswith("… and 10 more")


def test_sensitivities_are_a_table_with_signs() -> None:
    solved = {"status": "optimal", "objectiveUSDPerHour": 3.0, "gpus": 3}
    plan = make_loaded(
        sensitivities=[
            {"change": "a GPU more", "deltaUSDPerHour": -1.5, "unservedFractionDelta": -0.021, **solved},
            {"change": "a dollar less", "deltaUSDPerHour": 0.001, "unservedFractionDelta": 0.0, **solved},
            {"change": "10 ms more", "status": "unsolved"},
        ]
    )
    rows = [line.split() for line in rendered(plan).splitlines()]
    assert ["a", "GPU", "more", "-1.50", "-2.1", "%", "-1"] in rows
    assert ["a", "dollar", "less", "0", "0", "%", "-1"] in rows
    assert ["10", "ms", "more", "no", "time"] in rows
