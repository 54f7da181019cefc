"""A rehearsed plan says what a fresh replay shows, keeps to what is fixed, and needs no more time than there is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvantile_optimizer.plan import Plan
from kvantile_optimizer.rehearsal import capacity
from kvantile_optimizer.rehearsal.choice import candidates, race
from kvantile_optimizer.rehearsal.rehearse import Rehearsal, rehearse
from kvantile_optimizer.rehearsal.requests import synthesise
from kvantile_optimizer.rehearsal.scene import MOST_REPLICAS, Manner, scenes
from kvantile_optimizer.simulator.fleet import simulate_plan
from kvantile_optimizer.simulator.rows import class_rows, group_rows
from kvantile_optimizer.waiting import Order
from kvantile_optimizer.workload import Workload
from tests.unit.rehearsal.cases import make_bursty_plan, make_record, make_workload


def forever() -> float:
    return 1e9


def for_turns(count: int) -> Callable[[], float]:
    """A clock that has time for so many questions: one for each group's race, then one before each replay."""
    clock = iter(range(count, -1_000_000, -1))
    return lambda: float(next(clock))


PREDICTIONS_ONLY = 1 + capacity.SEEDS
"""Turns for each group where the form is fixed."""


def rehearsed(
    plan: Plan,
    *workloads: Workload,
    reservation: str = "None",
    order: str = "Slack",
    left_s: Callable[[], float] = forever,
) -> Rehearsal:
    return rehearse(plan, list(workloads), reservation=reservation, order=order, seed=1, left_s=left_s)


def test_slack_order_needs_fewer_replicas_than_first_come_under_bursts() -> None:
    plan = make_bursty_plan(11, percentile=97, ttft_s={"chat": 1.5, "report": 5.0})
    record = make_record(6_000, period=600)
    workloads = [make_workload(name, rate=20.0, burstiness=1.0, record=record) for name in ("chat", "report")]
    (scene,) = scenes(plan, workloads)

    def needed(order: Order) -> int:
        manner = Manner("pooled", 0.1, (400, 400), order)
        takes = [scene.replay(manner, 1 + place) for place in range(capacity.SEEDS)]
        return capacity.find(scene, manner, 1, takes, forever).replicas or 0

    assert 0 < needed("slack") < needed("fcfs")


def test_a_manner_that_only_suits_a_lighter_load_does_not_settle_the_capacity() -> None:
    (scene,) = scenes(make_bursty_plan(6), [make_workload(rate=20.0, burstiness=1.0)])
    held, pooled = Manner("held", 1.0, (976,), "slack"), Manner("pooled", 0.1, (400,), "slack")
    takes = [scene.replay(held, 1 + place) for place in range(capacity.SEEDS)]
    found = capacity.find(scene, held, 1, takes, forever)
    raised = capacity.raised(scene, pooled, 1, found, forever)
    assert found.replicas is not None
    assert raised.replicas is not None
    assert raised.replicas < found.replicas
    assert capacity.raised(scene, held, 1, raised, forever) == raised


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
    assert any("no number was found" in note for note in found.plan.warnings)


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
    found = rehearsed(plan, make_workload(), reservation="Auto", left_s=for_turns(0))
    assert (found.groups, found.costs) == ({}, {})
    assert found.plan.model_copy(update={"warnings": []}) == plan
    (note,) = found.plan.warnings
    assert "closed forms" in note


@pytest.mark.parametrize("turns", [1, 4, 20, 30])
def test_time_that_runs_out_in_between_leaves_a_whole_plan(turns: int) -> None:
    plan = make_bursty_plan(2)
    found = rehearsed(plan, make_workload(), reservation="Auto", left_s=for_turns(turns))
    assert len(found.plan.predictions) == 1
    assert found.plan.routes[0].class_ == "chat"


def test_predictions_agree_with_a_fresh_replay() -> None:
    workloads = [make_workload(rate=12.0, burstiness=1.0), make_workload("code", rate=6.0, burstiness=1.5)]
    plan = make_bursty_plan(3, percentile=95, kv_tokens=60_000, ttft_s={"chat": 1.5, "code": 1.5})
    plan = rehearsed(plan, *workloads, left_s=for_turns(PREDICTIONS_ONLY)).plan
    found = simulate_plan(plan, *synthesise(plan, workloads, seed=77, count=20_000), seed=77)
    for seen, row in zip(plan.predictions, class_rows(found), strict=True):
        assert seen.ttft_seconds == pytest.approx(row["ttftSeconds"], rel=0.1)
        assert seen.tpot_seconds == pytest.approx(row["tpotSeconds"], rel=0.1)
        assert seen.tpot_mean_seconds == pytest.approx(row["tpotMeanSeconds"], rel=0.03)
    (group,), (told,) = group_rows(found), plan.group_predictions
    assert told.busy_fraction == pytest.approx(group["busyFraction"], rel=0.03)
    assert told.kv_mean_tokens == pytest.approx(group["kvMeanTokens"], rel=0.05)
    assert told.kv_p99_tokens == pytest.approx(group["kvP99Tokens"], rel=0.1)


