"""The figures of a replay, by hand."""

from __future__ import annotations

import pytest

from kvantile_optimizer.local import metrics, policies
from kvantile_optimizer.local.metrics import Run
from kvantile_optimizer.local.records import Record, Request
from tests.support.small_plan import make_plan


def make_record(
    *, sent: float = 0.0, ttft: float | None = 1.0, tpot: float = 0.1, tokens: int = 11, error: str = ""
) -> Record:
    first = None if ttft is None else sent + ttft
    last = None if first is None else first + tpot * (tokens - 1)
    return Record(Request(0, "chat", sent, 100, tokens), sent, first, last, tokens, error)


def row(*records: Record, preemptions: int = 0) -> metrics.Row:
    return metrics.row(Run("kvantile", make_plan(ttft_seconds=2.0), records, preemptions))


def test_times_per_token_divide_by_one_less_than_the_tokens() -> None:
    record = make_record(tpot=0.1, tokens=11)
    assert record.tpot_s == pytest.approx(0.1)
    assert record.e2e_s == pytest.approx(2.0)
    assert make_record(tokens=1).tpot_s is None


def test_goodput_divides_by_first_arrival_to_last_finish() -> None:
    found = row(make_record(sent=10.0), make_record(sent=18.0))
    assert found["goodputRequestsPerSecond"] == pytest.approx(2 / (20.0 - 10.0))
    assert found["sloViolationFraction"] == 0


def test_an_answer_must_meet_both_targets() -> None:
    found = row(make_record(ttft=2.5), make_record(tpot=0.3), make_record(), make_record())
    assert found["sloViolationFraction"] == pytest.approx(0.5)


def test_refused_requests_are_missed_and_make_nothing_look_fast() -> None:
    found = row(make_record(), make_record(ttft=None, error="429"), preemptions=3)
    assert found["requestsFailed"] == 1
    assert found["sloViolationFraction"] == pytest.approx(0.5)
    assert found["ttftP99Seconds"] == pytest.approx(1.0)
    assert found["preemptionsPerRequest"] == pytest.approx(1.5)


def test_no_answer_at_all_has_no_latency() -> None:
    assert row(make_record(ttft=None, error="503"))["ttftP99Seconds"] is None


def test_the_verdict_names_the_winner_and_does_not_flatter() -> None:
    ours, other = row(make_record(sent=0)), row(make_record(sent=0), make_record(sent=0))
    assert metrics.verdict([other, {**ours, "policy": "stock"}], policies.TITLES).startswith("Kvantile's plan won")
    lost = metrics.verdict([ours, {**other, "policy": "stock"}], policies.TITLES)
    assert lost.startswith("Kvantile's plan did not win, stock vLLM did")
    assert "goodput -50 %" in lost
