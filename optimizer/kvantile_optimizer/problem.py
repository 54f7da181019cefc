"""From a ServingPlan and its workloads to the program's coefficients.

What a unit of reservation costs and saves is worked out here. Holding a token unused for a request's residence costs
that share of the replica's price (times phi where reservations are pooled); a token too few costs the recomputation
of the request that a preemption throws away, spread over the tokens by which answers overshoot. The critical fractile
is under / (under + over): when GPUs, prompts or the queue change, it moves, and nobody tunes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvantile_optimizer import candidates as shapes
from kvantile_optimizer import geometry, load
from kvantile_optimizer import radius as balls
from kvantile_optimizer.ambiguity import Losses, worst_case_loss
from kvantile_optimizer.candidates import Candidate, Misfit, Pool, Tier
from kvantile_optimizer.hardware import BLOCK_SIZE
from kvantile_optimizer.load import Capacity, Moments
from kvantile_optimizer.plan import Form
from kvantile_optimizer.program import Column
from kvantile_optimizer.reservation import footprint, robust_reservation
from kvantile_optimizer.spec import Geometry, ServingPlan
from kvantile_optimizer.workload import Lengths, Workload

POOLING_FRACTION = 0.1
"""phi where the spec leaves the form to the planner: of 0.05, 0.1 and 0.25 it was within a point of goodput of the best
on prompt-heavy, balanced and output-heavy traffic alike. Choosing it by replay is not there yet."""
LEVEL_FRACTILES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Reservation levels beside the robust one, so that the program can trade reservation against replicas."""
FORMS: dict[str, Form] = {"Auto": "pooled", "Pooled": "pooled", "Held": "held", "None": "none", "Advisory": "pooled"}


@dataclass(frozen=True, slots=True)
class Problem:
    """A ServingPlan with everything looked up. Lists over classes are in the spec's order."""

    serving_plan: ServingPlan
    workloads: list[Workload]
    model: Geometry
    pools: list[Pool]
    candidates: list[Candidate]
    own_tiers: list[Tier]
    parts: list[list[Moments]]
    """Moments of each class: without and with its shared prefix resident."""
    allowed: list[list[int]]
    """Candidates that each class may use."""
    misfits: dict[int, Misfit]
    """The nearest miss of each class that no candidate can serve."""
    radii: list[float]

    @property
    def form(self) -> Form:
        """The execution form of every route."""
        return FORMS[self.serving_plan.spec.engine.reservation]

    @property
    def planned_form(self) -> Form:
        """The form that capacity is planned with: an engine that is only advised reserves nothing."""
        return "none" if self.serving_plan.spec.engine.reservation == "Advisory" else self.form

    @property
    def pooling(self) -> float:
        """phi."""
        return POOLING_FRACTION if self.form == "pooled" else 1.0

    @property
    def rates(self) -> NDArray[np.float64]:
        """(C,) requests per second."""
        return np.array([workload.requests_per_second for workload in self.workloads])


def pose(serving_plan: ServingPlan, workloads: list[Workload]) -> Problem:
    """Looks everything up. Raises InputError for a GPU or model that nobody knows."""
    spec, workloads = serving_plan.spec, balls.borrowed(workloads)
    model = geometry.with_engine_args(geometry.of_model(spec.model), spec.engine.args)
    pools = shapes.pools(spec.node_pools)
    found = shapes.candidates(model, spec.model.max_model_len, pools, shapes.tiers(spec.classes))
    own = [shapes.tier_of(item) for item in spec.classes]
    parts = [_parts(workload, tier.percentile) for workload, tier in zip(workloads, own, strict=True)]
    allowed, misfits = [], {}
    for index, (workload, tier) in enumerate(zip(workloads, own, strict=True)):
        mine, miss = _allowed(found, tier, workload, parts[index][0])
        allowed.append(mine)
        if not mine:
            misfits[index] = miss or _no_memory(model, pools)
    radii = [
        balls.of_class(workload, spec.robustness, item.robustness)
        for workload, item in zip(workloads, spec.classes, strict=True)
    ]
    return Problem(serving_plan, workloads, model, pools, found, own, parts, allowed, misfits, radii)


def _parts(workload: Workload, percentile: int) -> list[Moments]:
    parts = [load.moments(workload, percentile)]
    if workload.prefix_tokens:
        parts.append(load.moments(workload, percentile, resident=True))
    return parts


def _allowed(found: list[Candidate], own: Tier, workload: Workload, part: Moments) -> tuple[list[int], Misfit | None]:
    mine, nearest = [], None
    for index, candidate in enumerate(found):
        if not candidate.tier.serves(own):
            continue
        miss = shapes.misfit(candidate, own, workload, part)
        if miss is None:
            mine.append(index)
        elif nearest is None or miss.excess < nearest.excess:
            nearest = miss
    return mine, nearest


def _no_memory(model: Geometry, pools: list[Pool]) -> Misfit:
    weights_gib = model.parameters_millions * geometry.BYTES[model.dtype] * 1e6 / 2**30
    largest = max(pools, key=lambda pool: pool.gpu.memory_bytes * min(pool.per_node, pool.gpus or pool.per_node))
    gpus = min(largest.per_node, largest.gpus if largest.gpus is not None else largest.per_node)
    have = gpus * largest.gpu.memory_bytes / 2**30
    remedy = f"a pool whose nodes hold {weights_gib:.0f} GiB of weights and some KV cache (the largest: {have:.0f} GiB)"
    return Misfit("weights", remedy, np.inf)


