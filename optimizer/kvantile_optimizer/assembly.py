"""Puts a decision into the plan's words: groups and routes by name, costs, predictions, warnings.

Nothing is decided here. A plan is made from the decision and the coefficients it was made with, and from nothing else,
so that what it says is what was solved.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvantile_optimizer import predict
from kvantile_optimizer.coefficients import losses
from kvantile_optimizer.hardware import BLOCK_SIZE
from kvantile_optimizer.plan import (
    Group,
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
from kvantile_optimizer.problem import Problem
from kvantile_optimizer.program import Array, Counts, Decision, Instance
from kvantile_optimizer.reservation import robust_reservation
from kvantile_optimizer.settle import Settled
from kvantile_optimizer.solver import SolveStatus
from kvantile_optimizer.waiting import Order

ORDERS: dict[str, Order] = {"Slack": "slack", "Deadline": "deadline", "FirstCome": "fcfs"}


def assemble(problem: Problem, settled: Settled, unserved: list[Unserved], method: str, seed: int) -> Plan:
    """The plan of a settled decision; `unserved` are the entries for what it leaves out."""
    instance, decision = settled.instance, settled.decision
    spec, metadata = problem.serving_plan.spec, problem.serving_plan.metadata
    names = group_names(problem, decision)
    costs = _costs(problem, instance, decision)
    objective = costs.gpu + costs.memory + costs.preemption + costs.switching
    bound = min(3600 * settled.bound, objective)
    routes = _routes(problem, settled, names)
    groups = [_group(problem, settled, j, name) for j, name in names.items()]
    return Plan(
        plan=PlanId(name=metadata.name, namespace=metadata.namespace, generation=metadata.generation),
        model=PlanEngineModel(
            name=spec.model.name, served_name=spec.model.public_name, max_model_len=spec.model.max_model_len
        ),
        router=PlanRouter(allow_class_header=spec.router.allow_class_header, allow_hints=spec.router.allow_hints),
        classes=[_class(problem, c) for c in range(len(problem.workloads))],
        method=method,
        status=_status(decision),
        objective_usd_per_hour=objective,
        bound_usd_per_hour=bound,
        gap=(objective - bound) / objective if objective > 0 else 0.0,
        seed=seed,
        costs=costs,
        groups=groups,
        routes=routes,
        resident_prefixes=_resident(problem, instance, decision, names),
        predictions=predict.classes(problem, instance, decision, routes),
        group_predictions=predict.groups(problem, instance, decision, names),
        unserved=unserved,
        history=settled.history,
        warnings=_warnings(problem, settled),
    )


def _status(decision: Decision) -> PlanStatus:
    if decision.unserved.min() >= 1.0:
        return PlanStatus.INFEASIBLE
    return PlanStatus.OPTIMAL if decision.status == SolveStatus.OPTIMAL else PlanStatus.FEASIBLE


def group_names(problem: Problem, decision: Decision) -> dict[int, str]:
    """Names of the groups by candidate: the running group's of the same hardware and sizes, else the shape, with the
    tier's targets where a shape serves several tiers."""
    chosen = [int(j) for j in np.flatnonzero(decision.replicas)]
    shapes = Counter(problem.candidates[j].shape for j in chosen)
    names: dict[int, str] = {}
    for group in problem.running:
        alike = [j for j in chosen if j not in names and problem.candidates[j].runs_as(group)]
        if alike:
            names[min(alike, key=lambda j: abs(int(decision.replicas[j]) - group.replicas))] = group.name
    for j in chosen:
        candidate, tier = problem.candidates[j], problem.candidates[j].tier
        name = candidate.shape
        if j in names:
            continue
        if shapes[candidate.shape] > 1 or name in names.values():
            name += f"-{round(tier.tpot_s * 1000)}ms-{round(tier.ttft_s * 1000)}ms"
        if name in names.values():
            name += f"-p{tier.percentile}"
        names[j] = _unique(name, names)
    return {j: names[j] for j in chosen}


