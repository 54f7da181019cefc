"""Solves the joint program until its answer is consistent with its own coefficients.

Two of the coefficients depend on the answer: what a replica can take depends on the mix of classes that it gets, and
how bursty its arrivals are on how many replicas share them. Both are worked out for a first guess, then again for each
answer; an answer whose own figures do not hold tightens them, for what it uses, until one holds or the rounds are used
up. A plan that runs already is kept while a new one would gain less than the hysteresis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvantile_optimizer.candidates import shape_name
from kvantile_optimizer.errors import WorkError
from kvantile_optimizer.load import Capacity, engine_seconds
from kvantile_optimizer.plan import (
    HistoryEntry,
    Plan,
)
from kvantile_optimizer.problem import Problem, capacities, columns
from kvantile_optimizer.program import Decision, Instance, busy_replicas, carried, solve
from kvantile_optimizer.solver import SolveStatus
from kvantile_optimizer.spec import duration_seconds

ROUNDS = 12
"""Most mixes settle in two or three; of thirty random ones four needed more than four, and two more than eight."""
REPLICA_START_S = 300
"""What a replica costs before it serves: pulling the image, loading weights, capturing graphs."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A decision with the coefficients it was made with."""

    instance: Instance
    decision: Decision
    history: list[HistoryEntry]
    bound: float
    """Of the program with every replica free, US dollars per second."""
    holds: bool
    """Whether the coefficients are those of the decision's own mix."""


def settle(problem: Problem, left_s: Callable[[], float], seed: int, current: Plan | None) -> Settled:
    """Solves until the answer is consistent with its own coefficients.

    `left_s` tells how much time there is, `current` is the plan that runs. Raises WorkError when the time was over
    before any answer.
    """
    C, J = len(problem.workloads), len(problem.candidates)
    shares, replicas = np.zeros((C, J)), _first_guess(problem)
    capacity: list[Capacity] = capacities(problem, shares, replicas)
    history: list[HistoryEntry] = []
    best: Settled | None = None
    for number in range(ROUNDS):
        instance = _instance(problem, capacity, current)
        decision = solve(instance, left_s(), seed) if left_s() > 0 else None
        if decision is None:
            break
        history.append(HistoryEntry(block=f"joint-{number + 1}", objective_usd_per_hour=_usd_per_hour(decision)))
        shares, replicas = carried(instance, decision), decision.replicas.astype(np.float64)
        actual = capacities(problem, shares, np.where(replicas > 0, replicas, _first_guess(problem)))
        holds = _holds(instance, decision, actual)
        best = Settled(instance, decision, history, decision.bound, holds)
        if holds:
            break
        # Only what is used is tightened: the rest keeps the figures of the mix it might get.
        capacity = [
            _tighter(old, new) if used else old for old, new, used in zip(capacity, actual, replicas > 0, strict=True)
        ]
    if best is None:
        raise WorkError("no plan was found within the time limit: allow more with --time-limit")
    return best


def _first_guess(problem: Problem) -> NDArray[np.float64]:
    """Replicas (J,) if each candidate carried all of its classes alone, at half load."""
    guess = []
    for j, candidate in enumerate(problem.candidates):
        seconds = sum(
            problem.rates[c] * engine_seconds(candidate.step, problem.parts[c][0])
            for c, mine in enumerate(problem.allowed)
            if j in mine
        )
        most = candidate.pool.gpus // candidate.gpus if candidate.pool.gpus is not None else np.inf
        guess.append(max(1.0, min(2 * seconds, most)))
    return np.array(guess)


def _instance(problem: Problem, capacity: list[Capacity], current: Plan | None) -> Instance:
    running: Counter[str] = Counter()
    if current is not None:
        for group in current.groups:
            running[shape_name(group.pool, group.tensor_parallel, group.pipeline_parallel)] += group.replicas
    interval_s = duration_seconds(problem.serving_plan.spec.replan.interval)
    return Instance(
        candidates=problem.candidates,
        capacities=capacity,
        columns=columns(problem, capacity),
        rates=problem.rates,
        prefix_tokens=np.array([float(workload.prefix_tokens) for workload in problem.workloads]),
        current=running,
        switching_ratio=REPLICA_START_S / interval_s if current is not None else 0.0,
    )


def _holds(instance: Instance, decision: Decision, actual: list[Capacity]) -> bool:
    """Whether the decision fits what its own mix lets each group take, to half a point."""
    load = busy_replicas(instance, decision)
    return all(
        load[j] <= decision.replicas[j] * (actual[j].utilisation + 0.005)
        and actual[j].tail_margin <= 1.02 * instance.capacities[j].tail_margin
        for j in np.flatnonzero(decision.replicas)
    )


def _tighter(old: Capacity, new: Capacity) -> Capacity:
    return replace(
        new,
        utilisation=min(old.utilisation, new.utilisation),
        tail_margin=max(old.tail_margin, new.tail_margin),
        step_s=max(old.step_s, new.step_s),
    )


def prefer_current(problem: Problem, settled: Settled, time_limit_s: float, seed: int) -> Settled:
    """The running replicas with new routes, unless the new plan serves more or is cheaper by the hysteresis."""
    kept = replace(settled.instance, keep_replicas=True)
    decision = solve(kept, time_limit_s, seed)
    if decision is None or decision.status == SolveStatus.INFEASIBLE:
        return settled
    worth = 1 + problem.serving_plan.spec.replan.hysteresis_percent / 100
    serves_less = decision.unserved @ kept.rates > settled.decision.unserved @ kept.rates + 1e-6
    if serves_less or decision.objective > settled.decision.objective * worth:
        return settled
    history = [*settled.history, HistoryEntry(block="keep", objective_usd_per_hour=_usd_per_hour(decision))]
    return replace(settled, instance=kept, decision=decision, history=history)


def _usd_per_hour(decision: Decision) -> float:
    return 3600 * decision.objective
