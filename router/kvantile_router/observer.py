"""Counts what is learnt of each class, for `/observations` and the next plan.

An output length counts as finished when the answer ended by itself and as censored when `max_tokens` or the client cut
it off. Of several sequences in one request only their sum is known, which says nothing about one, so those are left
out. Every class seen has an entry; classes of a plan that went stay, since their counts still add up.
"""

from __future__ import annotations

from kvantile_optimizer.observation import ClassObservation, Observations, length_bucket
from kvantile_router.clock import Clock


class Observer:
    """The counts of one gateway since it started, in plan seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = clock()
        self._classes: dict[str, ClassObservation] = {}
        self._last_arrival_s: dict[str, float] = {}

    def arrived(self, class_name: str, now_s: float) -> None:
        """A request of the class has come."""
        seen = self._classes.setdefault(class_name, ClassObservation(finished={}, censored={}, prompts={}))
        seen.requests += 1
        last_s = self._last_arrival_s.get(class_name)
        if last_s is not None:
            gap_s = max(0.0, now_s - last_s)
            seen.arrival_seconds_sum += gap_s
            seen.arrival_seconds_squared_sum += gap_s * gap_s
        self._last_arrival_s[class_name] = now_s

    def answered(self, class_name: str, prompt_tokens: int, output_tokens: int, *, censored: bool) -> None:
        """An answer has ended."""
        seen = self._classes[class_name]
        _count(seen.censored if censored else seen.finished, output_tokens)
        _count(seen.prompts, prompt_tokens)

    def observations(self) -> Observations:
        """Everything so far; a copy."""
        classes = {name: seen.model_copy(deep=True) for name, seen in self._classes.items()}
        return Observations(since_seconds=self._clock() - self._since_s, classes=classes)


def _count(histogram: dict[int, int], tokens: int) -> None:
    bucket = length_bucket(tokens)
    histogram[bucket] = histogram.get(bucket, 0) + 1
