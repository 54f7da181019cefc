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
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

from kvantile_optimizer.candidates import Candidate, Pool
from kvantile_optimizer.load import Capacity
from kvantile_optimizer.solver import INFINITY, RELATIVE_GAP, Program, Solution, SolveStatus

SPARE = 10.0
"""More times the replicas that carry all classes no plan has, though each pins every resident prefix."""
UNSERVED_TOLERANCE = 1e-7
FRACTION_TOLERANCE = 1e-5
"""Fractions below this are rounding, not routing."""
CHEAPEST = 1e-3
"""Of the dearest pool's price, what a GPU counts for at least where one says how many are missing: as many as one likes
of a pool that costs nothing are no answer."""
TIE_BREAK = 1e-8
"""Of a candidate's price, per place among them: of two equal plans, the one with the earlier candidates."""

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Classes on candidates, each at one reservation level; (K,). Per request: seconds, token-steps, US dollars."""

    class_index: Ints
    candidate: Ints
    reserve_tokens: Counts
    resident: npt.NDArray[np.bool_]
    engine_seconds: Array
    """w"""
    utilisation: Array
    """The most that the candidate takes of this class alone."""
    footprint: Array
    """f of the reservation's form, token-steps."""
    steps: Array
    """E[O-1]"""
    prefill_token_seconds: Array
    """KV that it holds during its prefill, times its length."""
    memory_usd: Array
    """What its idle tokens cost."""
    preemption_usd: Array
    """What is left of the worst-case loss: its missing tokens."""

    def __len__(self) -> int:
        return len(self.class_index)

    def only(self, which: npt.NDArray[np.bool_] | Ints) -> Columns:
        """The columns that `which` picks."""
        return Columns(*(getattr(self, item.name)[which] for item in fields(Columns)))

    def and_also(self, more: Columns) -> Columns:
        """These, then those."""
        return Columns(*(np.concatenate((getattr(self, f.name), getattr(more, f.name))) for f in fields(Columns)))


def no_columns() -> Columns:
    """Not a single one."""
    whole, real = np.zeros(0, np.intp), np.zeros(0)
    return Columns(whole, whole, np.zeros(0, np.int64), np.zeros(0, bool), *[real] * 7)


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """Everything the program is built from. C classes, J candidates, K columns."""

    candidates: list[Candidate]
    capacity: Capacity
    """(J,)"""
    columns: Columns
    rates: Array
    """(C,) requests per second."""
    prefix_tokens: Array
    """(C,) tokens that a resident prefix pins on each replica."""
    correction: Array
    """(J,) what a replica takes of the mix that it gets over what its classes alone would make of it."""
    replayed: Array
    """(J,) what a replica was seen to take in a replay over what all of the closed forms allow."""
    current: Mapping[str, int] = field(default_factory=dict)
    """Replicas that run now, by shape."""
    switching_ratio: float = 0.0
    """Time that a replica takes to start over the time that a plan lasts: what a start costs of its price."""
    keep_replicas: bool = False
    """Ask only for routes: each shape has as many replicas as run now."""
    extra_gpu_price: float | None = None
    """When set, pools may be exceeded, a GPU at this multiple of its price: what would be needed?"""


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What the program decided."""

    status: SolveStatus
    replicas: Counts
    """(J,)"""
    fractions: Array
    """(K,) fraction of its class that each column carries."""
    unserved: Array
    """(C,)"""
    extra_gpus: dict[str, int]
    """GPUs beyond each pool's, by pool, where that was allowed."""
    switching_usd_per_second: float
    objective: float
    """US dollars per second."""
    bound: float
    """No decision for the same instance costs less; US dollars per second."""


@dataclass(slots=True)
class Built:
    """A program and where its parts are."""

    program: Program
    replicas: Ints
    """(J,) variables."""
    starts: Ints
    """(J,) variables; those of a shape's first candidate count."""
    unserved: Ints
    """(C,) variables."""
    fractions: Ints
    """(K,) variables."""
    class_rows: Ints
    """(C,)"""
    candidate_rows: Ints
    """(3, J) engine time, KV and sequences."""
    extra: dict[str, int]


