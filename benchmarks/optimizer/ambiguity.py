"""The worst case of a reservation, and the best reservation, against transport programs that know nothing of the dual.

Moving the mass of N atoms at a bounded total distance is a linear program over pairs of an atom and a place. Its
places are a continuum, so columns are generated: solve over a few places (HiGHS, through SciPy), read the price of
distance off the solution, add for each atom the place that pays best at that price, and stop when none pays. The best
place is among a handful, since the loss is linear on both sides of the reservation and the price of distance is convex.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import optimize

from benchmarks.optimizer.row import Row, Run, Setting, Target
from kvantile_optimizer.ambiguity import Losses, Order, worst_case_loss
from kvantile_optimizer.reservation import robust_reservation
from kvantile_optimizer.workload import Array, Lengths

Ints: TypeAlias = npt.NDArray[np.intp]
INSTANCES, QUICK_INSTANCES = 200, 12
FAR = 1e10
"""As good as endlessly far, on the whole line at order 1: 1e-9 of the gain is lost by stopping there."""
PAYS = 5e-8
"""Relative gain that is left at most, by the duality of linear programs, when the last one is solved."""
MAGNITUDES = 10
"""Ways to begin with: the longest and its halves."""
MOST_PAIRS = 400
"""Of atoms and places, where the search ends in any case: beyond, the solver's own tolerance is all that is left."""
ORDERS: tuple[Order, Order] = (1, 2)
KINDS = tuple(itertools.product(ORDERS, (False, True), (False, True), ("equal", "kappa", "weighted"), (False, True)))
"""Order, whole line, fixed charge, atoms (equal; with a whole kappa * N; of random weights), short side dearer."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Few atoms, what a reservation costs, and the ball."""

    lengths: Lengths
    losses: Losses
    order: Order
    radius: float
    block: int


