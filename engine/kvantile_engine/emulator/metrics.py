"""What Prometheus sees, under vLLM's names, and what is ours beside it.

Gauges and counters are read from the engine when somebody asks. Histograms are kept here rather than by
prometheus_client because a step gives all its sequences the same gap between tokens, which is one addition here and
would be one locked observation for each of them there. Times are engine seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvantile_engine.emulator.scheduler import Scheduler
from kvantile_engine.emulator.settings import Settings


def _bounds(numbers: str) -> tuple[float, ...]:
    return tuple(map(float, numbers.split()))


FIRST_TOKEN_BOUNDS = _bounds(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
BETWEEN_BOUNDS = _bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
WHOLE_BOUNDS = _bounds("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
LABELS = ("model_name", "engine")


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


FINISH_REASONS = ("stop", "length", "abort")


class EngineCollector(Collector):
    """Turns the engine's state into metrics at scrape time."""

    def __init__(self, settings: Settings, scheduler: Scheduler, tallies: Callable[[], Tallies]) -> None:
        self.settings, self.scheduler, self.tallies = settings, scheduler, tallies
        self._labels = [settings.public_name, "0"]

    def collect(self) -> Iterator[Metric]:
        """All metrics, gauges first."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield self._config()

    def _gauges(self) -> Iterator[Metric]:
        scheduler, pool = self.scheduler, self.scheduler.pool
        rows: list[tuple[str, str, float]] = [
            ("vllm:num_requests_running", "Sequences that run.", len(scheduler.running)),
            ("vllm:num_requests_waiting", "Sequences that wait.", len(scheduler.waiting)),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", pool.used / pool.total),
            ("kvantile:reserved_blocks", "Blocks set aside beyond those in use.", scheduler.committed_blocks),
            ("kvantile:engine_lag_seconds", "How late the latest step came, in engine seconds.", self.tallies().lag_s),
        ]
        for name, text, value in rows:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        scheduler, tallies = self.scheduler, self.tallies()
        rows: list[tuple[str, str, float]] = [
            ("vllm:num_preemptions", "Sequences put back to be computed again.", scheduler.preemptions),
            ("vllm:prompt_tokens", "Prompt tokens of sequences that got a first token.", tallies.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", tallies.generation_tokens),
            ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", scheduler.prefix_queries),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", scheduler.prefix_hits),
            ("kvantile:broken_hints", "Hint values that made no sense and were ignored.", tallies.broken_hints),
        ]
        for name, text, value in rows:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        success = CounterMetricFamily("vllm:request_success", "Ended sequences.", labels=(*LABELS, "finished_reason"))
        for reason in FINISH_REASONS:
            success.add_metric([*self._labels, reason], tallies.finished[reason])
        yield success

    def _histograms(self) -> Iterator[Metric]:
        tallies = self.tallies()
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "Arrival to first token.", tallies.first_token_s),
            ("vllm:inter_token_latency_seconds", "Between tokens of a sequence.", tallies.between_tokens_s),
            ("vllm:e2e_request_latency_seconds", "Arrival to last token.", tallies.whole_s),
        ):
            family = HistogramMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, histogram.cumulative(), histogram.total)
            yield family

    def _config(self) -> Metric:
        info = {"block_size": str(self.settings.block_size), "num_gpu_blocks": str(self.settings.total_blocks)}
        info["enable_prefix_caching"] = str(self.settings.enable_prefix_caching)
        gauge = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=("engine", *info))
        gauge.add_metric(["0", *info.values()], 1)
        return gauge
