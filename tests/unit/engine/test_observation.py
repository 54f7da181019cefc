"""What the emulator shows of itself: histograms and the history of memory."""

from __future__ import annotations

import pytest

from kvantile_engine.emulator.history import MOST_SAMPLES, History
from kvantile_engine.emulator.steptime import StepTime
from kvantile_engine.emulator.tallies import Histogram


def test_a_bound_counts_what_is_at_most_as_large() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, times in ((0.5, 2), (1.0, 1), (1.5, 3), (9.0, 1)):
        histogram.observe(value, times)
    assert histogram.cumulative() == [("1.0", 3.0), ("2.0", 6.0), ("+Inf", 7.0)]
    assert histogram.total == 15.5


def test_a_history_stays_bounded_and_spans_the_whole_run() -> None:
    history = History()
    now = 0.0
    for _ in range(20_000):
        now += 0.02
        if now >= history.due_s:
            history.add(now, 0, 0, 0, 0, 0)
    times = [sample[0] for sample in history.samples]
    assert len(times) <= MOST_SAMPLES
    assert len(times) >= MOST_SAMPLES // 2 - 1
    assert times == sorted(times)
    assert times[0] == 0.02
    assert times[-1] > 399.0


def test_step_time_is_affine() -> None:
    times = StepTime(alpha=1.0, beta=0.1, gamma=0.01, delta=0.001)
    assert times.seconds(0, 0, 0) == 1.0
    assert times.seconds(3, 20, 400) == pytest.approx(1.0 + 0.3 + 0.2 + 0.4)
    assert times.prefill_seconds(400) == pytest.approx(times.seconds(0, 0, 400))


def test_a_history_counts_from_its_origin() -> None:
    history = History(origin_s=10.0)
    history.add(12.5, 1, 2, 3, 4, 5)
    assert history.samples == [(2.5, 1, 2, 3, 4, 5)]
