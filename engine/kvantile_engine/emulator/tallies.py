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


STEP_BOUNDS = _bounds("1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384")
COPIES_BOUNDS = _bounds("1 2 5 10 20")
PREEMPTIONS_BOUNDS = _bounds("1 2 3 4 5 10 20")


def length_bounds(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 and so on up to `longest` tokens."""
    return tuple(float(m * 10**e) for e in range(10) for m in (1, 2, 5) if m * 10**e <= longest)


@dataclass(slots=True)
class RequestTallies:
    """What is counted of each sequence that ends by itself; lengths up to `longest` tokens, times in engine seconds."""

    longest: int
    by_name: dict[str, Histogram] = field(init=False)

    def __post_init__(self) -> None:
        lengths, times = length_bounds(self.longest), WHOLE_BOUNDS
        self.by_name = {
            "request_prompt_tokens": Histogram(lengths),
            "request_generation_tokens": Histogram(lengths),
            "request_max_num_generation_tokens": Histogram(lengths),
            "request_params_max_tokens": Histogram(lengths),
            "request_prefill_kv_computed_tokens": Histogram(lengths),
            "request_params_n": Histogram(COPIES_BOUNDS),
            "request_num_preemptions": Histogram(PREEMPTIONS_BOUNDS),
            "request_time_per_output_token_seconds": Histogram(BETWEEN_BOUNDS),
            "request_queue_time_seconds": Histogram(times),
            "request_inference_time_seconds": Histogram(times),
            "request_prefill_time_seconds": Histogram(times),
            "request_decode_time_seconds": Histogram(times),
        }

    def observe(self, **values: float) -> None:
        """Counts the values of one sequence, by the names of the histograms."""
        for name, value in values.items():
            self.by_name[name].observe(value)


@dataclass(slots=True)
class Tallies:
    """What the engine counts as it goes."""

    longest: int = 16_384
    """Tokens of the longest sequence: where the bounds of lengths end."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens, those found in the prefix cache."""
    generation_tokens: int = 0
    broken_hints: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    between_tokens_s: Histogram = field(default_factory=lambda: Histogram(BETWEEN_BOUNDS))
    whole_s: Histogram = field(default_factory=lambda: Histogram(WHOLE_BOUNDS))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS))
    requests: RequestTallies = field(init=False)
    lag_s: float = 0.0
    """How late the latest step was delivered; grows when the machine cannot keep up with the speed."""

    def __post_init__(self) -> None:
        self.requests = RequestTallies(self.longest)