def _unique(name: str, names: dict[int, str]) -> str:
    """The name, numbered where it is taken by a group that runs with other sizes."""
    taken, number, tried = set(names.values()), 2, name
    while tried in taken:
        tried, number = f"{name}-{number}", number + 1
    return tried


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
        tail_margin=float(settled.instance.capacity.tail_margin[j]),
        capacity_ratio=float(settled.instance.replayed[j]),
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


def _routes(problem: Problem, settled: Settled, names: dict[int, str]) -> list[Route]:
    """One route for each class and group: levels that share a class are merged by their mean, up to a block."""
    merged: dict[tuple[int, int], list[int]] = {}
    columns = settled.instance.columns
    for k in np.flatnonzero(settled.decision.fractions):
        merged.setdefault((int(columns.class_index[k]), int(columns.candidate[k])), []).append(int(k))
    return [_route(problem, settled, c, j, names[j], parts) for (c, j), parts in sorted(merged.items()) if j in names]


def _route(problem: Problem, settled: Settled, c: int, j: int, group: str, parts: list[int]) -> Route:
    instance, decision = settled.instance, settled.decision
    price = losses(problem, settled.tables, instance.capacity, c, j)
    weights = decision.fractions[parts]
    chosen = instance.columns.only(np.array(parts))

    def mean(values: Array | Counts) -> float:
        return float(np.average(values, weights=weights))

    lengths = problem.workloads[c].lengths
    # A rounding error of the weights is no block.
    reserve = int(np.ceil(mean(chosen.reserve_tokens) / BLOCK_SIZE - 1e-9) * BLOCK_SIZE)
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
            "engineSecondsPerRequest": mean(chosen.engine_seconds),
            "idleUSDPerToken": price.over,
            "shortageUSDPerToken": price.under,
            "shortageUSD": price.fixed,
            "kvTokenStepsPerRequest": mean(chosen.footprint),
        }
    )


def _resident(problem: Problem, instance: Instance, decision: Decision, names: dict[int, str]) -> list[ResidentPrefix]:
    columns = instance.columns
    pinned = np.flatnonzero((decision.fractions > 0) & columns.resident)
    pairs = sorted({(int(columns.class_index[k]), int(columns.candidate[k])) for k in pinned})
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
    rate = decision.fractions * instance.rates[instance.columns.class_index]
    memory, preemption = rate @ instance.columns.memory_usd, rate @ instance.columns.preemption_usd
    return PlanCosts(
        gpu=3600 * float(gpu),
        memory=3600 * float(memory),
        preemption=3600 * float(preemption),
        switching=3600 * decision.switching_usd_per_second,
    )


def _warnings(problem: Problem, settled: Settled) -> list[str]:
    notes = [note for workload in problem.workloads for note in workload.warnings]
    if not settled.holds:
        notes.append(
            "the figures did not settle: the mix of classes that some group got takes more than was planned for, so "
            "its predictions may exceed the targets"
        )
    if settled.decision.status == SolveStatus.FEASIBLE:
        notes.append("the search ended before the plan was proved best: see gap")
    if problem.form == "none":
        return notes
    order = problem.serving_plan.spec.robustness.order
    notes += [
        f"class {problem.workloads[c].name}: a ball of order {order} with radius {problem.radii[c]:.3g} leaves the "
        "robust reservation at the sample quantile"
        for c in range(len(problem.workloads))
        if _is_sample_quantile(problem, settled, c)
    ]
    return notes


def _is_sample_quantile(problem: Problem, settled: Settled, c: int) -> bool:
    """Whether the class has a radius that moves its reservation on none of the groups that it is routed to."""
    columns, instance = settled.instance.columns, settled.instance
    used = np.unique(columns.candidate[(columns.class_index == c) & (settled.decision.fractions > 0)])
    order, radius = problem.serving_plan.spec.robustness.order, problem.radii[c]
    if radius == 0 or not len(used):
        return False
    prices = [losses(problem, settled.tables, instance.capacity, c, int(j)) for j in used]
    lengths = problem.workloads[c].lengths
    return all(robust_reservation(lengths, price, order, radius, BLOCK_SIZE).is_sample_quantile for price in prices)