def solve(
    instance: Instance,
    time_limit_s: float,
    seed: int = 0,
    *,
    start: Array | None = None,
    replicas: tuple[Array, Array] | None = None,
    gap: float = RELATIVE_GAP,
    most_nodes: int | None = None,
) -> Decision | None:
    """The best decision, or None when the time limit came before any. Raises WorkError from the solver.

    `start` (J,) are replicas to start from, `replicas` their bounds, (J,) each.
    """
    built = build(instance)
    first = None if start is None else (built.replicas, start)
    least, most = np.zeros(built.program.variable_count), built.program.most
    if replicas is not None:
        least[built.replicas], most[built.replicas] = replicas
    all_served = most.copy()
    all_served[built.unserved] = 0.0

    def run(limits: Array, left_s: float, cost: Array | None = None) -> Solution:
        return built.program.solve(
            left_s, seed, cost=cost, least=least, most=limits, start=first, gap=gap, most_nodes=most_nodes
        )

    solution = run(all_served, time_limit_s)
    if solution.status == SolveStatus.INFEASIBLE:
        left_s = time_limit_s - solution.seconds
        fewest = run(most, left_s, unserved_cost(built, instance))
        if not fewest.found:
            return None
        some_served = most.copy()
        some_served[built.unserved] = np.clip(fewest.values[built.unserved] + UNSERVED_TOLERANCE, 0.0, 1.0)
        second = run(some_served, left_s - fewest.seconds)
        solution = second if second.found else fewest
    return _decision(built, instance, solution) if solution.found else None


def carried(instance: Instance, decision: Decision) -> Array:
    """Requests per second (C, J) of each class on each candidate."""
    columns, J = instance.columns, len(instance.candidates)
    rates = decision.fractions * instance.rates[columns.class_index]
    flat = np.bincount(columns.class_index * J + columns.candidate, rates, len(instance.rates) * J)
    return np.asarray(flat.reshape(len(instance.rates), J))


def corrections(instance: Instance, decision: Decision, utilisation: Array) -> Array:
    """The instance's `correction` (J,) where the decision's mixes let replicas work at `utilisation` (J,); what carries
    nothing keeps its own."""
    columns, J = instance.columns, len(instance.candidates)
    seconds = decision.fractions * instance.rates[columns.class_index] * columns.engine_seconds
    busy = np.bincount(columns.candidate, seconds, J)
    full = np.bincount(columns.candidate, seconds / columns.utilisation, J)
    found = utilisation * full / np.where(busy > 0, busy, 1.0)
    return np.where((busy > 0) & (found > 0), found, instance.correction)


def busy_replicas(instance: Instance, decision: Decision) -> Array:
    """Engine seconds per second (J,) that each candidate carries: rho times its replicas."""
    columns = instance.columns
    seconds = decision.fractions * instance.rates[columns.class_index] * columns.engine_seconds
    return np.asarray(np.bincount(columns.candidate, seconds, len(instance.candidates)))


def build(instance: Instance, *, prefixes: bool = True) -> Built:
    """The program of an instance; without `prefixes` what a resident prefix takes is left out, a relaxation."""
    program, C, J = Program(), len(instance.rates), len(instance.candidates)
    price = np.array([candidate.price_usd_per_second for candidate in instance.candidates])
    replicas = program.variables(J, most_replicas(instance), price * (1 + TIE_BREAK * np.arange(J)), integer=True)
    starts = program.variables(J, INFINITY, instance.switching_ratio * price)
    unserved = program.variables(C, 1.0)
    class_rows = program.rows(C, 1.0, 1.0)
    program.entries(class_rows, unserved, 1.0)
    candidate_rows = program.rows(3 * J, upper=0.0).reshape(3, J)
    program.entries(candidate_rows, replicas, -1.0)
    built = Built(program, replicas, starts, unserved, np.zeros(0, np.intp), class_rows, candidate_rows, {})
    _add_pool_rows(built, instance)
    _add_start_rows(built, instance)
    columns = instance.columns
    built.fractions = program.variables(len(columns), 1.0, column_costs(instance, columns))
    program.entries(class_rows[columns.class_index], built.fractions, 1.0)
    program.entries(candidate_rows[:, columns.candidate], built.fractions, uses(instance, columns))
    if prefixes:
        _add_prefixes(built, instance)
    return built


def rooms(instance: Instance) -> Array:
    """(2, J) KV tokens over the tail margin, and sequences, of one replica."""
    kv = np.array([candidate.kv_tokens for candidate in instance.candidates], float)
    seqs = np.array([candidate.max_num_seqs for candidate in instance.candidates], float)
    return np.array([kv / instance.capacity.tail_margin, seqs]).reshape(2, len(kv))


