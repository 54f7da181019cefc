"""A ServingPlan with everything looked up: candidates, the moments of each class, and who may run where.

Whatever does not depend on the answer is worked out once, here; what does (how much a replica can take of the mix it
gets) is `capacities`, which the planner calls again for each answer. The largest step and the most sequences of a
candidate are chosen here too, by the closed forms: the step that sustains most, and as many sequences as it then runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvantile_optimizer import candidates as shapes
from kvantile_optimizer import geometry, hardware, load
from kvantile_optimizer import radius as balls
from kvantile_optimizer.candidates import Candidate, Misfit, Pool, Tier
from kvantile_optimizer.load import Capacity, Moments, StepArrays
from kvantile_optimizer.plan import Form, Group, Plan
from kvantile_optimizer.spec import Geometry, ServingPlan
from kvantile_optimizer.workload import Array, Workload

POOLING_FRACTION = 0.1
"""phi before a replay has chosen one: of 0.05, 0.1 and 0.25 it was within a point of goodput of the best on
prompt-heavy, balanced and output-heavy traffic alike."""
FORMS: dict[str, Form] = {"Auto": "pooled", "Pooled": "pooled", "Held": "held", "None": "none", "Advisory": "pooled"}
_CHUNK = 1 << 20
"""Pairs of a class and a candidate that are worked on at once: 8 MB an array."""

_PAIRS = 1 << 16
"""Pairs whose capacity is worked out at once, so that the arrays stay in the processor's cache."""
LEAST_LOAD = 1e-4
"""Of a replica, that each class is taken to need: a hundred times what the solver takes for nothing, so that a class of
a request a day has a replica too; ten thousand of them would fill one."""
KEPT_LOSS = 0.05
"""Share of what a replica sustains that is not worth restarting it with other sizes."""
_SILENT = 1e-12
"""Requests per second of a class that fits nowhere, so that its lengths still count where it is alone."""

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Problem:
    """What there is to decide. Arrays over classes are in the spec's order, (C,), those over candidates (J,)."""

    serving_plan: ServingPlan
    workloads: list[Workload]
    model: Geometry
    pools: list[Pool]
    candidates: list[Candidate]
    own_tiers: list[Tier]
    parts: list[list[Moments]]
    """Moments of each class: without and with its shared prefix resident."""
    allowed: Bools
    """(C, J) whether the class may use the candidate."""
    misfits: dict[int, Misfit]
    """The nearest miss of each class that no candidate can serve."""
    radii: list[float]
    running: tuple[Group, ...] = ()
    """The groups of the plan that runs."""

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

    @cached_property
    def rates(self) -> Array:
        """(C,) requests per second, at least as many as take LEAST_LOAD of a replica wherever the class may go."""
        rates = np.array([workload.requests_per_second for workload in self.workloads])
        if not self.candidates:
            return rates
        part, step = self.moments, self.steps
        seconds = np.array([part.prompt, part.steps, part.footprint]).T @ np.array([step.delta, step.beta, step.gamma])
        least = np.where(self.allowed, seconds, np.inf).min(axis=1)
        return np.asarray(np.maximum(rates, np.where(np.isfinite(least), LEAST_LOAD / least, 0.0)))

    @cached_property
    def moments(self) -> Moments:
        """(C,) with no prefix resident."""
        return load.stacked([parts[0] for parts in self.parts])

    @cached_property
    def steps(self) -> StepArrays:
        """(J,)"""
        return StepArrays.of([candidate.step for candidate in self.candidates])

    @cached_property
    def sizes(self) -> Sizes:
        """(J,)"""
        return Sizes.of(self.candidates)

    @cached_property
    def targets(self) -> Array:
        """(2, C) TTFT and TPOT targets, seconds."""
        return np.array([[tier.ttft_s, tier.tpot_s] for tier in self.own_tiers]).T


@dataclass(frozen=True, slots=True)
class Sizes:
    """Figures of the candidates side by side, (J,)."""

    kv_tokens: Array
    max_num_seqs: Array
    max_num_batched_tokens: Array
    price_usd_per_second: Array
    gpus: Array
    percentile: Array

    @classmethod
    def of(cls, candidates: list[Candidate]) -> Sizes:
        """Of each candidate in order."""

        def figures(name: str) -> Array:
            return np.array([getattr(candidate, name) for candidate in candidates], float)

        return cls(
            figures("kv_tokens"),
            figures("max_num_seqs"),
            figures("max_num_batched_tokens"),
            figures("price_usd_per_second"),
            figures("gpus"),
            np.array([candidate.tier.percentile for candidate in candidates], float),
        )


