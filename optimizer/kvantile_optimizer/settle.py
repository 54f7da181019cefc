"""Solves the joint program until its answer is consistent with its own coefficients.

Two of the coefficients depend on the answer: what a replica can take depends on the mix of classes that it gets, and
how bursty its arrivals are on how many replicas share them. Both are worked out for a first guess, then again for each
answer: the *refresh* block. An answer's true objective is its cost with as many replicas as its own mix needs; the best
of all rounds by that measure is the plan, and the rounds end when one has gained nothing.

A plan that runs is kept while a new one would gain less than the hysteresis: the descent knows that from its bound
before it has looked for a new plan, the exact program afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from kvantile_optimizer import coefficients, descent, program
from kvantile_optimizer.candidates import shape_of
from kvantile_optimizer.coefficients import Tables
from kvantile_optimizer.errors import TimeOverError
from kvantile_optimizer.load import Capacity
from kvantile_optimizer.plan import Group, HistoryEntry, Plan
from kvantile_optimizer.problem import Problem, capacities, first_guess
from kvantile_optimizer.program import Array, Columns, Decision, Instance, carried
from kvantile_optimizer.spec import duration_seconds

Method = Literal["bcd", "exact"]

ROUNDS = 8
"""Most mixes settle in two or three rounds."""
GAIN = 1e-3
"""Relative fall of the true objective for which another round is worth it."""
UNSERVED = 1e-3
"""Share of a class that is worth no replica: finer than any coefficient is exact."""
REROUTES = 3
"""Times that routes are looked for which need no more replicas: each is one linear program."""
REPLICA_START_S = 300
"""What a replica costs before it serves: pulling the image, loading weights, capturing graphs."""
SLACK = 0.02
"""Relative load beyond a whole number of replicas that asks for no other: finer than the closed forms are exact."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A decision with the coefficients it was made with."""

    instance: Instance
    decision: Decision
    tables: Tables
    history: list[HistoryEntry]
    bound: float
    """Of the program with every replica free, US dollars per second."""
    holds: bool
    """Whether the coefficients are those of the decision's own mix."""


@dataclass(slots=True)
class _Rounds:
    """What is carried from one round to the next."""

    problem: Problem
    tables: Tables
    capacity: Capacity
    correction: Array
    replayed: Array
    columns: Columns
    history: list[HistoryEntry]

    def note(self, block: str, usd_per_second: float) -> None:
        # A block whose program has no solution, such as running replicas that no longer fit, has no objective.
        if np.isfinite(usd_per_second):
            self.history.append(HistoryEntry(block=block, objective_usd_per_hour=3600 * usd_per_second))


def settle(
    problem: Problem,
    table: Tables,
    replayed: Array,
    left_s: Callable[[], float],
    seed: int,
    current: Plan | None,
    method: Method = "bcd",
) -> Settled:
    """Solves until the answer is consistent with its own coefficients.

    `replayed` (J,) is what replays let a replica take over what the closed forms do, 1 where there was none. `left_s`
    tells how much time there is, `current` is the plan that runs. Raises TimeOverError when the time was over before
    any answer, WorkError from the solver.
    """
    guess, first = first_guess(problem), coefficients.first_instance(problem)
    rounds = _Rounds(problem, table, first.capacity, first.correction, replayed, first.columns, [])
    running = None
    if current is not None:
        running = running_replicas(problem, current)
        rounds.capacity, rounds.correction = _as_running(problem, table, current, np.where(running > 0, running, guess))
    best: Settled | None = None
    kept = False
    for _ in range(ROUNDS):
        if left_s() <= 0:
            break
        posed = _instance(problem, rounds, current)
        solved = _solved(rounds, posed, left_s, seed, method, running)
        if solved is None:
            break
        found = _refreshed(rounds, solved.instance, solved.decision, guess)
        found = _rerouted(rounds, found, solved.decision, guess, left_s, seed)
        gained = best is None or not best.holds or _objective(found) < _objective(best) * (1 - GAIN)
        if best is None or _order(found) < _order(best):
            best, kept = found, solved.kept
        if not gained or _as_solved(found, solved.decision):
            break
        rounds.capacity, rounds.correction = found.instance.capacity, found.instance.correction
    if best is None:
        raise TimeOverError("no plan was found within the time limit: allow more with --time-limit")
    if method == "bcd":
        best = _proved(rounds, best, guess, left_s, seed, kept=kept)
    return replace(best, history=rounds.history)


def _objective(settled: Settled) -> float:
    return settled.decision.objective


def _order(settled: Settled) -> tuple[bool, float, float]:
    """Plans that hold before those that do not, then those that serve more, then the cheaper ones."""
    return not settled.holds, *_rank(settled.decision, settled.instance)