def uses(instance: Instance, columns: Columns) -> Array:
    """(3, K) replicas that each column takes in its candidate's three rows if its whole class is on it.

    Of engine time a class takes its part of what a replica would do of it alone: a harmonic mean over the mix,
    corrected for what the mix is found to do. KV / n = lambda f step / (1 - rho) + lambda prefill, times (1 - rho),
    which the last term is spared; over what a replica has room for, as the sequences are.
    """
    rate, j = instance.rates[columns.class_index], columns.candidate
    room, seqs = rooms(instance)[:, j]
    step_s = instance.capacity.step_s[j]
    held = step_s * columns.footprint + columns.prefill_token_seconds
    replicas = np.array(
        [
            rate * columns.engine_seconds / (columns.utilisation * instance.correction[j]),
            rate * (held / room + columns.engine_seconds),
            rate * (step_s * columns.steps / seqs + columns.engine_seconds),
        ]
    )
    return np.asarray(replicas / instance.replayed[j])


def column_costs(instance: Instance, columns: Columns) -> Array:
    """(K,) US dollars per second if its whole class is on it."""
    return np.asarray(instance.rates[columns.class_index] * (columns.memory_usd + columns.preemption_usd))


def most_replicas(instance: Instance) -> Array:
    """(J,) more than this no plan has: what the pool holds, or SPARE times what carries all classes, or what runs."""
    columns, J = instance.columns, len(instance.candidates)
    pair, place = np.unique(columns.class_index * J + columns.candidate, return_inverse=True)
    whole = np.zeros(len(pair))
    np.maximum.at(whole, place, uses(instance, columns).max(axis=0))
    needed = SPARE * np.ceil(np.bincount(pair % J, whole, J)) + 1
    most = np.maximum(needed, [instance.current.get(candidate.shape, 0) for candidate in instance.candidates])
    if instance.extra_gpu_price is not None:
        return np.asarray(most)
    held = [c.pool.gpus // c.gpus if c.pool.gpus is not None else INFINITY for c in instance.candidates]
    return np.minimum(most, held)


def _add_prefixes(built: Built, instance: Instance) -> None:
    """A resident prefix pins its tokens on every replica: pinned = v * n by the usual rows."""
    columns = instance.columns
    which = np.flatnonzero(columns.resident)
    if not len(which):
        return
    J, most = len(instance.candidates), most_replicas(instance)
    pairs, index = np.unique(columns.class_index[which] * J + columns.candidate[which], return_inverse=True)
    c, j = np.divmod(pairs, J)
    program = built.program
    resident = program.variables(len(pairs), 1.0, integer=True)
    pinned = program.variables(len(pairs), INFINITY)
    opened = program.rows(len(pairs), upper=0.0)
    program.entries(opened[index], built.fractions[which], 1.0)
    program.entries(opened, resident, -1.0)
    product = program.rows(len(pairs), upper=most[j])
    program.entries(product, built.replicas[j], 1.0)
    program.entries(product, pinned, -1.0)
    program.entries(product, resident, most[j])
    kv_tokens = np.array([instance.candidates[index].kv_tokens for index in j], float)
    program.entries(built.candidate_rows[1, j], pinned, instance.prefix_tokens[c] / kv_tokens)


def pinned_share(instance: Instance, decision: Decision) -> Array:
    """(J,) the part of each replica's KV that resident prefixes take, those of the columns that carry something."""
    columns, J = instance.columns, len(instance.candidates)
    which = np.flatnonzero(columns.resident & (decision.fractions > 0))
    c, j = np.divmod(np.unique(columns.class_index[which] * J + columns.candidate[which]), J)
    kv_tokens = np.array([candidate.kv_tokens for candidate in instance.candidates], float)
    return np.asarray(np.bincount(j, instance.prefix_tokens[c] / kv_tokens[j], J))


def with_replicas(instance: Instance, decision: Decision, replicas: Counts) -> Decision:
    """The same routes on other numbers of replicas (J,), and what that costs."""
    price = np.array([candidate.price_usd_per_second for candidate in instance.candidates])
    counts: dict[str, int] = defaultdict(int)
    for candidate, count in zip(instance.candidates, replicas.tolist(), strict=True):
        counts[candidate.shape] += count
    prices = {candidate.shape: candidate.price_usd_per_second for candidate in instance.candidates}
    starts = sum(max(0, n - instance.current.get(shape, 0)) * prices[shape] for shape, n in counts.items())
    switching = instance.switching_ratio * starts
    objective = replicas @ price + column_costs(instance, instance.columns) @ decision.fractions + switching
    return replace(decision, replicas=replicas, switching_usd_per_second=switching, objective=float(objective))


def fits(instance: Instance, replicas: Counts) -> bool:
    """Whether the pools' nodes hold `replicas` (J,)."""
    return all(
        sum(candidate.gpus * count for candidate, count in members if candidate.tp >= size)
        <= size * _slots(pool, pool.gpus, size)
        for pool, members in _members(instance, replicas)
        if pool.gpus is not None
        for size in {candidate.tp for candidate, _ in members}
    )


def _members(instance: Instance, replicas: Counts) -> list[tuple[Pool, list[tuple[Candidate, int]]]]:
    members: dict[str, list[tuple[Candidate, int]]] = defaultdict(list)
    for candidate, count in zip(instance.candidates, replicas.tolist(), strict=True):
        members[candidate.pool.name].append((candidate, count))
    return [(own[0][0].pool, own) for own in members.values()]


def _add_pool_rows(built: Built, instance: Instance) -> None:
    """GPUs of each pool, packed onto nodes.

    Sizes are powers of two, so a node holds what fits by size alone: for each size t, the GPUs of replicas of at least
    t must fit into the whole multiples of t that the nodes offer.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for index, candidate in enumerate(instance.candidates):
        members[candidate.pool.name].append(index)
    dearest = max((candidate.pool.price_usd_per_hour for candidate in instance.candidates), default=0.0)
    for name, own in members.items():
        pool = instance.candidates[own[0]].pool
        if pool.gpus is None:
            continue
        if instance.extra_gpu_price is not None:
            price = instance.extra_gpu_price * max(pool.price_usd_per_hour, CHEAPEST * dearest) / 3600
            built.extra[name] = built.program.variable(INFINITY, price, integer=True)
        for size in sorted({instance.candidates[j].tp for j in own}):
            row = built.program.rows(1, upper=float(size * _slots(pool, pool.gpus, size)))
            wide = [j for j in own if instance.candidates[j].tp >= size]
            built.program.entries(row, built.replicas[wide], [instance.candidates[j].gpus for j in wide])
            if name in built.extra:
                built.program.entries(row, built.extra[name], -1.0)


def _slots(pool: Pool, gpus: int, size: int) -> int:
    whole, rest = divmod(gpus, pool.per_node)
    return whole * (pool.per_node // size) + rest // size


def _add_start_rows(built: Built, instance: Instance) -> None:
    if not instance.current and not instance.keep_replicas:
        return
    by_shape: dict[str, list[int]] = defaultdict(list)
    for index, candidate in enumerate(instance.candidates):
        by_shape[candidate.shape].append(index)
    for shape, indices in by_shape.items():
        # One start variable for the shape: what runs already may serve under any tier.
        running = float(instance.current.get(shape, 0))
        lower = running if instance.keep_replicas else -INFINITY
        row = built.program.rows(1, lower=lower, upper=running)
        built.program.entries(row, built.replicas[indices], 1.0)
        if not instance.keep_replicas:
            built.program.entries(row, built.starts[indices[0]], -1.0)


def unserved_cost(built: Built, instance: Instance) -> Array:
    """Costs of the variables that count unserved requests per second, and nothing else."""
    cost = np.zeros(built.program.variable_count)
    cost[built.unserved] = instance.rates
    return cost


def _decision(built: Built, instance: Instance, solution: Solution) -> Decision:
    values = solution.values
    unserved = np.clip(values[built.unserved], 0.0, 1.0)
    unserved[unserved < 10 * UNSERVED_TOLERANCE] = 0.0
    replicas = np.rint(values[built.replicas]).astype(np.int64)
    # What a candidate without replicas has is within the solver's tolerance, not a route.
    carried = np.where(replicas[instance.columns.candidate] > 0, values[built.fractions], 0.0)
    fractions, unserved = tidy(instance, carried, unserved)
    return Decision(
        status=solution.status,
        replicas=replicas,
        fractions=fractions,
        unserved=unserved,
        extra_gpus={pool: round(values[variable]) for pool, variable in built.extra.items()},
        switching_usd_per_second=float(built.program.cost[built.starts] @ values[built.starts]),
        objective=solution.objective,
        bound=solution.bound,
    )


def tidy(instance: Instance, values: Array, unserved: Array) -> tuple[Array, Array]:
    """Fractions without rounding errors, which sum to what is not `unserved`; a class without any is all unserved."""
    fractions = np.clip(values, 0.0, 1.0)
    fractions[fractions < FRACTION_TOLERANCE] = 0.0
    index = instance.columns.class_index
    total = np.bincount(index, fractions, len(instance.rates))
    unserved = np.where(total > 0, unserved, 1.0)
    scale = (1 - unserved) / np.where(total > 0, total, 1.0)
    return fractions * scale[index], unserved
