"""What an engine tells of its reservations, at its own /metrics.

vLLM's scheduler runs in another process than the server that answers /metrics. prometheus_client carries figures
between processes through files, where PROMETHEUS_MULTIPROC_DIR names a folder for them: vLLM sets it by itself for
several API servers; for a single one it has to be set when the engine is started, as the operator does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from prometheus_client import Counter, Gauge

SHOWN_EVERY_S = 0.5
LABELS = ("model_name", "engine")


@cache
def _gauge(name: str, what: str) -> Gauge:
    return Gauge(name, what, LABELS, multiprocess_mode="mostrecent")


@cache
def _counter(name: str, what: str, *more: str) -> Counter:
    return Counter(name, what, (*LABELS, *more))


@dataclass(slots=True)
class Tallies:
    """Counts since the start; the scheduler adds to them, `Metrics` shows them."""

    waits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("blocks", "reservation"), 0))
    """Steps in which the first in line had to wait: for blocks that are in use, or for blocks that are promised."""
    broken_hints: int = 0
    broken_defaults: int = 0


class Metrics:
    """Shows a ledger and tallies, now and then."""

    def __init__(self, model_name: str, engine: int) -> None:
        self._labels = (model_name, str(engine))
        self._shown: dict[Counter, int] = {}
        self._next_s = 0.0
        self._firm = _gauge("kvantile:reserved_blocks", "KV blocks that running requests were promised or must have.")
        self._soft = _gauge("kvantile:pooled_blocks", "KV blocks that pooled reservations keep free together.")
        self._waits = _counter(
            "kvantile:admission_waits", "Steps in which the first in line waited, by what for.", "reason"
        )
        self._overshoots = _counter(
            "kvantile:overshoots", "Answers that became longer than their reservation.", "class"
        )
        self._hints = _counter("kvantile:broken_hints", "Hint values that made no sense and were ignored.")
        self._defaults = _counter("kvantile:broken_defaults", "Versions of the defaults file that were ignored.")
        # Series that are there from the start, at 0.
        self._raise_counters(Tallies())

    def is_due(self, now_s: float) -> bool:
        """Whether the figures are older than half a second: a reader comes every few seconds."""
        return now_s >= self._next_s

    def show(self, firm: int, soft: int, overshoots: Mapping[str, int], tallies: Tallies, now_s: float) -> None:
        """Brings the figures up to date: blocks that are promised and pooled, answers that were longer by class."""
        self._next_s = now_s + SHOWN_EVERY_S
        self._firm.labels(*self._labels).set(firm)
        self._soft.labels(*self._labels).set(soft)
        for name, count in overshoots.items():
            self._raise(self._overshoots, count, name)
        self._raise_counters(tallies)

    def _raise_counters(self, tallies: Tallies) -> None:
        for reason, count in tallies.waits.items():
            self._raise(self._waits, count, reason)
        self._raise(self._hints, tallies.broken_hints)
        self._raise(self._defaults, tallies.broken_defaults)

    def _raise(self, counter: Counter, count: int, *label: str) -> None:
        """Makes `counter` say `count`; its label says of what."""
        series = counter.labels(*self._labels, *label)
        series.inc(count - self._shown.get(series, 0))
        self._shown[series] = count
