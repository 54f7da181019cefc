"""The list of all rows, and the choice among them."""

from __future__ import annotations

from benchmarks.engine import emulator, overhead, streams
from benchmarks.optimizer.row import Row

ROWS: tuple[Row, ...] = (*emulator.ROWS, *streams.ROWS, *overhead.ROWS)
"""A module of a subject adds its rows here."""


def chosen(keys: str) -> list[Row]:
    """The rows that a list of keys with commas names, all when it is empty. Raises KeyError with what there is."""
    wanted = [key.strip() for key in keys.split(",") if key.strip()]
    by_key = {row.key: row for row in ROWS}
    if unknown := [key for key in wanted if key not in by_key]:
        raise KeyError(f"found {unknown[0]}, allowed {', '.join(by_key)}")
    return [by_key[key] for key in wanted] or list(ROWS)