def pose(serving_plan: ServingPlan, workloads: list[Workload], current: Plan | None = None) -> Problem:
    """Looks everything up; `workloads` are one for each class, `current` is the plan that runs.

    Raises InputError for an unknown GPU or model.
    """
    spec, workloads = serving_plan.spec, balls.borrowed(workloads)
    model = geometry.with_engine_args(geometry.of_model(spec.model), spec.engine.args)
    pools = shapes.pools(spec.node_pools, geometry.forced_kv_tokens(spec.engine.args, hardware.BLOCK_SIZE))
    own = [shapes.tier_of(item) for item in spec.classes]
    parts = [_parts(workload, tier.percentile) for workload, tier in zip(workloads, own, strict=True)]
    radii = [
        balls.of_class(workload, spec.robustness, item.robustness)
        for workload, item in zip(workloads, spec.classes, strict=True)
    ]
    variants = shapes.candidates(model, spec.model.max_model_len, pools, shapes.tiers(spec.classes))
    running = tuple(current.groups) if current is not None else ()
    posed = _with_allowed(
        Problem(serving_plan, workloads, model, pools, variants, own, parts, _NONE, {}, radii, running)
    )
    sized = _with_allowed(replace(posed, candidates=_sized(posed)))
    return replace(sized, misfits=_misfits(sized))


_NONE: Bools = np.zeros((0, 0), bool)


def _parts(workload: Workload, percentile: int) -> list[Moments]:
    def looked_up() -> list[Moments]:
        residents = (False, True) if workload.prefix_tokens else (False,)
        return [load.moments(workload, percentile, resident=resident) for resident in residents]

    return workload.once((Moments, percentile), looked_up)


def _with_allowed(problem: Problem) -> Problem:
    """The problem with who may run where (C, J)."""
    serves = {
        tier: np.array([tier.serves(own) for own in problem.own_tiers])
        for tier in {candidate.tier for candidate in problem.candidates}
    }
    shape = len(problem.workloads), len(problem.candidates)
    allowed = np.array([serves[candidate.tier] for candidate in problem.candidates], bool).reshape(shape[::-1]).T.copy()
    for rows in _chunks(problem):
        allowed[rows] &= (_excess(problem, rows) <= 0).all(axis=0)
    return replace(problem, allowed=allowed)


