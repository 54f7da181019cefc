"""Numbers on the command line that must be finite: click's own range lets NaN and infinities through."""

from __future__ import annotations

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A `click.FloatRange` without NaN and infinities."""

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as click declares it
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        """The number. Fails with what is allowed."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"found {value}, allowed a finite number", param, ctx)
        return number
