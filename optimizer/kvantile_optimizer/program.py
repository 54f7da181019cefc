"""The joint program: replicas, routing, reservation levels and resident prefixes in one mixed-integer linear program.

A *column* is a class on a candidate with one reservation level, with or without its shared prefix resident there; its
engine time, KV footprint and cost are constants, so nothing is multiplied with anything. Rows: every class served or
counted as unserved; utilisation, KV and sequences of each candidate; GPUs of each pool, packed onto whole nodes;
prefixes resident where a column says so. What cannot be served is minimised first and cost second, in two solves: a
finite penalty would drop a small class to save a replica.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvantile_optimizer.candidates import Candidate, Pool
from kvantile_optimizer.load import Capacity
from kvantile_optimizer.solver import INFINITY, Program, Solution, SolveStatus

MOST_REPLICAS = 10_000
UNSERVED_TOLERANCE = 1e-7
FRACTION_TOLERANCE = 1e-5
"""Fractions below this are rounding, not routing."""
TIE_BREAK_USD_PER_SECOND = 1e-10
"""Per replica and place in the candidates' order: of two equal plans, the one with the earlier candidates."""


@dataclass(frozen=True, slots=True)
class Column:
    """A class on a candidate, at one reservation level. Per request: seconds, token-steps, US dollars."""

    class_index: int
    candidate: int
    reserve_tokens: int
    resident: bool
    engine_seconds: float
    """w"""
    footprint: float
    """f of the reservation's form, token-steps."""
    steps: float
    """E[O-1]"""
    prefill_token_seconds: float
    """KV that it holds during its prefill, times its length."""
    memory_usd: float
    """What its idle tokens cost."""
    preemption_usd: float
    """What is left of the worst-case loss: its missing tokens."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Everything the program is built from."""

    candidates: list[Candidate]
    capacities: list[Capacity]
    columns: list[Column]
    rates: NDArray[np.float64]
    """(C,) requests per second."""
    prefix_tokens: NDArray[np.float64]
    """(C,) tokens that a resident prefix pins on each replica."""
    current: Mapping[str, int] = field(default_factory=dict)
    """Replicas that run now, by shape."""
    switching_ratio: float = 0.0
    """Time that a replica takes to start over the time that a plan lasts: what a start costs of its price."""
    keep_replicas: bool = False
    """Ask only for routes: each shape has as many replicas as run now."""
    extra_gpu_price: float | None = None
    """When set, pools may be exceeded, a GPU at this multiple of its price: what would be needed?"""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the program decided."""

    status: SolveStatus
    replicas: NDArray[np.int64]
    """(J,)"""
    fractions: NDArray[np.float64]
    """(K,) fraction of its class that each column carries."""
    unserved: NDArray[np.float64]
    """(C,)"""
    extra_gpus: dict[str, int]
    """GPUs beyond each pool's, by pool, where that was allowed."""
    switching_usd_per_second: float
    objective: float
    """US dollars per second."""
    bound: float
    """No decision for the same instance costs less; US dollars per second."""


@dataclass(slots=True)
class _Built:
    program: Program
    replicas: list[int]
    fractions: list[int]
    unserved: list[int]
    extra: dict[str, int]
    starts: list[int]


def solve(instance: Instance, time_limit_s: float, seed: int = 0) -> Decision | None:
    """The best decision, or None when the time limit came before any. Raises WorkError from the solver."""
    built = _build(instance)
    everything = _with_unserved_limit(built, np.zeros(len(instance.rates)))
    solution = everything.solve(time_limit_s, seed)
    if solution.status == SolveStatus.INFEASIBLE:
        left_s = time_limit_s - solution.seconds
        first = _least_unserved(built, instance).solve(left_s, seed)
        if not first.found:
            return None
        limits = np.clip(first.values[built.unserved] + UNSERVED_TOLERANCE, 0.0, 1.0)
        second = _with_unserved_limit(built, limits).solve(left_s - first.seconds, seed)
        solution = second if second.found else first
    return _decision(built, instance, solution) if solution.found else None