def _chunks(problem: Problem) -> list[slice]:
    """Slices of classes whose pairs with all candidates are worked on at once."""
    count, step = len(problem.workloads), max(1, _CHUNK // max(1, len(problem.candidates)))
    return [slice(start, start + step) for start in range(0, count, step)]


def _excess(problem: Problem, rows: slice) -> Array:
    """By how much (3, C', J) the classes `rows` miss each candidate however lightly loaded: KV, TPOT and TTFT.

    As `candidates.misfit` for all pairs at once; above zero where the class does not fit.
    """
    step, sizes, part = problem.steps, problem.sizes, problem.moments
    longest = np.array(
        [min(item.prompt.max() + item.upper, item.max_model_len) for item in problem.workloads[rows]], float
    )
    ttft_s, tpot_s = problem.targets[:, rows, None]
    prompt_p, context = np.asarray(part.prompt_p)[rows, None], np.asarray(part.context)[rows, None]
    floor = step.alpha + step.beta + step.gamma * context
    prefill = prompt_p * step.delta + np.ceil(prompt_p / sizes.max_num_batched_tokens) * step.alpha
    tiny = np.finfo(float).tiny
    return np.array(
        [
            np.floor(longest)[:, None] / sizes.kv_tokens - 1,
            np.where(floor >= tpot_s, np.maximum(floor / tpot_s - 1, tiny), 0.0),
            np.where(prefill + floor >= ttft_s, np.maximum((prefill + floor) / ttft_s - 1, tiny), 0.0),
        ]
    )


def _misfits(problem: Problem) -> dict[int, Misfit]:
    """The nearest miss of each class that fits nowhere: of the first row that each candidate breaks, the least."""
    misfits = {}
    for c in np.flatnonzero(~problem.allowed.any(axis=1)):
        own = problem.own_tiers[c]
        serving = [j for j, candidate in enumerate(problem.candidates) if candidate.tier.serves(own)]
        if not serving:
            misfits[int(c)] = _no_memory(problem.model, problem.pools)
            continue
        excess = _excess(problem, slice(c, c + 1))[:, 0, serving]
        first = (excess > 0).argmax(axis=0)
        nearest = serving[int(np.argmin(np.take_along_axis(excess, first[None], axis=0)[0]))]
        miss = shapes.misfit(problem.candidates[nearest], own, problem.workloads[c], problem.parts[c][0])
        misfits[int(c)] = miss or _no_memory(problem.model, problem.pools)
    return misfits


def _no_memory(model: Geometry, pools: list[Pool]) -> Misfit:
    weights_gib = hardware.weight_bytes(model) / 2**30
    largest = max(pools, key=lambda pool: pool.gpu.memory_bytes * min(pool.per_node, pool.gpus or pool.per_node))
    gpus = min(largest.per_node, largest.gpus or largest.per_node)
    have = gpus * largest.gpu.memory_bytes / 2**30
    remedy = f"a pool whose nodes hold {weights_gib:.0f} GiB of weights and some KV cache (the largest: {have:.0f} GiB)"
    return Misfit("weights", remedy, np.inf)


def _sized(problem: Problem) -> list[Candidate]:
    """One candidate for each shape and tier: the step size that sustains the most of all its classes together.

    Larger steps compute prompts with fewer stops and make decoding wait longer for each; they also take memory. Of
    equals the larger step. max_num_seqs is the power of two above what then decodes at once at P99. Engines of the
    shape that run keep their sizes while these sustain nearly as much: other ones mean a restart of each.
    """
    if not problem.candidates:
        return []
    found = capacities(problem, np.zeros((len(problem.workloads), len(problem.candidates))), first_guess(problem))
    rivals: dict[tuple[str, Tier], list[int]] = {}
    for j, candidate in enumerate(problem.candidates):
        rivals.setdefault((candidate.shape, candidate.tier), []).append(j)
    longest, sized = problem.serving_plan.spec.model.max_model_len, []
    for (shape, _), own in rivals.items():
        best = max(own, key=lambda k: (found.sustained[k], problem.candidates[k].max_num_batched_tokens))
        j, seqs = best, _seqs(float(found.batch_p99[best]))
        for group in problem.running:
            if shapes.shape_of(group) != shape:
                continue
            for k in own:
                enough = found.sustained[k] >= (1 - KEPT_LOSS) * found.sustained[best]
                same = problem.candidates[k].max_num_batched_tokens == group.max_num_batched_tokens
                if same and enough and group.max_num_seqs >= found.batch_p99[k]:
                    j, seqs = k, group.max_num_seqs
        sized.append(shapes.with_seqs(problem.candidates[j], problem.model, longest, seqs))
    return sized


def _seqs(batch_p99: float) -> int:
    wanted: int = 2 ** math.ceil(math.log2(max(batch_p99, 1.0)))
    return min(max(wanted, shapes.FEWEST_SEQS), shapes.MOST_SEQS)


def first_guess(problem: Problem) -> Array:
    """Replicas (J,) if each candidate carried all of its classes alone, at half load."""
    part, step = problem.moments, problem.steps
    carried = np.where(problem.allowed, problem.rates[:, None], 0.0)
    seconds = (
        step.delta * (part.prompt @ carried)
        + step.beta * (part.steps @ carried)
        + step.gamma * (part.footprint @ carried)
    )
    most = np.array([c.pool.gpus // c.gpus if c.pool.gpus is not None else np.inf for c in problem.candidates], float)
    return np.asarray(np.maximum(1.0, np.minimum(2 * seconds, most)))


def capacities(problem: Problem, shares: Array, replicas: Array) -> Capacity:
    """What each candidate (J,) can take of the mix that it carries.

    `shares` (C, J): the rate of each class on each candidate; where a candidate carries nothing, of all classes that
    may use it. `replicas` (J,): how many share its arrivals. A candidate that no class may use takes nothing.
    """
    J = len(problem.candidates)
    step = max(1, _CHUNK // max(1, len(problem.workloads)))
    parts = [_capacities(problem, shares, replicas, slice(start, start + step)) for start in range(0, J, step)]
    return load.joined(parts)


def _capacities(problem: Problem, shares: Array, replicas: Array, at: slice) -> Capacity:
    possible = np.where(problem.allowed[:, at], np.maximum(problem.rates, _SILENT)[:, None], 0.0)
    used, usable = shares[:, at].any(axis=0), possible.any(axis=0)
    rates = np.where(used, shares[:, at], np.where(usable, possible, 1.0))
    ttft_s, tpot_s = (np.where(rates > 0, target[:, None], np.inf) for target in problem.targets)
    sizes = problem.sizes
    found = load.capacity(
        problem.steps.only(at),
        load.mixed(problem.moments, rates),
        ttft_s,
        tpot_s.min(axis=0),
        sizes.percentile[at],
        sizes.max_num_batched_tokens[at],
        sizes.kv_tokens[at],
        replicas[at],
        prompt_p=np.asarray(problem.moments.prompt_p)[:, None],
    )
    return replace(found, utilisation=np.where(usable, found.utilisation, 0.0))


def alone(problem: Problem, replicas: Array) -> Array:
    """(C, J) the largest utilisation of a candidate that carries one class alone, at the candidate's targets; zero
    where the class may not use it. `replicas` (J,): how many share its arrivals."""
    result = np.zeros(problem.allowed.shape)
    tiers = [candidate.tier for candidate in problem.candidates]
    ttft_s, tpot_s = np.array([[tier.ttft_s, tier.tpot_s] for tier in tiers]).reshape(-1, 2).T
    c, j = np.nonzero(problem.allowed)
    for start in range(0, len(c), _PAIRS):
        some = slice(start, start + _PAIRS)
        of_class, at = c[some], j[some]
        result[of_class, at] = load.most_utilisation(
            problem.steps.only(at),
            problem.moments.only(of_class),
            ttft_s[at],
            tpot_s[at],
            problem.sizes.percentile[at],
            problem.sizes.max_num_batched_tokens[at],
            replicas[at],
        )
    return result