def instance(rng: np.random.Generator, place: int) -> Instance:
    """A random instance of the kind whose turn it is."""
    order, on_line, charged, atoms, short_dearer = KINDS[place % len(KINDS)]
    points, upper = int(rng.integers(2, 7)), int(rng.integers(8, 30))
    values = rng.choice(np.arange(1, upper + 1), points, replace=False)
    cheap, dear = sorted(rng.uniform(0.1, 5, 2))
    if atoms == "kappa":
        dear, cheap = float(points - (points - 1) // 2), float((points - 1) // 2 or 1)
    over, under = (cheap, dear) if short_dearer else (dear, cheap)
    fixed = float(rng.choice([0.3, 5.0, 80.0])) if charged else 0.0
    lengths = Lengths.of(
        values,
        rng.random(points) if atoms == "weighted" else np.ones(points),
        math.inf if on_line else upper,
        points,
    )
    radius = float(rng.choice([0.2, 1.5, 6.0, 25.0]))
    return Instance(lengths, Losses(over, under, fixed), order, radius, int(rng.choice([1, 3])))


def transported(given: Instance, reserve: float) -> float:
    """The worst expected loss of `reserve` over all ways to move the atoms, by column generation."""
    values, weights = given.lengths.values, given.lengths.weights
    atoms, places = _first_places(given, reserve)
    while True:
        distance = np.abs(places - values[atoms]) ** given.order
        unit = np.maximum(distance, 1.0)  # The unknowns are mass * distance: what goes far would be lost in rounding.
        loss = _loss(given, reserve, places)
        rows = np.zeros((len(values), len(atoms)))
        rows[atoms, np.arange(len(atoms))] = 1 / unit
        found = optimize.linprog(
            -loss / unit,
            A_eq=rows,
            b_eq=weights,
            A_ub=(distance / unit)[None, :] / given.radius**given.order,
            b_ub=[1.0],
            method="highs",
        )
        assert found.fun is not None
        if given.order == 1:
            return float(-found.fun)
        price = max(0.0, -float(found.ineqlin.marginals[0])) / given.radius**given.order
        worth = -np.asarray(found.eqlin.marginals, float)
        better, left = _better_places(given, reserve, price, worth)
        if left <= PAYS * abs(float(found.fun)) or len(atoms) > MOST_PAIRS:
            return float(-found.fun)
        atoms, places = np.append(atoms, np.arange(len(values))), np.append(places, better)


def _loss(given: Instance, reserve: float, places: Array) -> Array:
    """The loss's closure: what lies at the reservation counts as short, but for the longest possible answer."""
    losses = given.losses
    loss = losses.over * np.maximum(reserve - places, 0.0) + losses.under * np.maximum(places - reserve, 0.0)
    return np.asarray(loss + losses.fixed * ((places >= reserve) & (reserve < given.lengths.upper)))


def _ends(given: Instance) -> tuple[float, float]:
    upper = given.lengths.upper
    return (0.0, upper) if math.isfinite(upper) else (-FAR, FAR)


def _first_places(given: Instance, reserve: float) -> tuple[Ints, Array]:
    """Pairs of an atom and a place: to stay, to stop at the reservation, and to go as far as is any use.

    At order 1 no other place matters, since loss and distance are straight between these. At order 2 shorter ways of
    all magnitudes save rounds; the longest is that of the lightest atom with all of the radius.
    """
    values, (lower, upper) = given.lengths.values, _ends(given)
    often = [reserve] if given.order == 2 and math.isinf(given.lengths.upper) else [reserve, lower, upper]
    reach = given.radius / math.sqrt(given.lengths.weights.min()) * 0.5 ** np.arange(MAGNITUDES)
    ways = np.concatenate((reach, -reach)) if given.order == 2 else np.zeros(0)
    places = [np.unique(np.clip([value, *often, *(value + ways)], lower, upper)) for value in values]
    return np.repeat(np.arange(len(values)), [len(mine) for mine in places]), np.concatenate(places)


def _better_places(given: Instance, reserve: float, price: float, worth: Array) -> tuple[Array, float]:
    """The place (N,) that pays each atom best at `price` a distance^order, and what all gain by it over `worth` (N,).

    That gain bounds how far the program is from one over all places.
    """
    values, (lower, upper) = given.lengths.values[:, None], _ends(given)
    options = [values, np.full_like(values, reserve)]
    if given.order == 1 or math.isfinite(given.lengths.upper):
        options += [np.full_like(values, lower), np.full_like(values, upper)]
    if given.order == 2 and price > 0:
        options += [values - given.losses.over / (2 * price), values + given.losses.under / (2 * price)]
    places = np.clip(np.concatenate(options, axis=1), lower, upper)
    gains = _loss(given, reserve, places) - price * np.abs(places - values) ** given.order
    best = gains.argmax(axis=1)
    rows = np.arange(len(values))
    return places[rows, best], float(given.lengths.weights @ np.maximum(gains[rows, best] - worth, 0.0))


def run(setting: Setting, seed: int) -> Run:
    """The largest relative distances over random instances, of the worst case and of the best reservation."""
    rng = np.random.default_rng(seed)
    loss_error, reserve_error = 0.0, 0.0
    notes = {}
    for place in setting.watch.within(range(QUICK_INSTANCES if setting.quick else INSTANCES)):
        given = instance(rng, place)
        blocks = _blocks(given)
        worst = np.array([transported(given, float(reserve)) for reserve in blocks])
        ours = worst_case_loss(given.lengths, given.losses, given.order, given.radius, blocks)
        found = robust_reservation(given.lengths, given.losses, given.order, given.radius, given.block)
        cost = float(worst[np.searchsorted(blocks, found.tokens)])
        loss_error = max(loss_error, here := float((np.abs(ours - worst) / np.maximum(worst, 1e-12)).max()))
        reserve_error = max(reserve_error, cost / float(worst.min()) - 1)
        if here > 1e-6 or cost > worst.min() * (1 + 1e-6):
            notes[f"seed {seed}, instance {place}"] = f"{KINDS[place % len(KINDS)]}, {here:.1e} off, r* {found.tokens}"
    return Run({"loss": loss_error, "reservation": reserve_error}, notes)


def _blocks(given: Instance) -> Array:
    """Reservations on the block grid (R,): all on [0, L]; on the line up to what the best one is, and two beyond."""
    found = robust_reservation(given.lengths, given.losses, given.order, given.radius, given.block).tokens
    upper = given.lengths.upper if math.isfinite(given.lengths.upper) else given.lengths.values[-1]
    last = max(math.ceil(upper / given.block), found // given.block + 2 * math.isinf(given.lengths.upper))
    every = np.arange(0, last + 1, max(1, last // 12))
    near = np.clip(found // given.block + np.arange(-2, 3), 0, last)
    return given.block * np.union1d(every, near).astype(float)


ROWS = (
    Row(
        "ambiguity",
        f"worst case and r* against transport programs, {INSTANCES} instances of every kind",
        (
            Target("loss", 1e-6, "at most", "{:.1e}", "worst", "relative distance of the worst case"),
            Target("reservation", 1e-6, "at most", "{:.1e}", "worst", "r* dearer than the programs' best block by"),
        ),
        run,
        limit_s=300,
    ),
)