def carried(instance: Instance, decision: Decision) -> NDArray[np.float64]:
    """Requests per second (C, J) of each class on each candidate."""
    rates = np.zeros((len(instance.rates), len(instance.candidates)))
    for column, fraction in zip(instance.columns, decision.fractions, strict=True):
        rates[column.class_index, column.candidate] += fraction * instance.rates[column.class_index]
    return rates


def busy_replicas(instance: Instance, decision: Decision) -> NDArray[np.float64]:
    """Engine seconds per second (J,) that each candidate carries: rho times its replicas."""
    load = np.zeros(len(instance.candidates))
    for column, fraction in zip(instance.columns, decision.fractions, strict=True):
        load[column.candidate] += fraction * instance.rates[column.class_index] * column.engine_seconds
    return load


def _build(instance: Instance) -> _Built:
    program = Program()
    replicas, starts = [], []
    for index, candidate in enumerate(instance.candidates):
        usable = instance.capacities[index].utilisation > 0
        price = candidate.price_usd_per_second + TIE_BREAK_USD_PER_SECOND * index
        replicas.append(program.variable(MOST_REPLICAS if usable else 0, price, integer=True))
        starts.append(program.variable(INFINITY, instance.switching_ratio * candidate.price_usd_per_second))
    fractions = [
        program.variable(1.0, instance.rates[column.class_index] * (column.memory_usd + column.preemption_usd))
        for column in instance.columns
    ]
    unserved = [program.variable(1.0) for _ in instance.rates]
    built = _Built(program, replicas, fractions, unserved, {}, starts)
    _add_class_rows(built, instance)
    _add_candidate_rows(built, instance)
    _add_pool_rows(built, instance)
    _add_start_rows(built, instance)
    return built


def _add_class_rows(built: _Built, instance: Instance) -> None:
    terms: dict[int, dict[int, float]] = defaultdict(dict)
    for variable, column in zip(built.fractions, instance.columns, strict=True):
        terms[column.class_index][variable] = 1.0
    for index, variable in enumerate(built.unserved):
        built.program.row({**terms[index], variable: 1.0}, lower=1.0, upper=1.0)


def _add_candidate_rows(built: _Built, instance: Instance) -> None:
    columns: dict[int, list[tuple[int, Column]]] = defaultdict(list)
    for variable, column in zip(built.fractions, instance.columns, strict=True):
        columns[column.candidate].append((variable, column))
    for index, (candidate, capacity) in enumerate(zip(instance.candidates, instance.capacities, strict=True)):
        n = built.replicas[index]
        room = candidate.kv_tokens / capacity.tail_margin
        load: dict[int, float] = {n: -capacity.utilisation}
        kv: dict[int, float] = {n: -room}
        seqs: dict[int, float] = {n: -float(candidate.max_num_seqs)}
        for variable, column in columns[index]:
            rate = instance.rates[column.class_index]
            load[variable] = rate * column.engine_seconds
            # KV / n = lambda f step / (1 - rho) + lambda prefill, times (1 - rho), which the last term is spared.
            held = capacity.step_s * column.footprint + column.prefill_token_seconds
            kv[variable] = rate * (held + room * column.engine_seconds)
            seqs[variable] = rate * (capacity.step_s * column.steps + candidate.max_num_seqs * column.engine_seconds)
        _add_prefixes(built, instance, columns[index], n, kv, capacity)
        built.program.row(load, upper=0.0)
        built.program.row(kv, upper=0.0)
        built.program.row(seqs, upper=0.0)


def _add_prefixes(
    built: _Built,
    instance: Instance,
    columns: list[tuple[int, Column]],
    n: int,
    kv: dict[int, float],
    capacity: Capacity,
) -> None:
    """A resident prefix pins its tokens on every replica: pinned = v * n by the usual rows."""
    by_class: dict[int, list[int]] = defaultdict(list)
    for variable, column in columns:
        if column.resident:
            by_class[column.class_index].append(variable)
    for class_index, variables in by_class.items():
        resident = built.program.variable(1.0, integer=True)
        pinned = built.program.variable(INFINITY)
        built.program.row({**dict.fromkeys(variables, 1.0), resident: -1.0}, upper=0.0)
        most = float(MOST_REPLICAS)
        built.program.row({n: 1.0, pinned: -1.0, resident: most}, upper=most)
        kv[pinned] = instance.prefix_tokens[class_index] / capacity.tail_margin


