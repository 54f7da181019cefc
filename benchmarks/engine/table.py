"""The list of all rows, and the choice among them."""

from __future__ import annotations

from benchmarks.engine import emulator, mixes, overhead, pressure, streams
from benchmarks.optimizer.row import Row, named

ROWS: tuple[Row, ...] = (*emulator.ROWS, *streams.ROWS, *overhead.ROWS, *pressure.ROWS, *mixes.ROWS)
"""A module of a subject adds its rows here."""


def chosen(keys: str) -> list[Row]:
    """The rows that a list of keys with commas names, as `named` does."""
    return named(keys, ROWS)
