"""The arrivals of the demo: a real trace's rows at the planned rate, with bursts.

Each class keeps the lengths and the order of its rows, and the gaps between them but for two changes. The clock is
stretched so that the rows come at the rate the plan was made for, and then bent by a square wave of mean 1: the rate
is `factor` times the planned one for `burst_s` out of every `period_s`, and lower in between. Bending the clock keeps
the number of arrivals, and it is a function of the trace and the seed alone, so every policy gets the same requests
at the same moments. The seed chooses which rows are replayed and where in a period the replay begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvantile_optimizer.local.records import Request
from kvantile_optimizer.traces import Trace

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Wave:
    """A square wave of mean 1. Raises ValueError if the time between bursts would need a rate below zero."""

    period_s: float = 60.0
    burst_s: float = 15.0
    factor: float = 3.8

    def __post_init__(self) -> None:
        if not 0 < self.burst_s < self.period_s or not 0 < self.burst_s * self.factor <= self.period_s:
            raise ValueError(f"bursts shorter than their period, and within its mean (found {self})")

    @property
    def rest_factor(self) -> float:
        """The rate between bursts over the mean rate."""
        return (self.period_s - self.burst_s * self.factor) / (self.period_s - self.burst_s)

    def bend(self, even_s: FloatArray, phase_s: float = 0.0) -> FloatArray:
        """The moments at which a process at the planned rate's moments `even_s` (N,) happens under the wave.

        The inverse of the wave's integral, which is joined from straight pieces; a burst begins at time 0 when
        `phase_s` is 0.
        """
        periods = np.arange(np.floor(phase_s / self.period_s), np.max(even_s, initial=0.0) / self.period_s + 4)
        corners_s = np.ravel(np.column_stack([periods * self.period_s, periods * self.period_s + self.burst_s]))
        reached_s = np.ravel(
            np.column_stack([periods * self.period_s, periods * self.period_s + self.burst_s * self.factor])
        )
        start = np.interp(phase_s, corners_s, reached_s)
        return np.interp(even_s + start, reached_s, corners_s) - phase_s


def split(trace: Trace, share: float) -> tuple[Trace, Trace]:
    """The first `share` of each class's rows, and the rest."""
    first = np.zeros(len(trace), dtype=np.bool_)
    for label in np.unique(trace.labels):
        rows = np.flatnonzero(trace.labels == label)
        first[rows[: round(share * len(rows))]] = True
    return trace.only(first), trace.only(~first)


def arrivals(trace: Trace, rates: Mapping[str, float], seconds: float, wave: Wave, seed: int) -> list[Request]:
    """The requests of `seconds` engine seconds, in order of arrival.

    `rates` gives each class its requests per second; the class's rows are those that carry its name as label. A class
    with fewer rows than `seconds` asks for is replayed from its beginning again.
    """
    rng = np.random.default_rng(seed)
    phase_s = float(rng.uniform(0, wave.period_s))
    rows: list[tuple[float, str, int, int]] = []
    for name, rate in sorted(rates.items()):
        chosen = _rows(np.flatnonzero(trace.labels == name), round(rate * seconds), rng)
        moments_s = wave.bend(_stretched(trace.arrival_s[chosen], seconds), phase_s)
        rows += zip(
            moments_s.tolist(),
            [name] * len(chosen),
            trace.prompt[chosen].tolist(),
            trace.output[chosen].tolist(),
            strict=True,
        )
    return [
        Request(index, name, at_s, int(prompt), int(output))
        for index, (at_s, name, prompt, output) in enumerate(sorted(rows))
    ]


def _rows(of_class: NDArray[np.intp], wanted: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """`wanted` consecutive rows, from one that `rng` chooses."""
    if not len(of_class) or wanted <= 0:
        return of_class[:0]
    start = int(rng.integers(max(0, len(of_class) - wanted) + 1))
    return of_class[(start + np.arange(wanted)) % len(of_class)]


def _stretched(recorded_s: FloatArray, seconds: float) -> FloatArray:
    """The recorded gaps, scaled so that they fill `seconds`; even gaps where nothing was recorded."""
    gaps_s = np.diff(recorded_s, append=np.nan)
    usable = np.isfinite(gaps_s) & (gaps_s >= 0)
    typical_s = float(np.mean(gaps_s[usable])) if usable.any() else 0.0
    gaps_s = np.where(usable, gaps_s, typical_s)
    total_s = float(gaps_s.sum())
    if total_s <= 0:
        gaps_s, total_s = np.ones_like(gaps_s), float(len(gaps_s))
    starts = np.concatenate([[0.0], np.cumsum(gaps_s)[:-1]]) if len(gaps_s) else gaps_s
    return np.asarray(starts * (seconds / total_s) if len(gaps_s) else starts, dtype=np.float64)