def _add_pool_rows(built: _Built, instance: Instance) -> None:
    """GPUs of each pool, packed onto nodes.

    Sizes are powers of two, so a node holds what fits by size alone: for each size t, the GPUs of replicas of at least
    t must fit into the whole multiples of t that the nodes offer.
    """
    for pool in {candidate.pool.name: candidate.pool for candidate in instance.candidates}.values():
        if pool.gpus is None:
            continue
        own = [(built.replicas[i], item) for i, item in enumerate(instance.candidates) if item.pool.name == pool.name]
        extra: dict[int, float] = {}
        if instance.extra_gpu_price is not None:
            price = instance.extra_gpu_price * pool.price_usd_per_hour / 3600
            variable = built.program.variable(float(MOST_REPLICAS), price, integer=True)
            built.extra[pool.name] = variable
            extra = {variable: -1.0}
        for size in sorted({item.tp for _, item in own}):
            taken = {n: float(item.gpus) for n, item in own if item.tp >= size}
            built.program.row({**taken, **extra}, upper=float(size * _slots(pool, pool.gpus, size)))


def _slots(pool: Pool, gpus: int, size: int) -> int:
    whole, rest = divmod(gpus, pool.per_node)
    return whole * (pool.per_node // size) + rest // size


def _add_start_rows(built: _Built, instance: Instance) -> None:
    by_shape: dict[str, list[int]] = defaultdict(list)
    for index, candidate in enumerate(instance.candidates):
        by_shape[candidate.shape].append(index)
    for shape, indices in by_shape.items():
        # One start variable for the shape: what runs already may serve under any tier.
        terms = {built.replicas[index]: 1.0 for index in indices}
        running = float(instance.current.get(shape, 0))
        built.program.row({**terms, built.starts[indices[0]]: -1.0}, upper=running)
        if instance.keep_replicas:
            built.program.row(terms, lower=running, upper=running)


def _with_unserved_limit(built: _Built, limits: NDArray[np.float64]) -> Program:
    upper = list(built.program.upper)
    for variable, limit in zip(built.unserved, limits, strict=True):
        upper[variable] = float(limit)
    return replace(built.program, upper=upper)


def _least_unserved(built: _Built, instance: Instance) -> Program:
    cost = [0.0] * len(built.program.cost)
    for variable, rate in zip(built.unserved, instance.rates, strict=True):
        cost[variable] = float(rate)
    return replace(built.program, cost=cost)


def _decision(built: _Built, instance: Instance, solution: Solution) -> Decision:
    values = solution.values
    fractions = np.clip(values[built.fractions] if built.fractions else np.zeros(0), 0.0, 1.0)
    fractions[fractions < FRACTION_TOLERANCE] = 0.0
    unserved = np.clip(values[built.unserved], 0.0, 1.0)
    unserved[unserved < 10 * UNSERVED_TOLERANCE] = 0.0
    for index in range(len(instance.rates)):
        mine = [k for k, column in enumerate(instance.columns) if column.class_index == index]
        total = fractions[mine].sum()
        if total > 0:
            fractions[mine] *= (1 - unserved[index]) / total
        else:
            unserved[index] = 1.0
    switching = sum(built.program.cost[start] * values[start] for start in built.starts)
    return Decision(
        status=solution.status,
        replicas=np.rint(values[built.replicas]).astype(np.int64),
        fractions=fractions,
        unserved=unserved,
        extra_gpus={pool: round(values[variable]) for pool, variable in built.extra.items()},
        switching_usd_per_second=float(switching),
        objective=solution.objective,
        bound=solution.bound,
    )
