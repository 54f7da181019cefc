"""The worst expected cost of a reservation when the output lengths are only nearly known.

Nearly known means: any distribution within a Wasserstein ball of a given radius around the observed one, on [0, L], or
on the whole line when L is infinite. The worst case is, by duality (Blanchet and Murthy 2019, theorem 1), the least
over a multiplier lambda of lambda * radius^order plus the mean of what each observed length gains by moving at a price
of lambda * distance^order. That price makes far ends attract far lengths, so there is one length below which all move
down (or stay) and above which all move up: the mean is a handful of prefix sums and costs O(log N) a reservation,
whatever N is. The charge for any shortage at all jumps at the reservation; it only adds a place to stop there.
Cutting the solution on the whole line back to [0, L] instead would be wrong: the optimum saturates at kappa * L.
"""

from __future__ import annotations

import math
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
"""Half of them halve the bracket, which reaches the last bit of a float; some ten turns are usual."""
_NEXT_TO_ZERO = 2.0**-60
_STRIDE = 8.0
"""By which the bracket is widened towards zero: the best multiplier is mostly within this factor of its bound."""
_NO_RADIUS = 1e-6
"""Tokens below which moving changes no cost that anyone could see, but would drown the sums in rounding."""
_ROWS = 16_384
"""Reservations worked on at once, so that their temporary arrays stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Losses:
    """What a reservation costs, in one unit: `over` a token that is reserved and not used, `under` one that is used and
    not reserved, and `fixed` for any shortage at all."""

    over: float
    under: float
    fixed: float = 0.0

    @property
    def fractile(self) -> float:
        """kappa = under / (under + over): the best quantile of a known distribution when nothing is fixed."""
        return self.under / (self.under + self.over)

    @property
    def linear(self) -> Losses:
        """The same without the fixed charge."""
        return Losses(self.over, self.under)

    def at(self, reserve: Array, output: Array) -> Array:
        """The loss of reserving `reserve` when `output` is used; shapes broadcast."""
        short = output - reserve
        loss = self.over * np.maximum(-short, 0.0) + self.under * np.maximum(short, 0.0)
        return loss + self.fixed * (short > 0) if self.fixed else loss


def expected_loss(lengths: Lengths, losses: Losses, reserve: npt.ArrayLike) -> Array:
    """The mean loss of each `reserve` (R,) under the observed distribution itself: the worst case at radius 0."""
    tokens = np.asarray(reserve, float)
    excess = lengths.excess(tokens)
    loss = losses.over * (tokens - lengths.mean + excess) + losses.under * excess
    return loss + losses.fixed * (1.0 - lengths.cdf(tokens)) if losses.fixed else loss


def worst_case_loss(lengths: Lengths, losses: Losses, order: Order, radius: float, reserve: npt.ArrayLike) -> Array:
    """The worst mean loss of each `reserve` (R,) over the ball of `radius` tokens; exact on [0, lengths.upper].

    With `lengths.upper` infinite, exact on the whole line. As soon as lengths may move at all, one that equals the
    reservation below L counts as a shortage: the supremum is that of the loss's closure.
    """
    tokens = np.atleast_1d(np.asarray(reserve, float))
    if radius == 0 or not len(tokens):
        return expected_loss(lengths, losses, tokens)
    if radius < _NO_RADIUS:
        touching = lengths.cdf(tokens) - lengths.cdf(np.nextafter(tokens, -np.inf))
        return expected_loss(lengths, losses, tokens) + np.where(tokens < lengths.upper, losses.fixed * touching, 0.0)
    sums = _Sums.of(lengths)
    parts = [
        _worst(lengths, sums, losses, order, radius, tokens[start : start + _ROWS])
        for start in range(0, len(tokens), _ROWS)
    ]
    # The observed distribution is in the ball: where costs differ by many orders, rounding may not fall below it.
    return np.maximum(np.concatenate(parts), expected_loss(lengths, losses, tokens))


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """Prefix sums of the weights and of their products with the lengths and the squared lengths, each (N + 1,).

    In extended precision where the machine has it: squared distances to a reservation come from their differences.
    """

    mass: npt.NDArray[np.longdouble]
    first: npt.NDArray[np.longdouble]
    second: npt.NDArray[np.longdouble]

    @classmethod
    def of(cls, lengths: Lengths) -> _Sums:
        values, weights = lengths.values.astype(np.longdouble), lengths.weights.astype(np.longdouble)
        return cls(*(np.concatenate(([0], np.cumsum(weights * values**power))) for power in range(3)))

    def over(self, start: npt.NDArray[np.intp], end: npt.NDArray[np.intp]) -> tuple[Array, Array]:
        """Mass and first moment (R,) of the lengths from `start` to before `end`, both (R,)."""
        return (
            (self.mass[end] - self.mass[start]).astype(float),
            (self.first[end] - self.first[start]).astype(float),
        )

    def distance(
        self, start: npt.NDArray[np.intp], end: npt.NDArray[np.intp], place: Array | float, order: Order
    ) -> Array:
        """Sum of weight * |length - place|^order (R,) over lengths that lie on one side of `place`."""
        at = np.asarray(place, np.longdouble)
        mass, first = self.mass[end] - self.mass[start], self.first[end] - self.first[start]
        if order == 1:
            return np.asarray(np.abs(at * mass - first), float)
        squares = self.second[end] - self.second[start] - at * (2 * first - at * mass)
        return np.asarray(np.maximum(squares, 0), float)


def _worst(lengths: Lengths, sums: _Sums, losses: Losses, order: Order, radius: float, reserve: Array) -> Array:
    """`worst_case_loss` for `reserve` (R,). At the largest multiplier no length moves further than the radius."""
    steepest = max(losses.over, losses.under)
    above = np.full(len(reserve), steepest / radius ** (order - 1) + losses.fixed / radius**order)
    below = above * _NEXT_TO_ZERO
    if order == 1 and math.isinf(lengths.upper):
        below = np.full(len(reserve), steepest)  # Any cheaper and lengths would run off without end.

    def bound(price: Array) -> tuple[Array, Array]:
        gain, moved = _best_response(lengths, sums, losses, order, price, reserve)
        return price * radius**order + gain, radius**order - moved

    return _least(bound, below, above)


def _best_response(
    lengths: Lengths, sums: _Sums, losses: Losses, order: Order, price: Array, reserve: Array
) -> tuple[Array, Array]:
    """What the lengths make of moving at `price` (R,): the mean of loss less price, and the mean distance^order.

    Those that go up stop at the reservation, go `up` tokens, or reach L; those that go down go `down` tokens or reach
    0. Prices of order 1 leave only the extremes of that: to stay or to go all the way.
    """
    values, upper = lengths.values, lengths.upper
    lower = 0.0 if math.isfinite(upper) else -math.inf
    up, down = _step(order, price, losses.under), _step(order, price, losses.over)
    charge = losses.fixed
    first_up = _turning_point(values, order, price, reserve, (lower, upper), (down, up), losses)
    from_lower = np.minimum(np.searchsorted(values, lower + down), first_up)
    to_reserve = np.maximum(np.searchsorted(values, reserve - up), first_up)
    to_upper = np.maximum(np.searchsorted(values, upper - up), to_reserve)
    start, end = np.zeros_like(first_up), np.full_like(first_up, len(values))

    sunk = sums.over(start, from_lower)[0]
    down_mass, down_sum = sums.over(from_lower, first_up)
    stopped = sums.over(first_up, to_reserve)[0]
    up_mass, up_sum = sums.over(to_reserve, to_upper)
    risen = sums.over(to_upper, end)[0]
    step_down, step_up = np.where(down_mass > 0, down, 0.0), np.where(up_mass > 0, up, 0.0)
    at_lower, at_upper = (0.0 if math.isinf(end_) else end_ for end_ in (lower, upper))  # None is moved to infinity.

    moved = (
        sums.distance(start, from_lower, at_lower, order)
        + down_mass * step_down**order
        + sums.distance(first_up, to_reserve, reserve, order)
        + up_mass * step_up**order
        + sums.distance(to_upper, end, at_upper, order)
    )
    loss = (
        losses.over * (sunk * (reserve - at_lower) + down_mass * (reserve + step_down) - down_sum)
        + losses.under * (up_sum + up_mass * (step_up - reserve) + risen * (at_upper - reserve))
        + charge * (stopped + up_mass + risen)
    )
    return loss - price * moved, moved


def _step(order: Order, price: Array, slope: float) -> Array:
    """How far a length goes for `slope` a token when no end is in its way; tokens (R,)."""
    if order == 1:
        return np.where(price < slope, np.inf, 0.0)
    return slope / (2 * price)


def _turning_point(
    values: Array,
    order: Order,
    price: Array,
    reserve: Array,
    ends: tuple[float, float],
    steps: tuple[Array, Array],
    losses: Losses,
) -> npt.NDArray[np.intp]:
    """Index (R,) of the first length that gains at least as much by going up as down, by halving.

    The difference of the two gains never falls with the length, since its slope is the distance between both targets.
    """
    (lower, upper), (down, up) = ends, steps
    low, high = np.zeros(len(reserve), np.intp), np.full(len(reserve), len(values), np.intp)
    low[reserve >= upper] = len(values)  # Nothing is ever short: all move down.
    for _ in range(len(values).bit_length()):
        middle = (low + high) // 2
        here = values[np.minimum(middle, len(values) - 1)]
        top = np.minimum(np.maximum(here + up, reserve), upper)
        bottom = np.minimum(np.maximum(here - down, lower), reserve)
        gain = losses.under * (top - reserve) + losses.fixed - losses.over * (reserve - bottom)
        rises = gain >= price * (np.abs(top - here) ** order - np.abs(bottom - here) ** order)
        rises |= middle >= high
        low, high = np.where(rises, low, middle + 1), np.where(rises, middle, high)
    return np.minimum(high, len(values))


def _least(bound: Callable[[Array], tuple[Array, Array]], low: Array, high: Array) -> Array:
    """The least value (R,) of convex functions between `low` and `high` (R,), each given with its slope.

    First the bracket grows from `high` until the slope changes its sign in it. Then the tangents at both its ends cross
    below the function: how far below says when to stop, and where they cross is a good place to look next. Every other
    turn halves the bracket instead, which bounds the number of turns.
    """
    lowest, low = low, np.maximum(low, high / _STRIDE)
    (low_value, low_slope), (high_value, high_slope) = bound(low), bound(high)
    while np.any(wide := (low_slope > 0) & (low > lowest)):
        high, high_value, high_slope = _choose(wide, (low, low_value, low_slope), (high, high_value, high_slope))
        low = np.where(wide, np.maximum(lowest, low / _STRIDE), low)
        low_value, low_slope = bound(low)
    for turn in range(_TURNS):
        width, turning = high - low, low_slope < np.minimum(high_slope, 0.0)
        rise = high_value - low_value - high_slope * width
        step = np.divide(rise, low_slope - high_slope, out=np.zeros_like(rise), where=turning)
        least = np.minimum(low_value, high_value)
        if np.all(least - (low_value + low_slope * step) <= _PRECISION * least):
            break
        if turn % 3 == 0:
            here = _where_even(low, low_slope, high, high_slope)
        else:
            here = low + np.clip(step, 0.0, width) if turn % 3 == 1 else (low + high) / 2
        value, slope = bound(here)
        right = slope >= 0
        low, low_value, low_slope = _choose(right, (low, low_value, low_slope), (here, value, slope))
        high, high_value, high_slope = _choose(right, (here, value, slope), (high, high_value, high_slope))
    return np.asarray(np.minimum(low_value, high_value))


def _where_even(low: Array, low_slope: Array, high: Array, high_slope: Array) -> Array:
    """Where the slope is 0 if it is straight in price^-2, as at order 2 while no length meets an end."""
    share = np.divide(low_slope, low_slope - high_slope, out=np.full_like(low, 0.5), where=low_slope < high_slope)
    near, far = high**-2.0, low**-2.0
    return np.asarray(np.clip((far + np.clip(share, 0.0, 1.0) * (near - far)) ** -0.5, low, high))


def _choose(which: npt.NDArray[np.bool_], yes: tuple[Array, ...], no: tuple[Array, ...]) -> list[Array]:
    return [np.where(which, one, other) for one, other in zip(yes, no, strict=True)]