def capacities(problem: Problem, shares: NDArray[np.float64], replicas: NDArray[np.float64]) -> list[Capacity]:
    """What each candidate can take of the mix that it carries.

    `shares` (C, J): the rate of each class on each candidate; where a candidate carries nothing, of all classes that
    may use it. `replicas` (J,): how many share its arrivals.
    """
    result = []
    for j, candidate in enumerate(problem.candidates):
        users = [c for c, mine in enumerate(problem.allowed) if j in mine]
        carried = [c for c in users if shares[c, j] > 0] or users
        weights = shares[:, j] if shares[:, j].sum() > 0 else problem.rates
        if not users:
            result.append(Capacity(0.0, 0.0, 0.0, 1.0))
            continue
        mix = load.mixed([(max(float(weights[c]), 1e-12), problem.parts[c][0]) for c in carried])
        tier = candidate.tier
        result.append(
            load.capacity(
                candidate.step,
                mix,
                min(problem.own_tiers[c].ttft_s for c in carried),
                min(problem.own_tiers[c].tpot_s for c in carried),
                tier.percentile,
                candidate.max_num_batched_tokens,
                candidate.kv_tokens,
                float(replicas[j]),
            )
        )
    return result


def losses(problem: Problem, class_index: int, candidate: Candidate, capacity: Capacity) -> Losses:
    """c_o and c_u of a class on a candidate, US dollars per token."""
    workload, costs = problem.workloads[class_index], problem.serving_plan.spec.costs
    part, lengths = problem.parts[class_index][0], workload.lengths
    price = candidate.price_usd_per_second
    residence_s = part.steps * max(capacity.tpot_s, candidate.step.alpha)
    idle_share = problem.pooling if problem.form == "pooled" else 1.0
    over = float(costs.memory) * idle_share * price * residence_s / candidate.kv_tokens
    recompute_s = candidate.step.delta * (part.prompt + lengths.mean) + candidate.step.alpha
    under = float(costs.preemption) * price * recompute_s / _mean_overshoot(lengths)
    return Losses(over=over, under=under)


def _mean_overshoot(lengths: Lengths) -> float:
    """Tokens by which answers beyond the median exceed it, on average; at least one."""
    median = lengths.quantile(0.5)
    beyond = 1.0 - float(lengths.cdf(median))
    return max(1.0, float(lengths.excess(median)) / beyond) if beyond > 0 else 1.0


def columns(problem: Problem, capacity: list[Capacity]) -> list[Column]:
    """The program's columns, class by class."""
    return [
        column
        for c, mine in enumerate(problem.allowed)
        for j in mine
        if capacity[j].utilisation > 0
        for column in _columns(problem, c, j, losses(problem, c, problem.candidates[j], capacity[j]))
    ]


def _columns(problem: Problem, c: int, j: int, price: Losses) -> list[Column]:
    workload, candidate, radius = problem.workloads[c], problem.candidates[j], problem.radii[c]
    step, levels = candidate.step, _levels(problem, c, price)
    memory_usd, preemption_usd = _level_costs(problem, c, price, levels)
    used = footprint(workload, problem.planned_form, levels, problem.pooling, radius)
    bare = float(footprint(workload, "none", np.zeros(1), 1.0, radius)[0])
    result = []
    for resident, part in enumerate(problem.parts[c]):
        # A resident prefix is pinned once for all: its tokens leave each request's footprint, not its reading time.
        pinned = workload.prefix_tokens * workload.prefix_share * part.steps if resident else 0.0
        # The worst mean in the ball is the radius away, so the steps are robust like the footprint.
        steps = part.steps + radius
        engine_seconds = step.delta * part.prompt + step.beta * steps + step.gamma * bare
        prefill = load.prefill_token_seconds(step, part)
        result += [
            Column(
                class_index=c,
                candidate=j,
                reserve_tokens=int(level),
                resident=bool(resident),
                engine_seconds=engine_seconds,
                footprint=max(float(tokens) - pinned, 0.0),
                steps=steps,
                prefill_token_seconds=prefill,
                memory_usd=float(idle),
                preemption_usd=float(short),
            )
            for level, tokens, idle, short in zip(levels, used, memory_usd, preemption_usd, strict=True)
        ]
    return result


def _level_costs(
    problem: Problem, c: int, price: Losses, levels: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What idle and missing tokens cost a request at each level (R,): the worst-case loss, in its two parts.

    Where nothing is reserved there is nothing to hold against an answer's length, and no cost.
    """
    if problem.form == "none":
        return np.zeros(len(levels)), np.zeros(len(levels))
    lengths = problem.workloads[c].lengths
    worst = worst_case_loss(lengths, price, problem.serving_plan.spec.robustness.order, problem.radii[c], levels)
    idle = price.over * (levels - lengths.mean + lengths.excess(levels))
    return idle, np.maximum(worst - idle, 0.0)


def _levels(problem: Problem, c: int, price: Losses) -> NDArray[np.float64]:
    """Reservations (R,) to choose from, on the block grid: the robust one and quantiles around it."""
    if problem.form == "none":
        return np.zeros(1)
    lengths, order = problem.workloads[c].lengths, problem.serving_plan.spec.robustness.order
    robust = robust_reservation(lengths, price, order, problem.radii[c], BLOCK_SIZE).tokens
    wanted = np.array([robust, *(lengths.quantile(p) for p in LEVEL_FRACTILES)])
    return np.unique(np.ceil(np.minimum(wanted, lengths.upper) / BLOCK_SIZE) * BLOCK_SIZE)
