"""What a class costs on a candidate: the columns of the joint program, a whole table at a time.

Holding a token unused for a request's residence costs that share of the replica's price (times phi where reservations
are pooled); a token too few costs the recomputation of the request that a preemption throws away, spread over the
tokens by which answers overshoot. The critical fractile is under / (under + over): when GPUs, prompts or the queue
change, it moves, and nobody tunes it.

A worst-case loss scales with its prices, so for each class it is worked out once for a few ratios under / over and each
of its reservation levels, and joined linearly in between: exact where the radius is 0 (the loss is linear in the
ratio), and never below the truth elsewhere (it is convex in the ratio, as a supremum of linear functions).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvantile_optimizer.ambiguity import Losses, Order, worst_case_loss
from kvantile_optimizer.hardware import BLOCK_SIZE
from kvantile_optimizer.load import Capacity
from kvantile_optimizer.plan import Form
from kvantile_optimizer.problem import Problem, alone, capacities, first_guess
from kvantile_optimizer.program import Columns, Instance, no_columns
from kvantile_optimizer.reservation import footprint, robust_reservation
from kvantile_optimizer.workload import Array, Lengths

LEVEL_FRACTILES = (0.3, 0.5, 0.65, 0.75, 0.85, 0.9, 0.95, 0.98, 1.0)
"""Reservation levels beside the robust one, so that the program can trade reservation against replicas."""
RATIO_NODES = 7
"""Ratios under / over at which worst-case losses are worked out. They span a factor of ten or so: neighbours are half
as large again, and the loss in between comes out less than a percent high."""

Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """What does not depend on how loaded the candidates are. R levels, the last ones repeated where there are fewer."""

    levels: Array
    """(C, R) reservations on the block grid, tokens, ascending."""
    counts: Ints
    """(C,) how many of them are distinct."""
    idle: Array
    """(C, R) E[(r - O)^+], tokens."""
    footprint: Array
    """(C, R) robust token-steps of a request in the planned form."""
    bare: Array
    """(C,) the same with nothing reserved."""
    steps: Array
    """(C,) robust E[O-1]: the worst mean in the ball is the radius away, as far as there is room."""
    pinned: Array
    """(C,) token-steps that leave a request's footprint when the shared prefix is resident."""
    prompt: Array
    """(2, C) E[I] to compute: without and with the prefix resident."""
    prompt_squared: Array
    """(2, C)"""
    ratios: Array
    """(C, RATIO_NODES) under / over."""
    worst: Array
    """(C, RATIO_NODES, R) worst-case loss over the price of an idle token, tokens."""
    overshoot: Array
    """(C,) tokens by which answers beyond the median exceed it, on average; at least one."""
    mean: Array
    """(C,) E[O]"""
    residents: Ints
    """(C,) 2 where a prefix may be resident, else 1."""
    alone: Array
    """(C, J) the most utilisation of each candidate if it carried the class alone; zero where it may not."""


