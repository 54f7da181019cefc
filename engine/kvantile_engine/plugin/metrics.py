"""What an engine tells of its reservations, at its own /metrics.

vLLM's scheduler runs in another process than the server that answers /metrics. prometheus_client carries figures
between processes through files, where PROMETHEUS_MULTIPROC_DIR names a folder for them: vLLM sets it by itself for
several API servers; for a single one it has to be set when the engine is started, as the operator does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

if TYPE_CHECKING:
    from kvantile_engine.plugin.ledger import Ledger

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
    overshoots: dict[str, int] = field(default_factory=dict)


class Metrics:
    """Shows a ledger and tallies, now and then."""

    def __init__(self, model_name: str, engine: int) -> None:
        self._labels = (model_name, str(engine))
        self._shown = Tallies()
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
        for reason in self._shown.waits:
            self._waits.labels(*self._labels, reason)
        for counter in (self._hints, self._defaults):
            counter.labels(*self._labels)

    def is_due(self, now_s: float) -> bool:
        """Whether the figures are older than half a second: a reader comes every few seconds."""
        return now_s >= self._next_s

    def show(self, ledger: Ledger, tallies: Tallies, now_s: float) -> None:
        """Brings the figures up to date."""
        self._next_s = now_s + SHOWN_EVERY_S
        self._firm.labels(*self._labels).set(ledger.firm)
        self._soft.labels(*self._labels).set(ledger.soft_blocks)
        shown = self._shown
        for reason, count in tallies.waits.items():
            self._waits.labels(*self._labels, reason).inc(count - shown.waits[reason])
            shown.waits[reason] = count
        for name, count in ledger.overshoots.items():
            self._overshoots.labels(*self._labels, name).inc(count - shown.overshoots.get(name, 0))
            shown.overshoots[name] = count
        self._hints.labels(*self._labels).inc(tallies.broken_hints - shown.broken_hints)
        self._defaults.labels(*self._labels).inc(tallies.broken_defaults - shown.broken_defaults)
        shown.broken_hints, shown.broken_defaults = tallies.broken_hints, tallies.broken_defaults
