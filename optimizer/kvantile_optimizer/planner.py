"""Makes a plan: pose the problem, solve the joint program, look again at what it assumed, and put it into words.

Two of the program's coefficients depend on its answer: what a replica can take depends on the mix of classes that it
gets, and how bursty its arrivals are on how many replicas share them. Both are worked out for a first guess, then
again for each answer, until the answer is the same or the rounds are used up; an answer whose own figures do not hold
tightens them. A class that cannot be served is never an error: the plan says what stands in the way and what would
lift it.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvantile_optimizer import predict, remedy
from kvantile_optimizer.candidates import shape_name
from kvantile_optimizer.errors import WorkError
from kvantile_optimizer.hardware import BLOCK_SIZE
from kvantile_optimizer.load import Capacity, engine_seconds
from kvantile_optimizer.plan import (
    Group,
    HistoryEntry,
    Plan,
    PlanClass,
    PlanCosts,
    PlanEngineModel,
    PlanId,
    PlanRouter,
    PlanSlo,
    PlanStatus,
    ResidentPrefix,
    Route,
    Unserved,
)
from kvantile_optimizer.problem import Problem, capacities, columns, pose
from kvantile_optimizer.program import Decision, Instance, solve
from kvantile_optimizer.solver import SolveStatus
from kvantile_optimizer.spec import ServingPlan, duration_seconds
from kvantile_optimizer.waiting import Order
from kvantile_optimizer.workload import Workload

ROUNDS = 4
"""Mixes settle in two or three; a fourth only tightens."""
REPLICA_START_S = 300
"""What a replica costs before it serves: pulling the image, loading weights, capturing graphs."""
ORDERS: dict[str, Order] = {"Slack": "slack", "Deadline": "deadline", "FirstCome": "fcfs"}


@dataclass(frozen=True, slots=True)
class Settled:
    """A decision with the coefficients it was made with."""

    instance: Instance
    decision: Decision
    history: list[HistoryEntry]
    seconds: float


def make_plan(
    serving_plan: ServingPlan,
    workloads: list[Workload],
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    current: Plan | None = None,
) -> Plan:
    """Plans `serving_plan` for `workloads`, one for each of its classes in order.

    `current` is the plan that runs: starting replicas costs, and it stays while the gain is below the hysteresis.
    Raises InputError for a GPU or model that nobody knows, WorkError when the time limit came before any plan.
    """
    started = time.perf_counter()
    problem = pose(serving_plan, workloads)
    settled = _settle(problem, time_limit_s, seed, current)
    if current is not None:
        settled = _prefer_current(problem, settled, time_limit_s, seed)
    unserved = remedy.unserved(problem, settled.instance, settled.decision.unserved, time_limit_s, seed)
    return _assemble(problem, settled, unserved, seed, time.perf_counter() - started)


def _settle(problem: Problem, time_limit_s: float, seed: int, current: Plan | None) -> Settled:
    C, J = len(problem.workloads), len(problem.candidates)
    shares, replicas = np.zeros((C, J)), _first_guess(problem)
    capacity: list[Capacity] = capacities(problem, shares, replicas)
    history: list[HistoryEntry] = []
    best: Settled | None = None
    seconds = 0.0
    for number in range(ROUNDS):
        instance = _instance(problem, capacity, current)
        decision = solve(instance, time_limit_s - seconds, seed)
        if decision is None:
            break
        seconds += decision.seconds
        history.append(HistoryEntry(block=f"joint-{number + 1}", objective_usd_per_hour=_usd_per_hour(decision)))
        best = Settled(instance, decision, history, seconds)
        shares, replicas = _carried(problem, instance, decision), decision.replicas.astype(np.float64)
        actual = capacities(problem, shares, np.where(replicas > 0, replicas, _first_guess(problem)))
        if _holds(instance, decision, actual):
            break
        # Only what is used is tightened: the rest keeps the figures of the mix it might get.
        capacity = [
            _tighter(old, new) if used else old for old, new, used in zip(capacity, actual, replicas > 0, strict=True)
        ]
    if best is None:
        raise WorkError(f"no plan within the time limit of {time_limit_s:g} s: allow more with --time-limit")
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


def _carried(problem: Problem, instance: Instance, decision: Decision) -> NDArray[np.float64]:
    shares = np.zeros((len(problem.workloads), len(problem.candidates)))
    for column, fraction in zip(instance.columns, decision.fractions, strict=True):
        shares[column.class_index, column.candidate] += fraction * instance.rates[column.class_index]
    return shares


def _holds(instance: Instance, decision: Decision, actual: list[Capacity]) -> bool:
    """Whether the decision fits what its own mix lets each group take, to half a point."""
    load = np.zeros(len(instance.candidates))
    for column, fraction in zip(instance.columns, decision.fractions, strict=True):
        load[column.candidate] += fraction * instance.rates[column.class_index] * column.engine_seconds
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
        interference_s=max(old.interference_s, new.interference_s),
    )


def _prefer_current(problem: Problem, settled: Settled, time_limit_s: float, seed: int) -> Settled:
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
    return Settled(kept, decision, history, settled.seconds + decision.seconds)


def _usd_per_hour(decision: Decision) -> float:
    return 3600 * decision.objective


def _assemble(problem: Problem, settled: Settled, unserved: list[Unserved], seed: int, solve_seconds: float) -> Plan:
    instance, decision = settled.instance, settled.decision
    spec, metadata = problem.serving_plan.spec, problem.serving_plan.metadata
    names = _group_names(problem, decision)
    costs = _costs(problem, instance, decision)
    objective = costs.gpu + costs.memory + costs.preemption + costs.switching
    bound = min(_bound_usd_per_hour(settled), objective)
    routes = _routes(problem, instance, decision, names)
    groups = [_group(problem, settled, j, name) for j, name in names.items()]
    return Plan(
        plan=PlanId(name=metadata.name, namespace=metadata.namespace, generation=metadata.generation),
        model=PlanEngineModel(
            name=spec.model.name, served_name=spec.model.public_name, max_model_len=spec.model.max_model_len
        ),
        router=PlanRouter(allow_class_header=spec.router.allow_class_header, allow_hints=spec.router.allow_hints),
        classes=[_class(problem, c) for c in range(len(problem.workloads))],
        method="exact",
        status=_status(decision),
        objective_usd_per_hour=objective,
        bound_usd_per_hour=bound,
        gap=(objective - bound) / objective if objective > 0 else 0.0,
        solve_seconds=solve_seconds,
        seed=seed,
        costs=costs,
        groups=groups,
        routes=routes,
        resident_prefixes=_resident(problem, instance, decision, names),
        predictions=predict.classes(problem, instance, decision, routes),
        group_predictions=predict.groups(problem, instance, decision, names),
        unserved=unserved,
        history=settled.history,
        warnings=_warnings(problem, decision),
    )


def _bound_usd_per_hour(settled: Settled) -> float:
    return 3600 * settled.decision.bound


def _status(decision: Decision) -> PlanStatus:
    if decision.unserved.min() >= 1.0:
        return PlanStatus.INFEASIBLE
    return PlanStatus.OPTIMAL if decision.status == SolveStatus.OPTIMAL else PlanStatus.FEASIBLE


def _group_names(problem: Problem, decision: Decision) -> dict[int, str]:
    """Names of the groups by candidate: the shape, with the tier's TPOT where a shape serves several tiers."""
    chosen = [int(j) for j in np.flatnonzero(decision.replicas)]
    shapes = Counter(problem.candidates[j].shape for j in chosen)
    names: dict[int, str] = {}
    for j in chosen:
        candidate = problem.candidates[j]
        name = candidate.shape
        if shapes[candidate.shape] > 1:
            name += f"-{round(candidate.tier.tpot_s * 1000)}ms-{round(candidate.tier.ttft_s * 1000)}ms"
        names[j] = name
    return names


