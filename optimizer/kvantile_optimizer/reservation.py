"""How many output tokens to reserve, and what a reservation costs in KV memory.

The best reservation weighs idle tokens against missing ones for the worst distribution in the ball of `ambiguity`. The
worst case is convex in the reservation, so it is searched on the block grid directly; at order 1 the optimum has a
closed form, and it is the sample quantile until the radius exceeds all the room above (or below) that quantile. When
the answer is the sample quantile anyway, `Reservation` says so rather than call it robust.

A footprint is the expected KV use of a request summed over its decoding steps. It is inflated for the same ball by a
bound in closed form, which keeps the planner's program linear. The radius `auto` is the standard error of the mean,
sd / sqrt(N); choosing it by validation on past windows is not built yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvantile_optimizer.ambiguity import Losses, Order, expected_loss, worst_case_loss
from kvantile_optimizer.plan import Form
from kvantile_optimizer.workload import Array, Lengths, Workload

_PROBES = 16
"""Points evaluated at once while a convex function is searched: four rounds cover 16,384 blocks."""
_TIE = 1e-10
"""Relative difference below which two reservations cost the same; the smaller is taken."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The best reservation for a class, and beside it the one for the observed distribution taken at its word."""

    tokens: int
    """A multiple of the block, or the last block that L needs."""
    worst_case_loss: float
    """Of `tokens`, over the ball."""
    fractile: float
    """F(tokens)."""
    is_sample_quantile: bool
    """Whether robustness changed nothing."""
    sample_tokens: int
    """Best for the observed distribution, on the same grid."""
    sample_loss: float
    """Of `sample_tokens`, under the observed distribution."""
    radius: float
    order: Order


def auto_radius(lengths: Lengths) -> float:
    """The radius in tokens that `auto` means: the standard error of the mean, 0 for a described class."""
    return lengths.std / math.sqrt(lengths.samples) if lengths.samples else 0.0


def radius_of(lengths: Lengths, radius: str) -> float:
    """The radius in tokens of a spec's `robustness.radius`."""
    return auto_radius(lengths) if radius == "auto" else float(radius)


def robust_reservation(lengths: Lengths, losses: Losses, order: Order, radius: float, block: int = 1) -> Reservation:
    """The multiple of `block` tokens, up to L, whose worst expected loss is least; the smallest such one."""
    last = math.ceil(lengths.upper / block)

    def robust(count: Array) -> Array:
        return worst_case_loss(lengths, losses, order, radius, count * block)

    def sample(count: Array) -> Array:
        return expected_loss(lengths, losses, count * block)

    sample_count, sample_loss = _lowest(sample, 0, last)
    if order == 1:
        near = math.floor(order_1_optimum(lengths, losses, radius) / block)
        count, loss = _lowest(robust, max(0, near - 1), min(last, near + 1))
    else:
        count, loss = _lowest(robust, 0, last)
    return Reservation(
        tokens=count * block,
        worst_case_loss=loss,
        fractile=float(lengths.cdf(count * block)),
        is_sample_quantile=count == sample_count,
        sample_tokens=sample_count * block,
        sample_loss=sample_loss,
        radius=radius,
        order=order,
    )


def order_1_optimum(lengths: Lengths, losses: Losses, radius: float) -> float:
    """The best reservation over the ball of order 1 on [0, L], in tokens, not rounded.

    With t the sample quantile at kappa, an adversary first lengthens the answers above it, for which the distance to L
    is A in the mean, and then shortens those below it, at most by B in the mean (or the other way round when idle
    tokens are the dearer ones); the atom at t is split at kappa. While the first stock lasts, t stays best; then the
    optimum is the point that a two-point mix of t and an end has; when both are used up, kappa * L.
    """
    kappa, upper = losses.fractile, lengths.upper
    at = lengths.quantile(kappa)
    room_above = float(np.maximum(lengths.values - at, 0.0) @ lengths.weights)
    room_below = float(np.maximum(at - lengths.values, 0.0) @ lengths.weights)
    above = (1 - kappa) * (upper - at) - room_above
    below = kappa * at - room_below
    if losses.under >= losses.over:
        first, second, then = above, below, at + (2 * kappa - 1) * (upper - at)
    else:
        first, second, then = below, above, 2 * kappa * at
    if radius <= first:
        return at
    return then if radius <= first + second else kappa * upper


def _lowest(function: Callable[[Array], Array], low: int, high: int) -> tuple[int, float]:
    """Where on low..high a convex function is least (the first place, ties included), and its value there."""
    while True:
        places = np.unique(np.linspace(low, high, _PROBES).round())
        values = function(places)
        best = int(np.argmax(values <= values.min() + _TIE * abs(float(values.min()))))
        if len(places) == high - low + 1:
            return int(places[best]), float(values[best])
        low, high = int(places[max(0, best - 1)]), int(places[min(len(places) - 1, best + 1)])


def footprint(
    workload: Workload, form: Form, reserve_tokens: npt.ArrayLike, phi: float = 1.0, radius: float = 0.0
) -> Array:
    """Expected KV token-steps of a request (R,) for each reservation `reserve_tokens` (R,).

    Per request with prompt I and output O, decoded in steps g = 1..O-1: `none` holds I + g; `held` holds
    I + max(r, g); `pooled` holds I + g and counts the share `phi` of (r - g)^+ beside it. `radius` (tokens) adds what
    an order-2 ball can add at most: radius * sqrt(E[slope^2]) + radius^2 / 2, where slope is the footprint's growth
    with O and its own growth is at most 1 in every form, so that a second-order expansion bounds it. Without a
    reservation that is E[a O + b O^2 / 2] with a = I - 1/2, b = 1, for which the bound is attained on the whole line.
    """
    share = {"none": 0.0, "held": 1.0, "pooled": phi}[form]
    lengths = workload.lengths
    reserve = np.asarray(reserve_tokens, float)[:, None]
    steps = np.minimum(np.floor(reserve), np.maximum(lengths.values - 1, 0.0))
    idle = (steps * reserve - steps * (steps + 1) / 2) @ lengths.weights
    used = workload.expect((workload.output - 1) * (workload.prompt + workload.output / 2))
    return np.asarray(used + share * idle) + _inflation(workload, share, reserve, radius)


def _inflation(workload: Workload, share: float, reserve: Array, radius: float) -> Array:
    if radius <= 0:
        return np.zeros(len(reserve))
    grown = workload.prompt - 0.5 + workload.output
    slopes = grown if share == 0 else grown + share * np.maximum(reserve - workload.output + 0.5, 0.0)
    mean_square = np.broadcast_to(slopes, (len(reserve), len(grown))) ** 2 @ workload.weight
    return np.asarray(radius * np.sqrt(mean_square) + radius**2 / 2)
