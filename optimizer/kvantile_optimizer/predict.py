"""What a plan's classes and groups will see, by the closed forms of `load` at the load that they got."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvantile_optimizer import load
from kvantile_optimizer.load import LoadedReplica, Moments
from kvantile_optimizer.plan import GroupPrediction, Prediction, Route
from kvantile_optimizer.problem import Problem
from kvantile_optimizer.program import Decision, Instance, busy_replicas


def groups(problem: Problem, instance: Instance, decision: Decision, names: dict[int, str]) -> list[GroupPrediction]:
    """Utilisation and KV use of each group's replicas."""
    result = []
    for j, name in names.items():
        mix, rho = _mix(problem, instance, decision, j)
        state = _state(problem, decision, j, mix, rho)
        result.append(
            GroupPrediction(
                group=name,
                utilisation=rho,
                kv_mean_tokens=float(state.kv_mean[0]),
                kv_p99_tokens=float(state.kv_p99[0]),
            )
        )
    return result


def classes(problem: Problem, instance: Instance, decision: Decision, routes: list[Route]) -> list[Prediction]:
    """What each served class gets: the worst of its groups."""
    fractiles = {route.class_: route.fractile if route.form != "none" else 0.0 for route in routes}
    result = []
    for c, workload in enumerate(problem.workloads):
        used = sorted(
            {
                instance.columns[k].candidate
                for k in np.flatnonzero(decision.fractions)
                if instance.columns[k].class_index == c
            }
        )
        if not used:
            continue
        percentile = problem.own_tiers[c].percentile
        ttft, tpot, overflow = 0.0, 0.0, 0.0
        for j in used:
            mix, rho = _mix(problem, instance, decision, j)
            own = replace(mix, prompt_p=problem.parts[c][0].prompt_p)
            state = _state(problem, decision, j, own, rho, percentile)
            limit = problem.candidates[j].kv_tokens
            full = load.exceeds(float(state.kv_mean[0]), float(state.kv_p99[0]), 99, limit)
            ttft, tpot = max(ttft, float(state.ttft_p[0])), max(tpot, float(state.tpot_p[0]))
            overflow = max(overflow, full)
        # A request is preempted when the cache is full and answers are longer than what was set aside for them.
        preempted = overflow * (1 - fractiles.get(workload.name, 0.0))
        result.append(
            Prediction.model_validate(
                {
                    "class": workload.name,
                    "ttftSeconds": ttft,
                    "tpotSeconds": tpot,
                    "percentile": percentile,
                    "preemptionProbability": min(1.0, preempted),
                }
            )
        )
    return result


def _mix(problem: Problem, instance: Instance, decision: Decision, j: int) -> tuple[Moments, float]:
    parts = []
    for column, fraction in zip(instance.columns, decision.fractions, strict=True):
        if column.candidate != j or fraction <= 0:
            continue
        rate = float(fraction * instance.rates[column.class_index])
        parts.append((rate, problem.parts[column.class_index][int(column.resident)]))
    if not parts:
        c = next(c for c, mine in enumerate(problem.allowed) if j in mine)
        return problem.parts[c][0], 0.0
    return load.mixed(parts), float(busy_replicas(instance, decision)[j] / decision.replicas[j])


def _state(
    problem: Problem, decision: Decision, j: int, mix: Moments, rho: float, percentile: int | None = None
) -> LoadedReplica:
    candidate = problem.candidates[j]
    return load.loaded(
        candidate.step,
        mix,
        np.array([min(max(rho, 1e-6), 0.999)]),
        percentile or candidate.tier.percentile,
        candidate.max_num_batched_tokens,
        float(decision.replicas[j]),
    )
