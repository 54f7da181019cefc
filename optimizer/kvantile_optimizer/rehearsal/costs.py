"""What a reservation that is too short costs, calibrated by replays at several reservations.

A replay is paid for what preemptions made it compute again, at the replica's price, and for each answer that missed a
target, at what it costs to serve one: it was served for nothing. Reserving less leaves more tokens missing and more
answers short; reserving more leaves more tokens idle, which keeps others waiting. So the cost of a request is fitted,
with coefficients of at least zero, as

    cost(r) = c_u E[(O - r)^+] + c_f P(O > r) + c_i E[(r - O)^+] + what depends on the seed alone

over reservations r at the same fractile for all classes of a group. Memory is shared, so whose token is missing makes
no difference there: the classes of a group get the same coefficients. The third term keeps the misses that a long
reservation causes out of the first two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from kvantile_optimizer.rehearsal.scene import Manner, Scene
from kvantile_optimizer.simulator.state import Floats

FRACTILES = (0.05, 0.25, 0.5, 0.7, 0.85, 0.95, 0.99)
SEEDS = 2
COUNT_SHARE = 0.5
"""Of the usual requests: what is fitted are means, which need no tail."""


@dataclass(frozen=True, slots=True)
class ReservationCosts:
    """US dollars for a request; zero where a shortage costs nothing, as with memory to spare."""

    under_usd_per_token: float
    """c_u, for each token that the reservation lacks."""
    fixed_usd: float
    """c_f, for any shortage."""
    idle_usd_per_token: float = 0.0
    """What a reserved, unused token costs those who wait; the program prices memory itself."""


def calibrate(
    scene: Scene, manner: Manner, seed: int, replicas: int | None, left_s: Callable[[], float]
) -> ReservationCosts | None:
    """The costs on a scene's group under `manner`, which reserves, with `replicas` of it or those of the plan.

    None when time was up first. With more replicas than it takes memory is never short, and every cost is zero.
    """
    rows, paid = [], []
    for fractile in FRACTILES:
        reserve = tuple(_blocks(scene, part.workload.lengths.quantile(fractile)) for part in scene.parts)
        at = Manner(manner.form, manner.phi, reserve, manner.order)
        for place in range(SEEDS):
            if left_s() <= 0:
                return None
            rows.append([*_quantities(scene, reserve), *np.eye(SEEDS)[place]])
            paid.append(_usd_per_request(scene, at, seed + place, replicas or scene.group.replicas))
    return _fit(np.array(rows), np.array(paid))


def mean(weighted: list[tuple[float, ReservationCosts]]) -> ReservationCosts:
    """The mean of costs by their weights."""
    weights = [weight for weight, _ in weighted]
    values = [(item.under_usd_per_token, item.fixed_usd, item.idle_usd_per_token) for _, item in weighted]
    return ReservationCosts(*(float(value) for value in np.average(values, axis=0, weights=weights)))


def _blocks(scene: Scene, tokens: float) -> int:
    return math.ceil(tokens / scene.group.block_size) * scene.group.block_size


def _quantities(scene: Scene, reserve: tuple[int, ...]) -> list[float]:
    """Mean missing tokens, share of shortages and mean idle tokens of the group's requests."""
    rates = np.array([part.stream.per_second for part in scene.parts])
    each = []
    for part, tokens in zip(scene.parts, reserve, strict=True):
        lengths = part.workload.lengths
        missing = float(lengths.excess(tokens))
        each.append([missing, 1 - float(lengths.cdf(tokens)), tokens - lengths.mean + missing])
    return [float(value) for value in rates @ np.array(each) / rates.sum()]


def _usd_per_request(scene: Scene, manner: Manner, seed: int, replicas: int) -> float:
    take = scene.replay(manner, seed, replicas=replicas, count=round(scene.count * COUNT_SHARE))
    rate = sum(part.stream.per_second for part in scene.parts)
    serving = scene.price_usd_per_second * replicas / rate
    again = scene.price_usd_per_second * take.recomputed_s / len(take.class_index)
    return again + serving * (1 - take.goodput)


def _fit(quantities: Floats, paid: Floats) -> ReservationCosts:
    """Nonnegative least squares of `paid` (N,) on `quantities` (N, Q), each column scaled to its largest value.

    Replays dearer than the median count by their relative error: a reservation that chokes the group costs many times
    more, and not in proportion to its idle tokens, and would else drown what shortages cost.
    """
    if not paid.any():
        return ReservationCosts(0.0, 0.0)
    scale = np.maximum(np.abs(quantities).max(axis=0), 1e-12)
    typical = float(np.median(paid)) or float(paid.max())
    weight = typical / np.maximum(paid, typical)
    found = optimize.nnls(quantities / scale * weight[:, None], paid / typical * weight)[0] * typical / scale
    return ReservationCosts(*(float(value) for value in found[:3]))
