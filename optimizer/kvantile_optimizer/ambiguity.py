"""The worst expected cost of a reservation when the output lengths are only nearly known.

Nearly known means: any distribution on [0, L] within a Wasserstein ball of a given radius around the observed one.
The worst case over that ball is, by duality (Blanchet and Murthy 2019, theorem 1), the least over a multiplier
lambda >= 0 of lambda * radius^order plus the mean of what each observed length could gain by moving, at a price of
lambda * distance^order. Both inner problems have a handful of candidates: at order 1 to stay or to go to an end of
[0, L], at order 2 to go the distance at which the price's slope meets the loss's. What is left is convex in one
variable and is searched for all reservations at once. Cutting the solution on the whole line back to [0, L] instead
would be wrong: the optimum saturates at kappa * L.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvantile_optimizer.workload import Array, Lengths

Order: TypeAlias = Literal[1, 2]

_PRECISION = 1e-12
"""Relative distance from the optimum at which the dual is left."""
_TURNS = 120
"""Sixty halvings reach the last bit of a float; some ten turns are usual."""
_NEXT_TO_ZERO = 2.0**-60
_NO_RADIUS = 1e-9
"""Tokens below which a radius changes no cost that anyone could see, but would overflow the multiplier's bound."""
_CELLS = 2_000_000
"""Reservations times lengths worked on at once: 16 MB an array."""


@dataclass(frozen=True, slots=True)
class Losses:
    """What a token costs: `over` when reserved and not used, `under` when used and not reserved; in one unit."""

    over: float
    under: float

    @property
    def fractile(self) -> float:
        """kappa = under / (under + over): the quantile that is best when the distribution is known."""
        return self.under / (self.under + self.over)

    def at(self, reserve: Array, output: Array) -> Array:
        """The loss of reserving `reserve` when `output` is used; shapes broadcast."""
        return self.over * np.maximum(reserve - output, 0.0) + self.under * np.maximum(output - reserve, 0.0)


def expected_loss(lengths: Lengths, losses: Losses, reserve: npt.ArrayLike) -> Array:
    """The mean loss of each `reserve` (R,) under the observed distribution itself: the worst case at radius 0."""
    tokens = np.asarray(reserve, float)
    excess = lengths.excess(tokens)
    return losses.over * (tokens - lengths.mean + excess) + losses.under * excess


def worst_case_loss(lengths: Lengths, losses: Losses, order: Order, radius: float, reserve: npt.ArrayLike) -> Array:
    """The worst mean loss of each `reserve` (R,) over the ball of `radius` tokens; exact on [0, lengths.upper]."""
    tokens = np.atleast_1d(np.asarray(reserve, float))
    if radius < _NO_RADIUS:
        return expected_loss(lengths, losses, tokens)
    rows = max(1, _CELLS // len(lengths.values))
    dual = _dual_of_order_1 if order == 1 else _dual_of_order_2
    parts = [dual(lengths, losses, radius, tokens[start : start + rows]) for start in range(0, len(tokens), rows)]
    return np.concatenate(parts) if parts else tokens


def _dual_of_order_1(lengths: Lengths, losses: Losses, radius: float, reserve: Array) -> Array:
    """The bound's slope in lambda is radius less the mean distance moved, which is what `_least` needs."""
    output, weight, upper = lengths.values, lengths.weights, lengths.upper
    stay = losses.at(reserve[:, None], output)
    at_zero, at_upper = losses.at(reserve, np.zeros(1))[:, None], losses.at(reserve, np.full(1, upper))[:, None]

    def bound(price: Array) -> tuple[Array, Array]:
        down, up = at_zero - price[:, None] * output, at_upper - price[:, None] * (upper - output)
        best = np.maximum(stay, np.maximum(down, up))
        moved = np.where(best == stay, 0.0, np.where(down >= up, output, upper - output))
        return price * radius + best @ weight, radius - moved @ weight

    return _least(bound, np.full(len(reserve), max(losses.over, losses.under)))


def _dual_of_order_2(lengths: Lengths, losses: Losses, radius: float, reserve: Array) -> Array:
    """As at order 1. No length moves further than max(over, under) / (2 lambda), which bounds lambda above."""
    output, weight, upper = lengths.values, lengths.weights, lengths.upper
    edge = np.minimum(reserve, upper)[:, None]

    def bound(price: Array) -> tuple[Array, Array]:
        cost = price[:, None]
        down = np.clip(output - losses.over / (2 * cost), 0.0, edge)
        up = np.clip(output + losses.under / (2 * cost), edge, upper)
        gain_down = losses.at(reserve[:, None], down) - cost * (down - output) ** 2
        gain_up = losses.at(reserve[:, None], up) - cost * (up - output) ** 2
        moved = np.where(gain_down >= gain_up, down, up) - output
        return price * radius**2 + np.maximum(gain_down, gain_up) @ weight, radius**2 - moved**2 @ weight

    return _least(bound, np.full(len(reserve), max(losses.over, losses.under) / (2 * radius)))


def _least(bound: Callable[[Array], tuple[Array, Array]], above: Array) -> Array:
    """The least value (R,) of convex functions on (0, above], each given with its slope.

    The tangents at both ends of the bracket cross below the function: how far below says when to stop, and where they
    cross is a good place to look next. Every other turn halves the bracket instead, which bounds the number of turns.
    """
    low, high = above * _NEXT_TO_ZERO, above
    (low_value, low_slope), (high_value, high_slope) = bound(low), bound(high)
    for turn in range(_TURNS):
        width, turning = high - low, low_slope < np.minimum(high_slope, 0.0)
        rise = high_value - low_value - high_slope * width
        step = np.divide(rise, low_slope - high_slope, out=np.zeros_like(rise), where=turning)
        least = np.minimum(low_value, high_value)
        if np.all(least - (low_value + low_slope * step) <= _PRECISION * least):
            break
        here = low + np.clip(step, 0.0, width) if turn % 2 else (low + high) / 2
        value, slope = bound(here)
        right = slope >= 0
        low, low_value, low_slope = _choose(right, (low, low_value, low_slope), (here, value, slope))
        high, high_value, high_slope = _choose(right, (here, value, slope), (high, high_value, high_slope))
    return np.asarray(np.minimum(low_value, high_value))


def _choose(which: npt.NDArray[np.bool_], yes: tuple[Array, ...], no: tuple[Array, ...]) -> list[Array]:
    return [np.where(which, one, other) for one, other in zip(yes, no, strict=True)]
