"""What is learnt of each class."""

from __future__ import annotations

from kvantile_optimizer.observation import Observations
from kvantile_router.clock import Clock
from kvantile_router.observer import Observer


def test_arrivals_and_lengths_are_counted_and_cut_answers_kept_apart() -> None:
    observer = Observer(Clock())
    for at_s in (1.0, 3.0, 4.0):
        observer.arrived("chat", at_s)
    observer.answered("chat", 10, 5, censored=False)
    observer.answered("chat", 10, 5, censored=True)
    seen = Observations.model_validate(observer.observations().to_json()).classes["chat"]
    assert (seen.requests, seen.arrival_seconds_sum, seen.arrival_seconds_squared_sum) == (3, 3.0, 5.0)
    assert (seen.finished, seen.censored, seen.prompts) == ({5: 1}, {5: 1}, {10: 2})


def test_a_reading_does_not_change_with_what_comes_later() -> None:
    observer = Observer(Clock())
    observer.arrived("chat", 0.0)
    before = observer.observations()
    observer.arrived("chat", 1.0)
    assert observer.observations().minus(before).classes["chat"].requests == 1
