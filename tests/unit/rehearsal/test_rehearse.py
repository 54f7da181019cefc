"""A rehearsed plan says what a fresh replay shows, keeps to what is fixed, and needs no more time than there is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvantile_optimizer.plan import Plan
from kvantile_optimizer.rehearsal.choice import candidates, race
from kvantile_optimizer.rehearsal.rehearse import Rehearsal, rehearse
from kvantile_optimizer.rehearsal.requests import synthesise
from kvantile_optimizer.rehearsal.scene import scenes
from kvantile_optimizer.simulator.fleet import simulate_plan
from kvantile_optimizer.simulator.rows import class_rows, group_rows
from kvantile_optimizer.workload import Workload
from tests.unit.rehearsal.cases import make_bursty_plan, make_record, make_workload


def forever() -> float:
    return 1e9


def rehearsed(plan: Plan, *workloads: Workload, reservation: str = "Pooled", order: str = "Slack") -> Rehearsal:
    return rehearse(plan, list(workloads), reservation=reservation, order=order, seed=1, left_s=forever)


def test_slack_order_needs_fewer_replicas_than_first_come_under_bursts() -> None:
    plan = make_bursty_plan(11, percentile=97, ttft_s={"chat": 1.5, "report": 5.0})
    record = make_record(6_000, period=600)
    workloads = [make_workload(name, rate=20.0, burstiness=1.0, record=record) for name in ("chat", "report")]
    needed = {order: rehearsed(plan, *workloads, order=order).groups["g"] for order in ("Slack", "FirstCome")}
    assert needed["Slack"].replicas_needed is not None
    assert needed["FirstCome"].replicas_needed is not None
    assert needed["Slack"].replicas_needed < needed["FirstCome"].replicas_needed


def test_the_replicas_that_are_needed_hold_on_a_fresh_seed_and_one_fewer_do_not() -> None:
    workload = make_workload(rate=20.0, burstiness=1.5)
    found = rehearsed(make_bursty_plan(6), workload)
    needed, (group,) = found.groups["g"].replicas_needed, found.plan.groups
    assert needed is not None
    for replicas, holds in ((needed, True), (needed - 1, False)):
        plan = found.plan.model_copy(update={"groups": [group.model_copy(update={"replicas": replicas})]})
        (row,) = class_rows(simulate_plan(plan, *synthesise(plan, [workload], seed=77, count=10_000)))
        assert (float(row["ttftSeconds"] or 0) <= float(row["ttftTargetSeconds"] or 0)) is holds


def test_a_plan_with_too_few_replicas_says_how_many_would_do() -> None:
    found = rehearsed(make_bursty_plan(2), make_workload(rate=20.0, burstiness=2.0))
    group = found.groups["g"]
    assert not group.holds
    assert group.misses["chat"] > 0.03
    assert group.replicas_needed is not None
    assert group.replicas_needed > 2
    assert any(f"{group.replicas_needed} would do" in note for note in found.plan.warnings)


def test_targets_that_no_number_of_replicas_meets_are_said_to_be_so() -> None:
    # The longest prompts alone take longer than the target allows.
    workload = make_workload(rate=1.0, burstiness=1.0, prompt=np.full(2000, 3000.0))
    plan = make_bursty_plan(1)
    (item,) = plan.classes
    hard = item.model_copy(update={"slo": item.slo.model_copy(update={"ttft_seconds": 0.2})})
    found = rehearsed(plan.model_copy(update={"classes": [hard]}), workload)
    assert found.groups["g"].replicas_needed is None
    assert any("no number of replicas" in note for note in found.plan.warnings)


@pytest.mark.parametrize(("reservation", "form"), [("None", "none"), ("Held", "held"), ("Pooled", "pooled")])
@pytest.mark.parametrize(("order", "word"), [("Slack", "slack"), ("Deadline", "deadline"), ("FirstCome", "fcfs")])
def test_a_choice_fixed_in_the_spec_is_respected(reservation: str, form: str, order: str, word: str) -> None:
    (scene,) = scenes(make_bursty_plan(), [make_workload()])
    manner = race(scene, candidates(scene, reservation, order), 1, forever)
    assert manner is not None
    assert (manner.form, manner.order) == (form, word)


def test_an_engine_that_is_only_advised_is_replayed_so_and_keeps_its_hints() -> None:
    plan = make_bursty_plan()
    found = rehearsed(plan, make_workload(), reservation="Advisory")
    assert found.plan.routes == plan.routes
    assert found.groups["g"].manner.form == "none"


def test_what_is_chosen_is_written_into_the_routes() -> None:
    found = rehearsed(make_bursty_plan(), make_workload(), reservation="Auto")
    (route,), manner = found.plan.routes, found.groups["g"].manner
    assert (route.form, route.pooling_fraction, (route.reserve_tokens,), route.order) == (
        manner.form,
        manner.phi,
        manner.reserve,
        manner.order,
    )
    assert route.fractile == pytest.approx(float(make_workload().lengths.cdf(route.reserve_tokens)))


def test_the_same_seed_gives_the_same_rehearsal() -> None:
    assert rehearsed(make_bursty_plan(percentile=90), make_workload()) == rehearsed(
        make_bursty_plan(percentile=90), make_workload()
    )


def test_no_time_left_is_not_an_error_but_said() -> None:
    plan = make_bursty_plan()
    found = rehearse(plan, [make_workload()], reservation="Auto", order="Slack", seed=1, left_s=lambda: 0.0)
    assert (found.groups, found.costs) == ({}, {})
    assert found.plan.model_copy(update={"warnings": []}) == plan
    (note,) = found.plan.warnings
    assert "closed forms" in note


@pytest.mark.parametrize("turns", [1, 4, 20, 30])
def test_time_that_runs_out_in_between_leaves_a_whole_plan(turns: int) -> None:
    clock: Iterator[int] = iter(range(turns, -1_000_000, -1))
    plan = make_bursty_plan(2)
    found = rehearse(
        plan, [make_workload()], reservation="Auto", order="Slack", seed=1, left_s=lambda: float(next(clock))
    )
    assert len(found.plan.predictions) == 1
    assert found.plan.routes[0].class_ == "chat"


def test_predictions_agree_with_a_fresh_replay() -> None:
    workloads = [make_workload(rate=12.0, burstiness=1.0), make_workload("code", rate=6.0, burstiness=1.5)]
    plan = make_bursty_plan(3, percentile=95, kv_tokens=60_000, ttft_s={"chat": 1.5, "code": 1.5})
    plan = rehearse(plan, workloads, reservation="Auto", order="Slack", seed=1, left_s=forever).plan
    found = simulate_plan(plan, *synthesise(plan, workloads, seed=77, count=20_000), seed=77)
    for seen, row in zip(plan.predictions, class_rows(found), strict=True):
        assert seen.ttft_seconds == pytest.approx(row["ttftSeconds"], rel=0.1)
        assert seen.tpot_seconds == pytest.approx(row["tpotSeconds"], rel=0.1)
        assert seen.tpot_mean_seconds == pytest.approx(row["tpotMeanSeconds"], rel=0.03)
    (group,), (told,) = group_rows(found), plan.group_predictions
    assert told.busy_fraction == pytest.approx(group["busyFraction"], rel=0.03)
    assert told.kv_mean_tokens == pytest.approx(group["kvMeanTokens"], rel=0.05)
    assert told.kv_p99_tokens == pytest.approx(group["kvP99Tokens"], rel=0.1)


def test_a_shortage_has_a_price_where_memory_is_short_and_none_where_it_is_not() -> None:
    workload = make_workload(rate=4.0, burstiness=1.0)
    scarce = rehearsed(make_bursty_plan(1, kv_tokens=9_000), workload).costs["chat"]
    ample = rehearsed(make_bursty_plan(1, kv_tokens=900_000), make_workload(rate=1.0, burstiness=1.0)).costs["chat"]
    assert scarce.under_usd_per_token + scarce.fixed_usd > 0
    assert min(scarce.under_usd_per_token, scarce.fixed_usd, scarce.idle_usd_per_token) >= 0
    assert ample.under_usd_per_token < scarce.under_usd_per_token + scarce.fixed_usd
