"""Block coordinate descent on the joint program, for fleets that are too large for it as a whole.

The relaxation of `relaxation` says what no plan can beat, and which classes and candidates belong together. Whole
numbers of replicas are first found by diving: candidates that are hardly used are closed and the fullest rounded up, a
few at a time, the routing solved again after each. Then two blocks take turns while the objective falls:

* *reservations*: with the replicas fixed, levels and routes by the shadow price of KV that these replicas have, which
  is a linear program that generates its columns;
* *replicas*: replicas, routes and residency with a few levels for each pair, which is the program itself on the
  columns that the relaxation and the other block came to, and in later turns on those near the optimum too.

A block's answer is taken only if it costs less. Starts are the relaxation and the replicas that run. The third block,
what a replica can take of its mix, is `settle`'s. docs/model.md says how far from the exact program all this ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvantile_optimizer import coefficients, program
from kvantile_optimizer.coefficients import Tables
from kvantile_optimizer.problem import Problem
from kvantile_optimizer.program import Array, Columns, Decision, Instance
from kvantile_optimizer.relaxation import Relaxation
from kvantile_optimizer.solver import INFINITY, SolveStatus

WHOLE = 1e-6
"""How near to a whole number is one, over the number."""
BATCH = 4
"""A dive settles one in so many of the candidates in question at once."""
MOST_COLUMNS = 12_000
"""Columns of the replicas' block: more and the solver spends its time on the first relaxation."""
LATER_COLUMNS = 500
"""Columns of the replicas' block up to which there is another turn: beyond, one mostly gains less than a thousandth and
takes as long as all before."""
NEAR_COLUMNS = 3_000
"""Columns of later turns, which nothing but their reduced cost has chosen."""
MOST_NODES, NODES_TIMES_COLUMNS = 150, 30_000
"""Branches of the replicas' block, fewer of larger programs: about equal work, and counted so that a slow machine gets
the same plan as a fast one. What more of them find is below a tenth of a percent."""
MOST_TURNS = 8
WHOLE_COLUMNS = 6_000
"""Columns up to which the whole program is solved: a second or two."""
ENOUGH = 1e-3
"""Gap at which an answer is as good as another: a tenth of a percent is less than any coefficient is exact."""
LARGE_ENOUGH = 1e-2
"""The same where the relaxation alone has more than MOST_COLUMNS columns: one branch of the replicas' block takes a
minute there, and for the half percent that it could save two of five plans took minutes."""
MUCH = 1e-2
"""Relative fall after which there is another turn even so, where as much may be left: few branches have found it."""
STOP = 1e-3
"""Relative fall below which the blocks stop taking turns: as exact as the coefficients are."""
LEAST_SECONDS = 1.0
"""What the last solve has even when the time is over: without it there is no plan."""


@dataclass(frozen=True, slots=True)
class Block:
    """What one block came to."""

    name: str
    objective: float
    """US dollars per second, after it; unserved requests at the relaxation's penalty."""


@dataclass(frozen=True, slots=True)
class Descent:
    """The answer of the descent, on the columns that it came to know."""

    instance: Instance
    decision: Decision
    blocks: list[Block]
    known: Columns
    """All columns that were generated: a good start for the next time."""
    kept: bool = False
    """Whether the replicas are those that run, or no more beside them than their load needs."""


