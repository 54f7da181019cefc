"""The list of all rows, and the choice among them."""

from __future__ import annotations

from benchmarks.optimizer import ambiguity, descent, fleet, heldout, hindsight, predictions, reservation, simulator
from benchmarks.optimizer.row import Row, named

ROWS: tuple[Row, ...] = (
    *ambiguity.ROWS,
    *reservation.ROWS,
    *simulator.ROWS,
    *descent.ROWS,
    *heldout.ROWS,
    *hindsight.ROWS,
    *fleet.ROWS,
    *predictions.ROWS,
)
"""A module of a subject adds its rows here."""


def chosen(keys: str) -> list[Row]:
    """The rows that a list of keys with commas names, as `named` does."""
    return named(keys, ROWS)
