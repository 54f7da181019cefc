"""A row of the table: what is measured, what it is to reach, and the function that measures it once.

A row's function gets a `Setting` and a seed and returns a `Run`: figures by name, and notes on every miss. What counts
over the runs is the median, or the worst where a target is for every single case. Rows know nothing of each other, so
any of them can be run alone. A row is bounded in time: what its runs could not look at in their part of it is counted
as left out, and a row that left something out has not met its targets, whatever the rest says.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Target:
    """What one figure of a row is to reach."""

    figure: str
    bound: float
    sense: Literal["at most", "at least"]
    show: str = "{:.3g}"
    """Format of the figure and its bound."""
    over_runs: Literal["median", "worst"] = "median"
    what: str = ""
    """The figure in words; its name unless set."""

    def value(self, figures: Sequence[float]) -> float:
        """What counts of the figures of all runs."""
        if self.over_runs == "median":
            return statistics.median(figures)
        return max(figures) if self.sense == "at most" else min(figures)

    def is_met(self, value: float) -> bool:
        """Whether `value` reaches the bound; what is not a number does not."""
        return value <= self.bound if self.sense == "at most" else value >= self.bound


@dataclass(slots=True)
class Watch:
    """The time that a run has left."""

    limit_s: float
    clock: Callable[[], float] = time.monotonic
    left_out: int = 0
    """Items of `within` that came too late."""
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    @property
    def left_s(self) -> float:
        """Seconds left; negative when it is over."""
        return self.started_s + self.limit_s - self.clock()

    def within(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items for as long as there is time, at least one; those that came too late are counted."""
        for place, item in enumerate(items):
            if place and self.left_s <= 0:
                self.left_out += 1
            else:
                yield item


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run is given."""

    traces: Path | None
    """The folder of the public traces; None where the row needs none."""
    build: Path
    """Where work may be kept that the next run can use, for this state of the code alone."""
    quick: bool
    """Whether to look at as little as shows that the row works."""
    watch: Watch

    def trace(self, name: str) -> Path:
        """A file in the folder of traces, which rows with `needs_traces` have."""
        assert self.traces is not None
        return self.traces / name


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a row found."""

    figures: dict[str, float]
    notes: dict[str, str] = field(default_factory=dict)
    """By case: every miss, and what else the reader of the table should know."""
    seconds: float = 0.0
    left_out: int = 0
    """Cases that there was no time for."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table."""

    key: str
    """What `--rows` calls it."""
    what: str
    targets: tuple[Target, ...]
    run: Callable[[Setting, int], Run]
    limit_s: float
    """For all runs together, one after the other."""
    needs_traces: bool = False
    alone: bool = False
    """Whether it measures time, so that nothing else of ours may run beside it."""
    runs: int = 5


def named(keys: str, rows: Sequence[Row]) -> list[Row]:
    """The rows that a list of keys with commas names, all when it is empty. Raises KeyError with what there is."""
    wanted = [key.strip() for key in keys.split(",") if key.strip()]
    by_key = {row.key: row for row in rows}
    if unknown := [key for key in wanted if key not in by_key]:
        raise KeyError(f"found {unknown[0]}, allowed {', '.join(by_key)}")
    return [by_key[key] for key in wanted] or list(rows)