def descend(
    problem: Problem,
    table: Tables,
    instance: Instance,
    left_s: Callable[[], float],
    seed: int,
    *,
    running: Array | None = None,
    keep_within: float = 0.0,
    gap: float = ENOUGH,
) -> Descent | None:
    """The best plan found for `instance`, whose columns are those to start with; None when the time was over before.

    `running` (J,) are the replicas that run, which are a start too; they, or they and as few more as their load needs,
    are kept with new routes where nothing else could be cheaper by more than the share `keep_within`. It ends when the
    gap to the bound is at most `gap`, or the blocks gain nothing. Raises WorkError from the solver.
    """
    relaxed = Relaxation(problem, table, instance)
    if not relaxed.solve(left_s):
        return None
    blocks = [Block("relaxation", relaxed.bound)]
    relaxed.pin()
    starts: list[tuple[Array, float]] = []
    if running is not None and running.any():
        if (kept := _kept(relaxed, "running", running, keep_within, left_s, seed, blocks)) is not None:
            return kept
        starts.append(_grown(relaxed, running, left_s))
        if (kept := _kept(relaxed, "more than runs", starts[0][0], keep_within, left_s, seed, blocks)) is not None:
            return kept
    starts.append(_grown(relaxed, np.zeros(len(relaxed.replicas)), left_s))
    replicas, objective = min(starts, key=lambda start: start[1])
    blocks.append(Block("rounding", objective))
    best: tuple[Instance, Decision] | None = None
    for turn in range(MOST_TURNS):
        relaxed.bound_replicas(replicas, replicas)
        reserved = relaxed.improve(left_s)
        if not relaxed.columns.resident.any():
            # With prefixes the memory that they pin is only estimated until the other block has counted it.
            blocks.append(Block("reservations", min(reserved, objective)))
        # The program on more columns than it can take would only find what the dive has found.
        enough = gap if len(relaxed.columns) <= MOST_COLUMNS else max(gap, LARGE_ENOUGH)
        if _proved(relaxed, reserved, enough):
            # Nothing but what the block came to; a resident prefix may need a little more memory than it was given.
            columns, bounds = relaxed.carried(), (replicas, replicas + 1)
        else:
            # Nothing is known of how far from the bound a plan is when the time was over before a whole one.
            distance = min(reserved, objective, 2 * relaxed.bound + 1e-9) - relaxed.bound
            most = MOST_COLUMNS if turn == 0 else NEAR_COLUMNS
            columns, bounds = relaxed.near(distance, most, generated_only=turn == 0), None
        posed, seconds = replace(instance, columns=columns), max(left_s(), LEAST_SECONDS)
        most = nodes(len(columns))
        found = program.solve(posed, seconds, seed, start=replicas, replicas=bounds, gap=enough / 2, most_nodes=most)
        if found is None:
            break
        now, before = relaxed.penalised(found), objective
        if best is None or now < objective:
            best, replicas, objective = (posed, found), found.replicas.astype(float), now
        blocks.append(Block("replicas", objective))
        few, fall = len(columns) <= LATER_COLUMNS, (before - now) / relaxed.least_spent
        falls = len(columns) <= NEAR_COLUMNS and fall > MUCH and not _proved(relaxed, objective, MUCH)
        again = (turn == 0 or fall > STOP) if few else falls
        if _proved(relaxed, objective, enough) or left_s() <= 0 or not again:
            break
    best = best or _rounded(relaxed)
    return None if best is None else _descent(relaxed, *best, blocks)


def _rounded(relaxed: Relaxation) -> tuple[Instance, Decision] | None:
    """The relaxation's last routes on its replicas, rounded up: a plan for want of time, where the pools hold it.

    What resident prefixes pin is left to those who count the replicas that routes need.
    """
    instance, replicas = replace(relaxed.instance, columns=relaxed.columns), np.ceil(relaxed.replicas - WHOLE)
    if instance.extra_gpu_price is not None or not program.fits(instance, replicas.astype(np.int64)):
        return None
    fractions, unserved = program.tidy(instance, relaxed.fractions, np.clip(relaxed.unserved, 0.0, 1.0))
    routed = Decision(
        status=SolveStatus.FEASIBLE,
        replicas=replicas.astype(np.int64),
        fractions=fractions,
        unserved=unserved,
        extra_gpus={},
        switching_usd_per_second=0.0,
        objective=INFINITY,
        bound=0.0,
    )
    return instance, program.with_replicas(instance, routed, routed.replicas)


def _descent(relaxed: Relaxation, instance: Instance, decision: Decision, blocks: list[Block]) -> Descent:
    return Descent(instance, replace(decision, bound=_bound(relaxed, decision)), blocks, relaxed.columns)


def _kept(
    relaxed: Relaxation,
    name: str,
    replicas: Array,
    within: float,
    left_s: Callable[[], float],
    seed: int,
    blocks: list[Block],
) -> Descent | None:
    """These replicas with new routes, where the bound says that no plan is cheaper by more than `within`."""
    objective, posed, found = _routed(relaxed, replicas, left_s, seed)
    blocks.append(Block(name, objective))
    if found is None or relaxed.serves_less(found) or not _proved(relaxed, relaxed.penalised(found), within):
        return None
    blocks.append(Block("keep", found.objective))
    return replace(_descent(relaxed, posed, found, blocks), kept=True)


def whole(problem: Problem, table: Tables, instance: Instance) -> Instance | None:
    """The instance with every column there is; None where those are too many for one solve."""
    if np.count_nonzero(table.alone) * table.levels.shape[1] > WHOLE_COLUMNS:
        return None
    return coefficients.with_every_column(problem, table, instance)


def whole_or_descent(
    problem: Problem, table: Tables, instance: Instance, left_s: Callable[[], float], seed: int
) -> Decision | None:
    """The best decision by the whole program where that is small, by descent elsewhere; None when the time was over."""
    every = whole(problem, table, instance)
    if every is not None:
        return program.solve(every, left_s(), seed, gap=ENOUGH)
    found = descend(problem, table, instance, left_s, seed)
    return None if found is None else found.decision


