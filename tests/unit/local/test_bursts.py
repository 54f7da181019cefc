"""The demo's arrivals keep the trace's rows, the planned rate, and the same bursts for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvantile_optimizer.local import bursts
from kvantile_optimizer.local.bursts import Wave
from kvantile_optimizer.traces import Trace


def make_trace(rows: int = 200, labels: tuple[str, ...] = ("a", "b")) -> Trace:
    index = np.arange(rows)
    return Trace(
        arrival_s=(index * 7.0).astype(np.float64),
        prompt=index + 1,
        output=2 * index + 1,
        censored=np.zeros(rows, dtype=np.bool_),
        labels=np.asarray([labels[row % len(labels)] for row in index]),
        sessions=np.full(rows, ""),
        prefix_tokens=np.zeros(rows, dtype=np.int64),
    )


def test_a_wave_has_mean_one() -> None:
    wave = Wave(period_s=40, burst_s=8, factor=2.0)
    even_s = np.arange(0, 400, 0.01)
    assert wave.bend(even_s)[-1] == pytest.approx(even_s[-1], abs=0.02)
    assert wave.rest_factor == pytest.approx(0.75)


def test_a_burst_has_twice_the_rate() -> None:
    bent_s = Wave(period_s=40, burst_s=8, factor=2.0).bend(np.arange(0, 400, 0.01))
    in_burst = np.count_nonzero(bent_s % 40 < 8) / len(bent_s)
    assert in_burst == pytest.approx(2.0 * 8 / 40, abs=0.01)


def test_a_burst_may_take_all_of_its_period() -> None:
    wave = Wave(period_s=60, burst_s=15, factor=4.0)
    bent_s = wave.bend(np.arange(0.5, 120))
    assert np.all(bent_s % 60 < 15)
    assert np.all(np.diff(bent_s) > 0)


def test_a_burst_that_exceeds_its_period_is_refused() -> None:
    with pytest.raises(ValueError, match="within its mean"):
        Wave(period_s=40, burst_s=8, factor=6.0)


@given(phase_s=st.floats(0, 39.9), seconds=st.floats(1, 300))
def test_bending_keeps_the_order_and_begins_at_zero(phase_s: float, seconds: float) -> None:
    bent_s = Wave(period_s=40, burst_s=8, factor=2.0).bend(np.linspace(0, seconds, 50), phase_s)
    assert bent_s[0] == pytest.approx(0.0, abs=1e-9)
    assert np.all(np.diff(bent_s) > 0)


def test_arrivals_come_at_the_planned_rates() -> None:
    requests = bursts.arrivals(make_trace(), {"a": 0.5, "b": 0.25}, 100.0, Wave(), seed=3)
    assert sum(request.class_name == "a" for request in requests) == 50
    assert sum(request.class_name == "b" for request in requests) == 25
    assert max(request.arrival_s for request in requests) <= 110.0


def test_arrivals_keep_lengths_and_order_of_the_rows() -> None:
    requests = [
        request
        for request in bursts.arrivals(make_trace(), {"a": 0.5, "b": 0.25}, 100.0, Wave(), seed=3)
        if request.class_name == "a"
    ]
    prompts = [request.prompt_tokens for request in requests]
    assert prompts == list(range(prompts[0], prompts[0] + 2 * len(prompts), 2))
    assert all(request.output_tokens == 2 * request.prompt_tokens - 1 for request in requests)


def test_the_same_seed_gives_the_same_arrivals_and_another_seed_others() -> None:
    first, again, other = (bursts.arrivals(make_trace(), {"a": 0.5}, 60.0, Wave(), seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_class_with_too_few_rows_begins_again() -> None:
    assert len(bursts.arrivals(make_trace(20), {"a": 1.0}, 60.0, Wave(), seed=0)) == 60


def test_rows_without_recorded_times_come_evenly() -> None:
    trace = make_trace(20, ("a",))
    trace.arrival_s[:] = np.nan
    requests = bursts.arrivals(trace, {"a": 0.2}, 100.0, Wave(factor=1.0), seed=0)
    assert np.diff([request.arrival_s for request in requests]) == pytest.approx(5.0)


def test_a_split_shares_out_every_class() -> None:
    first, rest = bursts.split(make_trace(), 0.6)
    assert [int(np.count_nonzero(first.labels == name)) for name in ("a", "b")] == [60, 60]
    assert [int(np.count_nonzero(rest.labels == name)) for name in ("a", "b")] == [40, 40]
    assert first.arrival_s.max() < rest.arrival_s.min()