def _rank(decision: Decision, instance: Instance) -> tuple[float, float]:
    return round(float(np.rint(decision.unserved / UNSERVED) @ instance.rates), 6), decision.objective


def _as_solved(found: Settled, decision: Decision) -> bool:
    """Whether the refresh has left the decision nearly as cheap as the program thought."""
    return found.holds and found.decision.objective <= decision.objective * (1 + GAIN)


@dataclass(frozen=True, slots=True)
class _Solved:
    """A decision as the program or the descent left it."""

    instance: Instance
    decision: Decision
    kept: bool = False
    """Whether the running replicas were kept."""


def _solved(
    rounds: _Rounds,
    instance: Instance,
    left_s: Callable[[], float],
    seed: int,
    method: Method,
    running: Array | None,
) -> _Solved | None:
    if method == "exact":
        instance = coefficients.with_every_column(rounds.problem, rounds.tables, instance)
        decision = program.solve(instance, left_s(), seed)
        if decision is None:
            return None
        rounds.note("joint", decision.objective)
        return _Solved(instance, decision)
    hysteresis = rounds.problem.serving_plan.spec.replan.hysteresis_percent / 100
    found = descent.descend(
        rounds.problem, rounds.tables, instance, left_s, seed, running=running, keep_within=hysteresis
    )
    if found is None:
        return None
    for block in found.blocks:
        rounds.note(block.name, block.objective)
    rounds.columns = found.known
    return _Solved(found.instance, found.decision, found.kept)


def _proved(
    rounds: _Rounds, found: Settled, guess: Array, left_s: Callable[[], float], seed: int, *, kept: bool
) -> Settled:
    """The answer with the bound of the whole program where that is small, or the program's own answer if better.

    Replicas that were `kept` stay: only what they could be beaten by is worth knowing, if that takes no time.
    """
    decision = found.decision
    far = decision.objective - decision.bound > descent.ENOUGH * decision.objective
    if not far or left_s() <= 0:
        return found
    whole = descent.whole(rounds.problem, rounds.tables, found.instance)
    if whole is None or (kept and len(whole.columns) > descent.LATER_COLUMNS):
        return found
    start = decision.replicas.astype(float)
    joint = program.solve(
        whole, left_s(), seed, start=start, gap=descent.ENOUGH, most_nodes=descent.nodes(len(whole.columns))
    )
    if joint is None:
        return found
    if not kept and _rank(joint, whole) < _rank(decision, found.instance):
        rounds.note("joint", joint.objective)
        better = _rerouted(rounds, _refreshed(rounds, whole, joint, guess), joint, guess, left_s, seed)
        if _order(better) < _order(found):
            return better
    bound = min(max(decision.bound, joint.bound), decision.objective)
    return replace(found, decision=replace(decision, bound=bound), bound=bound)


def _instance(problem: Problem, rounds: _Rounds, current: Plan | None) -> Instance:
    shapes: Counter[str] = Counter()
    if current is not None:
        for group in current.groups:
            shapes[shape_of(group)] += group.replicas
    interval_s = duration_seconds(problem.serving_plan.spec.replan.interval)
    return Instance(
        candidates=problem.candidates,
        capacity=rounds.capacity,
        columns=rounds.columns,
        rates=problem.rates,
        prefix_tokens=np.array([float(workload.prefix_tokens) for workload in problem.workloads]),
        correction=rounds.correction,
        replayed=rounds.replayed,
        current=shapes,
        switching_ratio=REPLICA_START_S / interval_s if current is not None else 0.0,
    )


def running_replicas(problem: Problem, current: Plan) -> Array:
    """(J,) replicas of the plan that runs."""
    replicas = np.zeros(len(problem.candidates))
    for group, j in _running(problem, current):
        replicas[j] += group.replicas
    return replicas


def _running(problem: Problem, current: Plan) -> list[tuple[Group, int]]:
    """The groups that run with a candidate each: of the group's sizes if there is one, and else the loosest tier, that
    serves all that is routed there."""
    places = {workload.name: c for c, workload in enumerate(problem.workloads)}
    of_shape: dict[str, list[int]] = {}
    for j, candidate in enumerate(problem.candidates):
        of_shape.setdefault(candidate.shape, []).append(j)
    found = []
    for group in current.groups:
        routed = [
            problem.own_tiers[places[route.class_]]
            for route in current.routes
            if route.group == group.name and route.class_ in places and route.fraction > 0
        ]
        fitting = [
            j
            for j in of_shape.get(shape_of(group), [])
            if all(problem.candidates[j].tier.serves(tier) for tier in routed)
        ]
        if fitting:
            tiers = {j: (problem.candidates[j].runs_as(group), problem.candidates[j].tier) for j in fitting}
            found.append((group, max(fitting, key=tiers.__getitem__)))
    return found