def _group(problem: Problem, settled: Settled, j: int, name: str) -> Group:
    candidate, replicas = problem.candidates[j], int(settled.decision.replicas[j])
    return Group(
        name=name,
        pool=candidate.pool.name,
        tensor_parallel=candidate.tp,
        pipeline_parallel=candidate.pp,
        max_num_seqs=candidate.max_num_seqs,
        max_num_batched_tokens=candidate.max_num_batched_tokens,
        max_model_len=candidate.max_model_len,
        replicas=replicas,
        gpus=replicas * candidate.gpus,
        gpu_type=candidate.pool.gpu.name,
        price_usd_per_hour=replicas * candidate.price_usd_per_second * 3600,
        kv_tokens=candidate.kv_tokens,
        block_size=BLOCK_SIZE,
        tail_margin=settled.instance.capacities[j].tail_margin,
        step_time=candidate.step,
    )


def _class(problem: Problem, c: int) -> PlanClass:
    item, workload = problem.serving_plan.spec.classes[c], problem.workloads[c]
    deadline = item.slo.deadline_milliseconds
    return PlanClass(
        name=item.name,
        default=item.default,
        match=item.match,
        slo=PlanSlo(
            ttft_seconds=item.slo.ttft_milliseconds / 1000,
            tpot_seconds=item.slo.tpot_milliseconds / 1000,
            percentile=item.slo.percentile,
            deadline_seconds=deadline / 1000 if deadline else None,
        ),
        requests_per_second=workload.requests_per_second,
        radius=problem.radii[c],
    )


