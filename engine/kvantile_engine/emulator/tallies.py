"""What the engine counts as it goes, apart from what the scheduler counts itself. Times are engine seconds.

Histograms are kept here rather than by prometheus_client because a step gives all its sequences the same gap between
tokens, which is one addition here and would be one locked observation for each of them there. Their bounds are those
of vLLM where one engine can come to them, so that dashboards fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field


def _bounds(numbers: str) -> tuple[float, ...]:
    return tuple(map(float, numbers.split()))


FIRST_TOKEN_BOUNDS = _bounds(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
BETWEEN_BOUNDS = _bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
WHOLE_BOUNDS = _bounds("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")


@dataclass(slots=True)
class Histogram:
    """Counts by upper bound (included), as Prometheus has them."""

    bounds: tuple[float, ...]
    total: float = 0.0
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Pairs of bound and count, up to `+Inf`."""
        below, pairs = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            pairs.append((bound, float(below)))
        return pairs


@dataclass(slots=True)
class Tallies:
    """What the engine counts as it goes."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    broken_hints: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    between_tokens_s: Histogram = field(default_factory=lambda: Histogram(BETWEEN_BOUNDS))
    whole_s: Histogram = field(default_factory=lambda: Histogram(WHOLE_BOUNDS))
    lag_s: float = 0.0
    """How late the latest step was delivered; grows when the machine cannot keep up with the speed."""