def tables(problem: Problem) -> Tables:
    """The tables of a problem; the costly part of posing one where radii are not 0."""
    lengths = [workload.lengths for workload in problem.workloads]
    mean, overshoot = np.array([item.mean for item in lengths]), np.array([_mean_overshoot(item) for item in lengths])
    bounds = _ratio_bounds(problem, mean, overshoot)
    ratios = np.geomspace(bounds[:, 0], bounds[:, 1], RATIO_NODES, axis=1)
    own = [_of_class(problem, c, row) for c, row in enumerate(ratios)]
    R = max(len(item.levels) for item in own)
    parts = [[item[0], item[-1]] for item in problem.parts]

    def padded(name: str) -> Array:
        """(C, ..., R) a figure of each level, the last one repeated where a class has fewer."""
        rows = [getattr(item, name) for item in own]
        return np.array([row[..., np.minimum(np.arange(R), row.shape[-1] - 1)] for row in rows])

    return Tables(
        levels=padded("levels"),
        counts=np.array([len(item.levels) for item in own]),
        idle=padded("idle"),
        footprint=padded("footprint"),
        bare=np.array([item.bare for item in own]),
        steps=np.minimum(np.array([item[0].steps for item in problem.parts]) + problem.radii, _most_steps(problem)),
        pinned=np.array(
            [
                workload.prefix_tokens * workload.prefix_share * item[0].steps
                for workload, item in zip(problem.workloads, problem.parts, strict=True)
            ]
        ),
        prompt=np.array([[part.prompt for part in pair] for pair in parts]).T,
        prompt_squared=np.array([[part.prompt_squared for part in pair] for pair in parts]).T,
        ratios=ratios,
        worst=padded("worst"),
        overshoot=overshoot,
        mean=mean,
        residents=np.array([len(item) for item in problem.parts]),
        alone=alone(problem, first_guess(problem)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _OfClass:
    """A class's own rows of the tables."""

    levels: Array
    """(R,)"""
    idle: Array
    """(R,)"""
    footprint: Array
    """(R,)"""
    bare: float
    worst: Array
    """(RATIO_NODES, R)"""


def _of_class(problem: Problem, c: int, ratios: Array) -> _OfClass:
    """The rows of class `c` at its `ratios` (RATIO_NODES,), worked out once for plans that ask the same of it."""
    workload, order, radius = problem.workloads[c], problem.serving_plan.spec.robustness.order, problem.radii[c]
    form, planned_form, phi = problem.form, problem.planned_form, problem.pooling

    def worked_out() -> _OfClass:
        lengths = workload.lengths
        levels = _levels(form, lengths, ratios, order, radius)
        return _OfClass(
            levels=levels,
            idle=levels - lengths.mean + lengths.excess(levels),
            footprint=footprint(workload, planned_form, levels, phi, radius),
            bare=float(footprint(workload, "none", np.zeros(1), 1.0, radius)[0]),
            worst=_worst(form, lengths, levels, ratios, order, radius),
        )

    return workload.once((_OfClass, form, planned_form, phi, order, radius, ratios.tobytes()), worked_out)


def _most_steps(problem: Problem) -> Array:
    """(C,) E[O-1] if every answer were as long as it can be."""
    most = np.array([workload.expect(workload.longest - 1) for workload in problem.workloads])
    return np.asarray(np.maximum(most, [float(item[0].steps) for item in problem.parts]))


def _mean_overshoot(lengths: Lengths) -> float:
    median = lengths.quantile(0.5)
    beyond = 1.0 - float(lengths.cdf(median))
    return max(1.0, float(lengths.excess(median)) / beyond) if beyond > 0 else 1.0


def _ratio_bounds(problem: Problem, mean: Array, overshoot: Array) -> Array:
    """The least and the largest under / over (C, 2) of any candidate at any load: residence is shortest on an idle
    replica and longest at the tier's target."""
    result = np.ones((len(mean), 2))
    if not problem.candidates:
        return result
    slowest = np.array([candidate.tier.tpot_s for candidate in problem.candidates])
    fastest = np.minimum(problem.steps.alpha, slowest)
    for c in range(len(mean)):
        mine = np.flatnonzero(problem.allowed[c])
        if len(mine):
            at = np.full(len(mine), c)
            least = _ratio(problem, mean, overshoot, at, mine, slowest[mine])
            most = _ratio(problem, mean, overshoot, at, mine, fastest[mine])
            result[c] = least.min(), max(most.max(), least.min() * 1.001)
    return result


def _ratio(problem: Problem, mean: Array, overshoot: Array, c: Ints, j: Ints, tpot_s: Array) -> Array:
    over, under = _prices(problem, mean, overshoot, c, j, tpot_s)
    return np.asarray(under / over)


def _prices(problem: Problem, mean: Array, overshoot: Array, c: Ints, j: Ints, tpot_s: Array) -> tuple[Array, Array]:
    """c_o and c_u, US dollars per token, of the pairs of class `c` (P,) and candidate `j` (P,)."""
    costs, step, sizes, part = problem.serving_plan.spec.costs, problem.steps, problem.sizes, problem.moments
    price = sizes.price_usd_per_second[j]
    residence_s = np.asarray(part.steps)[c] * np.maximum(tpot_s, step.alpha[j])
    idle_share = problem.pooling if problem.form == "pooled" else 1.0
    over = float(costs.memory) * idle_share * price * residence_s / sizes.kv_tokens[j]
    recompute_s = step.delta[j] * (np.asarray(part.prompt)[c] + mean[c]) + step.alpha[j]
    under = float(costs.preemption) * price * recompute_s / overshoot[c]
    tiny = np.finfo(float).tiny ** 0.5
    return np.maximum(over, tiny), np.maximum(under, tiny)


def _levels(form: Form, lengths: Lengths, ratios: Array, order: Order, radius: float) -> Array:
    """Reservations (R,) to choose from, on the block grid: the robust one at a middling price and quantiles around."""
    if form == "none":
        return np.zeros(1)
    middle = Losses(1.0, float(ratios[len(ratios) // 2]))
    robust = robust_reservation(lengths, middle, order, radius, BLOCK_SIZE).tokens
    wanted = np.array([robust, *(lengths.quantile(p) for p in LEVEL_FRACTILES)])
    return np.unique(np.ceil(np.minimum(wanted, lengths.upper) / BLOCK_SIZE) * BLOCK_SIZE)


def _worst(form: Form, lengths: Lengths, levels: Array, ratios: Array, order: Order, radius: float) -> Array:
    """(RATIO_NODES, R)"""
    if form == "none":
        return np.zeros((len(ratios), len(levels)))
    if radius == 0:
        # Linear in the ratio: one pass for all of them.
        excess = lengths.excess(levels)
        return np.asarray(levels - lengths.mean + excess + ratios[:, None] * excess)
    return np.array([worst_case_loss(lengths, Losses(1.0, ratio), order, radius, levels) for ratio in ratios.tolist()])


def losses(problem: Problem, table: Tables, capacity: Capacity, c: int, j: int) -> Losses:
    """c_o and c_u of a class on a candidate, US dollars per token."""
    at = np.array([c]), np.array([j])
    over, under = _prices(problem, table.mean, table.overshoot, *at, capacity.tpot_s[at[1]])
    return Losses(float(over[0]), float(under[0]))


def columns(problem: Problem, table: Tables, capacity: Capacity, c: Ints, j: Ints) -> Columns:
    """The columns of the pairs of class `c` (P,) and candidate `j` (P,): every level, with and without the prefix."""
    R = table.levels.shape[1]
    grid = np.broadcast_to(np.arange(R), (len(c), 2, R)), np.broadcast_to(np.arange(2)[:, None], (len(c), 2, R))
    exists = (grid[0] < table.counts[c, None, None]) & (grid[1] < table.residents[c, None, None])
    pair, resident, level = np.nonzero(exists)
    memory_usd, preemption_usd = level_costs(problem, table, capacity, c, j)
    c, j, step = c[pair], j[pair], problem.steps
    bare, steps = table.bare[c], table.steps[c]
    prompt, prompt_squared = table.prompt[resident, c], table.prompt_squared[resident, c]
    return Columns(
        class_index=c,
        candidate=j,
        reserve_tokens=table.levels[c, level].astype(np.int64),
        resident=resident.astype(bool),
        engine_seconds=step.delta[j] * prompt + step.beta[j] * steps + step.gamma[j] * bare,
        utilisation=table.alone[c, j],
        footprint=np.maximum(table.footprint[c, level] - resident * table.pinned[c], 0.0),
        steps=steps,
        prefill_token_seconds=(step.delta[j] * prompt_squared + step.alpha[j] * prompt) / 2,
        memory_usd=memory_usd[pair, level],
        preemption_usd=preemption_usd[pair, level],
    )


def level_costs(problem: Problem, table: Tables, capacity: Capacity, c: Ints, j: Ints) -> tuple[Array, Array]:
    """What idle and missing tokens cost a request at each level (P, R): the worst-case loss, in its two parts.

    Where nothing is reserved there is nothing to hold against an answer's length, and no cost.
    """
    if problem.form == "none":
        nothing = np.zeros((len(c), table.levels.shape[1]))
        return nothing, nothing
    over, under = _prices(problem, table.mean, table.overshoot, c, j, capacity.tpot_s[j])
    nodes, ratio = table.ratios[c], np.clip(under / over, table.ratios[c, 0], table.ratios[c, -1])
    right = np.clip((nodes < ratio[:, None]).sum(axis=1), 1, RATIO_NODES - 1)
    at = np.arange(len(c))
    low, high = nodes[at, right - 1], nodes[at, right]
    share = ((ratio - low) / (high - low))[:, None]
    worst = (1 - share) * table.worst[c, right - 1] + share * table.worst[c, right]
    idle = over[:, None] * table.idle[c]
    return idle, np.maximum(over[:, None] * worst - idle, 0.0)


def every_pair(table: Tables) -> tuple[Ints, Ints]:
    """Class and candidate (P,) of all pairs that may be used, class by class."""
    c, j = np.nonzero(table.alone)
    return c, j


def first_instance(problem: Problem) -> Instance:
    """The program as it is posed first: what candidates take by the first guess, and no columns yet."""
    ones = np.ones(len(problem.candidates))
    return Instance(
        candidates=problem.candidates,
        capacity=capacities(problem, np.zeros(problem.allowed.shape), first_guess(problem)),
        columns=no_columns(),
        rates=problem.rates,
        prefix_tokens=np.array([float(workload.prefix_tokens) for workload in problem.workloads]),
        correction=ones,
        replayed=ones,
    )


def with_every_column(problem: Problem, table: Tables, instance: Instance) -> Instance:
    """The instance with all columns that there are."""
    return replace(instance, columns=columns(problem, table, instance.capacity, *every_pair(table)))
