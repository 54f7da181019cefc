"""How many output tokens to reserve, and what a reservation costs in KV memory.

The best reservation weighs idle tokens against missing ones for the worst distribution in the ball of `ambiguity`. A
charge for any shortage at all can give the worst case hundreds of local minima, so the block grid is searched by branch
and bound: one more block never costs more than its idle tokens, which bounds every stretch of blocks from its last one.
At order 1 without that charge the answer is the sample quantile until the radius exceeds all the room above (or below)
that quantile. When robustness changes nothing, `Reservation` says so rather than call the answer robust.

A footprint is the expected KV use of a request summed over its decoding steps. It is inflated for the same ball by a
bound in closed form, which keeps the planner's program linear.
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

_PROBES = 512
"""Stretches that the blocks are cut into at first: more cost more at once, fewer take more rounds."""
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
    """Whether robustness changed nothing: the best for the observed distribution is the best for the worst one too."""
    sample_tokens: int
    """Best for the observed distribution, on the same grid."""
    sample_loss: float
    """Of `sample_tokens`, under the observed distribution."""
    radius: float
    order: Order


def robust_reservation(lengths: Lengths, losses: Losses, order: Order, radius: float, block: int = 1) -> Reservation:
    """The multiple of `block` tokens, up to L, whose worst expected loss is least; the smallest such one.

    On the whole line (`lengths.upper` infinite) no multiple is too large. Raises ValueError there when idle tokens are
    free, since more is then always better.
    """
    last = _last_block(lengths, losses, order, radius, block)

    sample_count, sample_loss = _cheapest(
        lambda count: expected_loss(lengths, losses, count * block), losses.over * block, last
    )
    count, loss = sample_count, sample_loss
    if radius > 0:
        count, loss = _cheapest(
            lambda count: worst_case_loss(lengths, losses, order, radius, count * block), losses.over * block, last
        )
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


def _last_block(lengths: Lengths, losses: Losses, order: Order, radius: float, block: int) -> int:
    """The last block worth looking at: the one that L needs, or beyond which idle tokens alone cost more than none.

    A reservation r costs at least over * (r - mean), so one dearer than reserving the longest answer is out.
    """
    if math.isfinite(lengths.upper):
        return math.ceil(lengths.upper / block)
    if losses.over == 0:
        raise ValueError("free idle tokens need a longest answer")
    longest = math.ceil(float(lengths.values[-1]) / block) * block
    most = float(worst_case_loss(lengths, losses, order, radius, [longest])[0]) / losses.over + lengths.mean
    return math.ceil(max(most, longest) / block)


def _cheapest(costs: Callable[[Array], Array], over: float, last: int) -> tuple[int, float]:
    """The first of the cheapest blocks in 0..last, and its cost; a block more costs at most `over` more than any less.

    That holds for every loss here, charge or not, and so says of a stretch of blocks that none of them is cheaper than
    its last one less `over` a block. Stretches are halved while they may hold the best one.
    """
    step = 2 ** max(0, (last // _PROBES).bit_length())
    places = np.arange(last, -1, -step, dtype=float)
    while True:
        values = costs(places)
        roof = float(values.min()) + _TIE * abs(float(values.min()))
        if step == 1:
            best = int(np.flatnonzero(values <= roof)[-1])
            return int(places[best]), float(values[best])
        kept = places[values - over * (step - 1) <= roof]
        step //= 2
        places = np.column_stack((kept, kept - step)).ravel()
        places = places[places >= 0]


def footprint(
    workload: Workload, form: Form, reserve_tokens: npt.ArrayLike, phi: float = 1.0, radius: float = 0.0
) -> Array:
    """Expected KV token-steps of a request (R,) for each reservation `reserve_tokens` (R,).

    Per request with prompt I and output O, decoded in steps g = 1..O-1: `none` holds I + g; `held` holds
    I + max(r, g); `pooled` holds I + g and counts the share `phi` of (r - g)^+ beside it. `radius` (tokens) adds what
    an order-2 ball can add at most: radius * sqrt(E[slope^2]) + radius^2 / 2, where slope is the footprint's growth
    with O and its own growth is at most 1 in every form, so that a second-order expansion bounds it. Without a
    reservation that is E[a O + b O^2 / 2] with a = I - 1/2, b = 1, for which the bound is attained on the whole line.
    No ball adds more than if every answer were the longest that its prompt leaves room for.
    """
    share = {"none": 0.0, "held": 1.0, "pooled": phi}[form]
    reserve = np.asarray(reserve_tokens, float)[:, None]
    used = workload.expect(_used(workload.prompt, workload.output))
    nominal = np.full(len(reserve), used)
    if share > 0:
        lengths = workload.lengths
        nominal += share * (_idle(lengths.values, reserve) @ lengths.weights)
    if radius <= 0:
        return nominal
    longest = workload.longest
    most = workload.expect(_used(workload.prompt, longest)) + share * (_idle(longest, reserve) @ workload.weight)
    return np.minimum(nominal + _inflation(workload, share, reserve, radius), most)


def _used(prompt: Array, output: Array) -> Array:
    """Token-steps that a request of each length holds."""
    return (output - 1) * (prompt + output / 2)


def _idle(output: Array, reserve: Array) -> Array:
    """Token-steps (R, N) by which `reserve` (R, 1) exceeds what a request of each `output` (N,) has generated."""
    steps = np.minimum(np.floor(reserve), np.maximum(output - 1, 0.0))
    return np.asarray(steps * reserve - steps * (steps + 1) / 2)


def _inflation(workload: Workload, share: float, reserve: Array, radius: float) -> Array:
    grown = workload.prompt - 0.5 + workload.output
    slopes = grown if share == 0 else grown + share * np.maximum(reserve - workload.output + 0.5, 0.0)
    mean_square = np.broadcast_to(slopes, (len(reserve), len(grown))) ** 2 @ workload.weight
    return np.asarray(radius * np.sqrt(mean_square) + radius**2 / 2)