def _as_running(problem: Problem, table: Tables, current: Plan, replicas: Array) -> tuple[Capacity, Array]:
    """What candidates take of the mixes that the running plan gives them, and the corrections (J,) for these.

    Better first coefficients than a guess: with them the plan that runs fits today's requests if it ever did.
    """
    places = {workload.name: c for c, workload in enumerate(problem.workloads)}
    candidate_of = {group.name: j for group, j in _running(problem, current)}
    shares = np.zeros(problem.allowed.shape)
    for route in current.routes:
        c, j = places.get(route.class_), candidate_of.get(route.group)
        if c is not None and j is not None and problem.allowed[c, j]:
            shares[c, j] += route.fraction * problem.rates[c]
    capacity, steps = capacities(problem, shares, replicas), problem.steps
    of_class = np.array([table.prompt[0], table.steps, table.bare])
    seconds = shares * (of_class.T @ np.array([steps.delta, steps.beta, steps.gamma]))
    busy = seconds.sum(axis=0)
    full = (seconds / np.where(table.alone > 0, table.alone, 1.0)).sum(axis=0)
    correction = capacity.utilisation * full / np.where(busy > 0, busy, 1.0)
    return capacity, np.where(correction > 0, correction, 1.0)


def _refreshed(rounds: _Rounds, instance: Instance, decision: Decision, guess: Array) -> Settled:
    """The decision with the coefficients of its own mix, and as many replicas as they ask for where there is room."""
    problem, shares = rounds.problem, carried(instance, decision)
    replicas = decision.replicas
    for _ in range(ROUNDS):
        actual = capacities(problem, shares, np.where(replicas > 0, replicas, guess).astype(float))
        own = replace(
            instance,
            capacity=actual.where(replicas > 0, instance.capacity),
            correction=program.corrections(instance, decision, actual.utilisation),
        )
        needed = _needed(own, decision)
        if (needed == replicas).all():
            break
        replicas = np.where(decision.replicas > 0, needed, 0)
    if program.fits(own, replicas):
        # More replicas smooth their arrivals: what the last figures ask for, all of them do with.
        true = program.with_replicas(own, decision, replicas)
        rounds.note("refresh", true.objective)
        return Settled(own, true, rounds.tables, rounds.history, decision.bound, holds=True)
    holds = bool((_needed(own, decision) <= decision.replicas).all())
    return Settled(own, decision, rounds.tables, rounds.history, decision.bound, holds)


def _rerouted(
    rounds: _Rounds, found: Settled, decision: Decision, guess: Array, left_s: Callable[[], float], seed: int
) -> Settled:
    """`found`, or the same replicas as `decision` with other routes, where those need no more of them.

    The refresh may ask for a whole replica more because a mix takes a little more than was planned for, though another
    group has room for that little.
    """
    best = found
    for _ in range(REROUTES):
        if _as_solved(best, decision) or left_s() <= 0:
            break
        fixed = decision.replicas.astype(float)
        routed = program.solve(found.instance, left_s(), seed, replicas=(fixed, fixed))
        if routed is None or _rank(routed, found.instance)[0] > _rank(decision, found.instance)[0]:
            break
        found = _refreshed(rounds, found.instance, replace(routed, bound=decision.bound), guess)
        best = min(best, found, key=_order)
    return best


def _needed(instance: Instance, decision: Decision) -> program.Counts:
    """(J,) replicas that carry the decision's routes; none for a candidate that carries nothing."""
    J = len(instance.candidates)
    use = program.uses(instance, instance.columns) * decision.fractions
    used = np.array([np.bincount(instance.columns.candidate, row, J) for row in use], float)
    # A prefix is pinned on every replica, so the rest of each has to do.
    used[1] /= np.maximum(1 - program.pinned_share(instance, decision), 1e-9)
    return np.asarray(np.ceil(used.max(axis=0) / (1 + SLACK)), np.int64)


def prefer_current(
    problem: Problem, settled: Settled, current: Plan, left_s: Callable[[], float], seed: int
) -> Settled:
    """The running replicas with new routes, unless the new plan serves more or is cheaper by the hysteresis."""
    running = running_replicas(problem, current)
    if (settled.decision.replicas == running).all():
        return settled
    kept = descent.keep(problem, settled.tables, settled.instance, running, left_s, seed)
    if kept is None:
        return settled
    instance, decision = kept
    worth = 1 + problem.serving_plan.spec.replan.hysteresis_percent / 100
    serves_less = decision.unserved @ instance.rates > settled.decision.unserved @ instance.rates + 1e-6
    if serves_less or decision.objective > settled.decision.objective * worth:
        return settled
    entry = HistoryEntry(block="keep", objective_usd_per_hour=3600 * decision.objective)
    return replace(settled, instance=instance, decision=decision, history=[*settled.history, entry])