def test_a_class_of_two_groups_sees_both() -> None:
    plan = make_bursty_plan(2, kv_tokens=60_000)
    (fast,), (route,) = plan.groups, plan.routes
    slow = fast.model_copy(
        update={"name": "slow", "step_time": fast.step_time.model_copy(update={"alpha": 0.02, "delta": 2e-4})}
    )
    parts = (("g", 0.7), ("slow", 0.3))
    plan = plan.model_copy(
        update={
            "groups": [fast, slow],
            "routes": [route.model_copy(update={"group": name, "fraction": share}) for name, share in parts],
        }
    )
    workload = make_workload(rate=10.0, burstiness=1.0)
    found = rehearsed(plan, workload, left_s=for_turns(2 * PREDICTIONS_ONLY))
    assert set(found.groups) == {"g", "slow"}
    (seen,) = found.plan.predictions
    (row,) = class_rows(simulate_plan(found.plan, *synthesise(plan, [workload], seed=77, count=20_000), seed=77))
    assert seen.ttft_seconds == pytest.approx(row["ttftSeconds"], rel=0.1)
    assert seen.tpot_seconds == pytest.approx(row["tpotSeconds"], rel=0.1)
    assert seen.tpot_mean_seconds == pytest.approx(row["tpotMeanSeconds"], rel=0.03)


def test_of_a_large_group_a_few_replicas_are_replayed_and_that_is_said() -> None:
    found, small = (
        rehearsed(
            make_bursty_plan(replicas),
            make_workload(rate=1.5 * replicas, burstiness=1.0),
            left_s=for_turns(PREDICTIONS_ONLY),
        )
        for replicas in (1_000, MOST_REPLICAS)
    )
    assert f"{MOST_REPLICAS} of its 1,000 replicas" in found.plan.warnings[0]
    (large_prediction,), (small_prediction,) = found.plan.group_predictions, small.plan.group_predictions
    assert large_prediction.utilisation == pytest.approx(small_prediction.utilisation, rel=0.01)


def test_where_memory_is_never_short_the_plan_keeps_what_it_reserves() -> None:
    (scene,) = scenes(make_bursty_plan(1, kv_tokens=900_000), [make_workload(rate=1.0)])
    manner = race(scene, candidates(scene, "Auto", "Slack"), 1, forever)
    assert manner == candidates(scene, "Auto", "Slack")[0]
    assert manner is not None
    assert (manner.form, manner.reserve) == ("pooled", (400,))


def test_classes_of_few_requests_are_judged_together() -> None:
    names = {"chat": 1.5, **{f"rare{number}": 1.5 for number in range(5)}}
    workloads = [make_workload(name, rate=8.0 if name == "chat" else 0.01) for name in names]
    (scene,) = scenes(make_bursty_plan(ttft_s=names), workloads)
    jury = capacity.Jury.of(scene)
    assert jury.weights.shape == (2, 6)
    assert jury.weights[1].tolist() == pytest.approx([0, 0.2, 0.2, 0.2, 0.2, 0.2])
    assert jury.allowed.tolist() == pytest.approx([0.03, 0.03])


def test_a_shortage_has_a_price_where_memory_is_short_and_none_where_it_is_not() -> None:
    workload = make_workload(rate=4.0, burstiness=1.0)
    scarce = rehearsed(make_bursty_plan(1, kv_tokens=9_000), workload).costs["chat"]
    ample = rehearsed(make_bursty_plan(1, kv_tokens=900_000), make_workload(rate=1.0, burstiness=1.0)).costs["chat"]
    assert scarce.under_usd_per_token + scarce.fixed_usd > 0
    assert min(scarce.under_usd_per_token, scarce.fixed_usd, scarce.idle_usd_per_token) >= 0
    assert ample.under_usd_per_token < scarce.under_usd_per_token + scarce.fixed_usd
