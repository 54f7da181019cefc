"""A plan's groups and routes in the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvantile_optimizer.ambiguity import Losses
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.plan import Plan, ResidentPrefix
from kvantile_optimizer.simulator import arrivals, policies, rows
from kvantile_optimizer.simulator.fleet import PlanOutcome, simulate_plan
from kvantile_optimizer.simulator.replica import Policy, ReplicaSpec, Requests, simulate_replica
from kvantile_optimizer.spec import IntegerRange, Match
from kvantile_optimizer.traces import HashIds, Trace
from kvantile_optimizer.workload import Lengths
from tests.support.small_plan import make_group, make_plan, make_route


def make_requests(count: int = 600, *, per_second: float = 4.0, seed: int = 0) -> tuple[Requests, np.ndarray]:
    rng = np.random.default_rng(seed)
    requests = Requests(
        np.cumsum(rng.exponential(1 / per_second, count)), rng.integers(1, 600, count), rng.integers(1, 300, count)
    )
    return requests, rng.integers(0, 2, count)


def split_plan(fraction: float = 0.25) -> Plan:
    plan = make_plan(make_group("a"), make_group("b", replicas=2))
    routes = [
        make_route(name, group).model_copy(update={"fraction": share})
        for name in ("chat", "code")
        for group, share in (("a", fraction), ("b", 1 - fraction))
    ]
    return plan.model_copy(update={"routes": routes})


def simulate(plan: Plan, **given: float) -> PlanOutcome:
    return simulate_plan(plan, *make_requests(**given))  # type: ignore[arg-type]  # rates and counts


def test_one_group_is_its_replica_with_the_routes_reservations() -> None:
    requests, classes = make_requests()
    plan = make_plan()
    found = simulate_plan(plan, requests, classes)
    same = Requests(requests.arrival_s, requests.prompt, requests.output, 5.0)
    policy = Policy("pooled", np.where(classes == 0, 128, 64), 0.25, "slack")
    alone = simulate_replica(same, ReplicaSpec.of(plan.groups[0]), policy)
    assert found.outcome.last_s.tolist() == alone.last_s.tolist()


def test_groups_get_their_fractions() -> None:
    found = simulate(split_plan(), count=4000, per_second=10.0)
    assert np.mean(found.group_index == 0) == pytest.approx(0.25, abs=0.02)
    assert set(found.outcome.replica[found.group_index == 0]) == {0}
    assert set(found.outcome.replica[found.group_index == 1]) == {1, 2}


def test_a_group_without_replicas_gets_nothing() -> None:
    plan = split_plan()
    groups = [plan.groups[0].model_copy(update={"replicas": 0}), plan.groups[1]]
    found = simulate(plan.model_copy(update={"groups": groups}))
    assert set(found.group_index) == {1}
    with pytest.raises(InputError, match="groups"):
        simulate(plan.model_copy(update={"groups": groups[:1]}))


def test_a_request_goes_where_it_fits_and_is_refused_where_none_does() -> None:
    plan = split_plan(0.5)
    groups = [plan.groups[0].model_copy(update={"max_model_len": 100}), plan.groups[1]]
    requests = Requests(np.zeros(50), np.full(50, 200), np.array([10] * 49 + [4000]))
    found = simulate_plan(plan.model_copy(update={"groups": groups}), requests, np.zeros(50))
    assert set(found.group_index[:49]) == {1}
    assert found.group_index[49] == -1
    assert rows.plan_row(found)["requestsFailed"] == 1


def test_rows_count_every_request_once() -> None:
    found = simulate(split_plan(), per_second=8.0)
    total, classes, groups = rows.plan_row(found), rows.class_rows(found), rows.group_rows(found)
    assert sum(int(row["requests"] or 0) for row in classes) == total["requests"] == 600
    assert sum(int(row["requests"] or 0) for row in groups) == 600
    assert 0 < float(total["kvUsedFraction"] or 0) < float(total["kvCommittedFraction"] or 0) < 1
    for row in groups:
        assert 0 < float(row["kvMeanTokens"] or 0) < float(row["kvP99Tokens"] or 0) <= 8192
        assert 0 < float(row["busyFraction"] or 0) <= 1


def test_a_faster_engine_misses_fewer_targets() -> None:
    plan = make_plan(ttft_seconds=1.0)
    step = plan.groups[0].step_time
    fast = plan.groups[0].model_copy(update={"step_time": step.model_copy(update={"alpha": step.alpha / 3})})
    missed = [
        float(rows.plan_row(simulate(item, per_second=6.0))["sloViolationFraction"] or 0)
        for item in (plan, plan.model_copy(update={"groups": [fast]}))
    ]
    assert missed[1] < missed[0]


def test_slack_order_meets_more_targets_than_first_come_under_overload() -> None:
    plan = make_plan(ttft_seconds=2.0)
    fcfs = [route.model_copy(update={"order": "fcfs"}) for route in plan.routes]
    goodput = [
        float(rows.plan_row(simulate(item, per_second=9.0, count=2000))["goodputRequestsPerSecond"] or 0)
        for item in (plan, plan.model_copy(update={"routes": fcfs}))
    ]
    assert goodput[0] > 1.1 * goodput[1]


def make_past() -> policies.Past:
    return policies.Past(Lengths.of(np.arange(1, 301), np.ones(300), 512), Losses(1.0, 9.0), radius=10.0)


@pytest.mark.parametrize("name", policies.NAMES)
def test_every_policy_of_the_evaluation_serves_a_plan(name: str) -> None:
    requests, classes = make_requests(per_second=6.0)
    policy = policies.named(name, requests, classes, [make_past(), make_past()])
    found = simulate_plan(make_plan(), requests, classes, policy=policy)
    assert found.outcome.served.all()
    assert (found.reserve > 0).all() == (name not in policies.NOTHING)


def test_policies_reserve_what_their_names_say() -> None:
    requests, classes = make_requests()
    reserves = {
        name: int(np.max(policies.named(name, requests, classes, [make_past()] * 2).reserve)) for name in policies.NAMES
    }
    assert (reserves["p50"], reserves["p90"], reserves["max-tokens"]) == (160, 272, 512)
    assert reserves["saa"] == reserves["p90"] == reserves["dro-1"]
    assert reserves["dro-2"] >= reserves["saa"]
    assert reserves["stock"] == 0
    with pytest.raises(InputError, match="p42"):
        policies.named("p42", requests, classes, [make_past()] * 2)


def make_trace(labels: list[str], prompt: list[int], *, timed: bool = True) -> Trace:
    count = len(labels)
    return Trace(
        np.linspace(100.0, 99.0 + count, count) if timed else np.full(count, np.nan, np.float64),
        np.array(prompt),
        np.full(count, 5),
        np.zeros(count, np.bool_),
        np.array(labels),
        np.full(count, ""),
        np.zeros(count, np.int64),
    )


def test_rows_of_a_trace_find_their_class_by_label_then_by_length_then_by_default() -> None:
    plan = make_plan()
    rule = Match(prompt_tokens=IntegerRange(gte=1000))
    plan = plan.model_copy(update={"classes": [plan.classes[0], plan.classes[1].model_copy(update={"match": [rule]})]})
    requests, classes = arrivals.of_trace(plan, make_trace(["Code", "", "", "other"], [5, 5, 2000, 5]), speed=2.0)
    assert classes.tolist() == [1, 0, 1, 0]
    assert requests.arrival_s.tolist() == [0.0, 0.5, 1.0, 1.5]


def test_rows_without_times_come_at_the_plans_rate() -> None:
    plan = make_plan()
    trace = make_trace(["chat"] * 2000, [5] * 2000, timed=False)
    with pytest.raises(InputError, match="arrival_s"):
        arrivals.of_trace(plan, trace)
    rated = [item.model_copy(update={"requests_per_second": 2.0}) for item in plan.classes]
    requests, _ = arrivals.of_trace(plan.model_copy(update={"classes": rated}), trace)
    assert requests.arrival_s[-1] == pytest.approx(500, rel=0.1)


def conversations(turns: int, *, of: int = 8, per_second: float = 0.5) -> Requests:
    """`of` dialogues side by side, whose prompts grow by 64 tokens a turn."""
    count, stretch = turns * of, 64
    turn, dialogue = np.divmod(np.arange(count), of)
    ids = [[d * turns + step for step in range(t + 1)] for t, d in zip(turn, dialogue, strict=True)]
    begin = np.cumsum(turn + 1) - (turn + 1)
    return Requests(
        np.arange(count) / per_second,
        (turn + 1) * stretch,
        np.full(count, 10),
        hash_ids=HashIds(np.concatenate(ids), begin, turn + 1, stretch),
    )


def test_a_dialogue_finds_its_last_turn_computed_where_memory_keeps_it() -> None:
    requests = conversations(10)
    roomy, tight = (
        simulate_plan(make_plan(make_group(kv_tokens=tokens)), requests, np.zeros(80, np.int64))
        for tokens in (8192, 1024)
    )
    # Of turn t all but its last 64 tokens were there before.
    everything = 1 - 8 * 10 * 64 / int(requests.prompt.sum())
    assert rows.plan_row(roomy)["prefixHitFraction"] == pytest.approx(everything)
    assert float(rows.plan_row(tight)["prefixHitFraction"] or 0) < everything / 2
    assert np.nanmean(roomy.outcome.ttft_s) < np.nanmean(tight.outcome.ttft_s)
    assert roomy.outcome.kv_mean_share() < 0.05  # what is only cached is free


def test_a_resident_prefix_is_never_evicted_where_prompts_say_what_they_consist_of() -> None:
    requests = replace(conversations(10), cached=64)
    kept = simulate_plan(
        with_resident_prefix(make_plan(make_group(kv_tokens=1024)), 64), requests, np.zeros(80, np.int64)
    )
    assert (kept.outcome.hit_tokens[8:] >= 64).all()


def with_resident_prefix(plan: Plan, tokens: int) -> Plan:
    prefix = ResidentPrefix.model_validate({"class": "chat", "group": plan.groups[0].name, "tokens": tokens})
    return plan.model_copy(update={"resident_prefixes": [prefix]})


def test_a_resident_prefix_is_held_once_for_all_who_carry_it() -> None:
    requests, _ = make_requests(400, per_second=4.0)
    carrying = replace(requests, prompt=requests.prompt + 500, cached=500)
    chat = np.zeros(400, np.int64)
    apart = simulate_plan(make_plan(), carrying, chat)
    shared = simulate_plan(with_resident_prefix(make_plan(), 500), carrying, chat)
    assert shared.outcome.kv_mean_share() < 0.9 * apart.outcome.kv_mean_share()
    assert np.nanmean(shared.outcome.ttft_s) < np.nanmean(apart.outcome.ttft_s)


def test_a_resident_prefix_takes_its_whole_blocks_from_those_who_do_not_carry_it() -> None:
    plan = with_resident_prefix(make_plan(make_group(kv_tokens=2048)), 500)
    kv_tokens, size = plan.groups[0].kv_tokens, plan.groups[0].block_size
    left = kv_tokens - 500 // size * size
    requests = Requests(np.array([0.0, 1000.0]), np.array([left - 9, left - 8]), np.array([9, 9]))
    assert simulate_plan(plan, requests, np.zeros(2, np.int64)).outcome.served.tolist() == [True, False]