def keep(
    problem: Problem,
    table: Tables,
    instance: Instance,
    running: Array,
    left_s: Callable[[], float],
    seed: int,
) -> tuple[Instance, Decision] | None:
    """The best routes on the replicas that run, on the columns that this takes; None when there is no time or no plan.

    Raises WorkError from the solver.
    """
    relaxed = Relaxation(problem, table, instance)
    if not np.isfinite(relaxed.resolve(left_s)):
        return None
    relaxed.pin()
    _, posed, found = _routed(relaxed, running, left_s, seed)
    return None if found is None else (posed, found)


def _routed(
    relaxed: Relaxation, replicas: Array, left_s: Callable[[], float], seed: int
) -> tuple[float, Instance, Decision | None]:
    """What `replicas` (J,) cost in the linear program, and the best routes on them, on the columns that this takes."""
    relaxed.bound_replicas(replicas, replicas)
    objective = relaxed.improve(left_s)
    posed = replace(relaxed.instance, columns=relaxed.carried())
    if not np.isfinite(objective):
        return objective, posed, None
    found = _fixed(posed, replicas, left_s, seed)
    if found is not None and relaxed.serves_less(found):
        # Prefixes pin more than was estimated; other columns may still make room.
        posed = replace(relaxed.instance, columns=relaxed.columns)
        found = _fixed(posed, replicas, left_s, seed)
    return objective, posed, found


def _fixed(posed: Instance, replicas: Array, left_s: Callable[[], float], seed: int) -> Decision | None:
    seconds, bounds = max(left_s(), LEAST_SECONDS), (replicas, replicas)
    return program.solve(posed, seconds, seed, replicas=bounds, gap=ENOUGH, most_nodes=nodes(len(posed.columns)))


def nodes(columns: int) -> int:
    """Branches that a program of so many columns is worth."""
    return int(np.clip(NODES_TIMES_COLUMNS // max(1, columns), 1, MOST_NODES))


def _bound(relaxed: Relaxation, decision: Decision) -> float:
    """What a plan costs at least that leaves as much unserved as this one, US dollars per second."""
    unserved = relaxed.penalised(decision) - decision.objective
    return float(np.clip(relaxed.bound - unserved, 0.0, decision.objective))


def _proved(relaxed: Relaxation, objective: float, gap: float) -> bool:
    return bool(np.isfinite(objective)) and objective - relaxed.bound <= gap * relaxed.least_spent


def _grown(relaxed: Relaxation, least: Array, left_s: Callable[[], float]) -> tuple[Array, float]:
    """Whole replicas (J,) of at least `least`, and what they cost."""
    objective, replicas = dive(relaxed, least, np.full(len(least), INFINITY), left_s)
    return np.rint(replicas), objective


def dive(relaxed: Relaxation, least: Array, most: Array, left_s: Callable[[], float]) -> tuple[float, Array]:
    """Whole replicas between `least` and `most` (J,), and what they cost, unserved requests at their penalty.

    Candidates below one replica that are used least are closed if that costs less than filling them up would; then the
    fullest are rounded up, or down where there is no room. When the time is over, all are rounded up.
    """
    price = relaxed.problem.sizes.price_usd_per_second
    relaxed.bound_replicas(least, most)
    objective = relaxed.resolve(left_s)
    while np.isfinite(objective) and left_s() > 0:
        n = relaxed.replicas
        near = WHOLE * np.maximum(n, 1.0)
        fraction = n - np.floor(n + near)
        loose = np.flatnonzero(fraction > near)
        if not len(loose):
            return objective, n
        small = loose[n[loose] < 1]
        order = small[np.argsort(n[small], kind="stable")]
        if not len(small):
            order = loose[np.argsort(-fraction[loose], kind="stable")]
        for take in (order[: max(1, len(order) // BATCH)], order[:1]):
            low, high = least.copy(), most.copy()
            if len(small):
                high[take] = 0.0
            else:
                low[take] = np.ceil(n[take])
            filling = float(((np.ceil(n[take]) - n[take]) * price[take]).sum())
            relaxed.bound_replicas(low, high)
            found = relaxed.resolve(left_s)
            if found - objective <= filling:
                break
        else:
            # The opposite of what was tried for the first of them, where there is room for that.
            tried, (low, high) = (low, high, found), (least.copy(), most.copy())
            if len(small):
                low[order[0]] = 1.0
            else:
                high[order[0]] = np.floor(n[order[0]])
            relaxed.bound_replicas(low, high)
            found = relaxed.resolve(left_s)
            if not np.isfinite(found):
                low, high, found = tried
        least, most, objective = low, high, found
    return INFINITY, np.ceil(relaxed.replicas - WHOLE)
