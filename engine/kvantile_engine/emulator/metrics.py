"""What Prometheus sees, under vLLM's names, and what is ours beside it; read from the engine when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvantile_engine.emulator.engine import Engine

LABELS = ("model_name", "engine")


FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
WAITING_REASONS = ("capacity", "deferred")
SINCE = {
    "request_num_preemptions": (0, 30),
    "admission_rejections": (0, 32),
    "prompt_tokens_cached_by_source": (0, 32),
}
"""The first version that has a metric; those of 0.25 are in all. Read off each version's own loggers."""
CACHE_SOURCES = ("device", "host", "disk", "p2p", "external_unspecified")
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")


class EngineCollector(Collector):
    """Turns the engine's state into metrics at scrape time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._labels = [engine.settings.public_name, "0"]
        major, minor, _ = engine.settings.vllm_version.split(".")
        self._version = int(major), int(minor)

    def collect(self) -> Iterator[Metric]:
        """All metrics, gauges first."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield self._config()

    def _gauges(self) -> Iterator[Metric]:
        engine, scheduler, pool = self._engine, self._engine.scheduler, self._engine.scheduler.pool
        rows: list[tuple[str, str, float]] = [
            ("vllm:num_requests_running", "Sequences that run.", len(scheduler.running)),
            ("vllm:num_requests_waiting", "Sequences that wait.", engine.waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", pool.used / pool.total),
            ("kvantile:reserved_blocks", "Blocks set aside beyond those in use.", scheduler.committed_blocks),
            ("kvantile:engine_lag_seconds", "How late the latest step came, in engine seconds.", engine.tallies.lag_s),
        ]
        for name, text, value in rows:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        by_reason = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", "Why.", labels=(*LABELS, "reason"))
        for reason, waiting in zip(WAITING_REASONS, (engine.waiting, 0), strict=True):
            by_reason.add_metric([*self._labels, reason], waiting)
        yield by_reason

    def _has(self, name: str) -> bool:
        return self._version >= SINCE.get(name, (0, 0))

    def _by_source(self) -> Iterator[Metric]:
        """Prompt tokens by where they came from; nothing comes from other engines or tiers here."""
        tallies = self._engine.tallies
        cached = tallies.cached_tokens
        sources = {
            "local_compute": tallies.prompt_tokens - cached,
            "local_cache_hit": cached,
            "external_kv_transfer": 0,
        }
        family = CounterMetricFamily("vllm:prompt_tokens_by_source", "Prompt tokens.", labels=(*LABELS, "source"))
        for source, tokens in sources.items():
            family.add_metric([*self._labels, source], tokens)
        yield family
        if self._has("prompt_tokens_cached_by_source"):
            name = "vllm:prompt_tokens_cached_by_source"
            family = CounterMetricFamily(name, "Cached prompt tokens.", labels=(*LABELS, "source"))
            for source in CACHE_SOURCES:
                family.add_metric([*self._labels, source], cached if source == "device" else 0)
            yield family
        if self._has("admission_rejections"):
            name = "vllm:admission_rejections"
            family = CounterMetricFamily(name, "Refused by a full queue.", labels=("model_name", "reason"))
            for reason in REJECTION_REASONS:
                family.add_metric([self._labels[0], reason], 0)
            yield family

    def _counters(self) -> Iterator[Metric]:
        scheduler, tallies = self._engine.scheduler, self._engine.tallies
        rows: list[tuple[str, str, float]] = [
            ("vllm:num_preemptions", "Sequences put back to be computed again.", scheduler.preemptions),
            ("vllm:prompt_tokens", "Prompt tokens of sequences that got a first token.", tallies.prompt_tokens),
            ("vllm:prompt_tokens_cached", "Of these, found in the prefix cache.", tallies.cached_tokens),
            ("vllm:external_prefix_cache_queries", "Always 0 here.", 0),
            ("vllm:external_prefix_cache_hits", "Always 0 here.", 0),
            ("vllm:mm_cache_queries", "Always 0 here.", 0),
            ("vllm:mm_cache_hits", "Always 0 here.", 0),
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
        yield from self._by_source()

    def _histograms(self) -> Iterator[Metric]:
        tallies = self._engine.tallies
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "Arrival to first token.", tallies.first_token_s),
            ("vllm:inter_token_latency_seconds", "Between tokens of a sequence.", tallies.between_tokens_s),
            ("vllm:e2e_request_latency_seconds", "Arrival to last token.", tallies.whole_s),
            ("vllm:iteration_tokens_total", "Tokens of a step.", tallies.step_tokens),
            *(
                (f"vllm:{name}", "Of each sequence that ended.", histogram)
                for name, histogram in tallies.requests.by_name.items()
                if self._has(name)
            ),
        ):
            family = HistogramMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, histogram.cumulative(), histogram.total)
            yield family

    def _config(self) -> Metric:
        settings = self._engine.settings
        info = {
            "block_size": str(settings.block_size),
            "num_gpu_blocks": str(settings.total_blocks),
            "enable_prefix_caching": str(settings.enable_prefix_caching),
        }
        gauge = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=("engine", *info))
        gauge.add_metric(["0", *info.values()], 1)
        return gauge