def _routes(problem: Problem, instance: Instance, decision: Decision, names: dict[int, str]) -> list[Route]:
    """One route for each class and group: levels that share a class are merged by their mean, up to a block."""
    merged: dict[tuple[int, int], list[int]] = {}
    for k in np.flatnonzero(decision.fractions):
        column = instance.columns[k]
        merged.setdefault((column.class_index, column.candidate), []).append(int(k))
    return [
        _route(problem, instance, decision, c, names[j], parts)
        for (c, j), parts in sorted(merged.items())
        if j in names
    ]


def _route(problem: Problem, instance: Instance, decision: Decision, c: int, group: str, parts: list[int]) -> Route:
    weights = decision.fractions[parts]
    chosen = [instance.columns[k] for k in parts]

    def mean(values: list[float]) -> float:
        return float(np.average(values, weights=weights))

    lengths = problem.workloads[c].lengths
    reserve = int(np.ceil(mean([float(column.reserve_tokens) for column in chosen]) / BLOCK_SIZE) * BLOCK_SIZE)
    form = problem.form
    return Route.model_validate(
        {
            "class": problem.workloads[c].name,
            "group": group,
            "fraction": min(1.0, float(weights.sum())),
            "reserveTokens": reserve,
            "meanTokens": lengths.mean,
            "fractile": float(lengths.cdf(reserve)) if form != "none" else 0.0,
            "form": form,
            "poolingFraction": problem.pooling,
            "order": ORDERS[problem.serving_plan.spec.engine.order],
            "engineSecondsPerRequest": mean([column.engine_seconds for column in chosen]),
            "kvTokenStepsPerRequest": mean([column.footprint for column in chosen]),
        }
    )


def _resident(problem: Problem, instance: Instance, decision: Decision, names: dict[int, str]) -> list[ResidentPrefix]:
    pairs = sorted(
        {
            (instance.columns[k].class_index, instance.columns[k].candidate)
            for k in np.flatnonzero(decision.fractions)
            if instance.columns[k].resident
        }
    )
    return [
        ResidentPrefix.model_validate(
            {
                "class": problem.workloads[c].name,
                "group": names[j],
                "tokens": problem.workloads[c].prefix_tokens,
            }
        )
        for c, j in pairs
        if j in names
    ]


def _costs(problem: Problem, instance: Instance, decision: Decision) -> PlanCosts:
    gpu = sum(
        n * candidate.price_usd_per_second for n, candidate in zip(decision.replicas, problem.candidates, strict=True)
    )
    carried = [
        (fraction * instance.rates[column.class_index], column)
        for fraction, column in zip(decision.fractions, instance.columns, strict=True)
        if fraction > 0
    ]
    memory = sum(rate * column.memory_usd for rate, column in carried)
    preemption = sum(rate * column.preemption_usd for rate, column in carried)
    return PlanCosts(
        gpu=3600 * float(gpu),
        memory=3600 * float(memory),
        preemption=3600 * float(preemption),
        switching=3600 * decision.switching_usd_per_second,
    )


def _warnings(problem: Problem, decision: Decision) -> list[str]:
    notes = [note for workload in problem.workloads for note in workload.warnings]
    if decision.status == SolveStatus.FEASIBLE:
        notes.append("the time limit came before the plan was proved best: see gap")
    if problem.form == "none":
        return notes
    order = problem.serving_plan.spec.robustness.order
    for workload, radius in zip(problem.workloads, problem.radii, strict=True):
        if order == 1 and radius > 0:
            notes.append(
                f"class {workload.name}: a ball of order 1 with radius {radius:g} leaves the reservation at the "
                "sample quantile unless the radius is larger than the distance to the longest answer"
            )
    return notes
