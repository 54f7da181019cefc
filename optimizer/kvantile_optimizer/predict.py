"""What a plan's classes and groups will see, by the closed forms of `load` at the load that they got."""

from __future__ import annotations

from functools import cache

import numpy as np

from kvantile_optimizer import load
from kvantile_optimizer.load import LoadedReplica, Moments
from kvantile_optimizer.plan import GroupPrediction, Prediction, Route
from kvantile_optimizer.problem import Problem
from kvantile_optimizer.program import Decision, Instance, busy_replicas

LONGEST_S = 3600.0
"""Stands for the first token of a queue that grows, which has no percentile."""


def groups(problem: Problem, instance: Instance, decision: Decision, names: dict[int, str]) -> list[GroupPrediction]:
    """Utilisation and KV use of each group's replicas."""
    busy = busy_replicas(instance, decision)
    result = []
    for j, name in names.items():
        rho = float(busy[j] / decision.replicas[j])
        state = _state(problem, instance, decision, j, _mix(problem, instance, decision, j), rho)
        result.append(
            GroupPrediction(
                group=name,
                utilisation=rho,
                kv_mean_tokens=float(state.kv_mean),
                kv_p99_tokens=float(state.kv_p99),
            )
        )
    return result


def classes(problem: Problem, instance: Instance, decision: Decision, routes: list[Route]) -> list[Prediction]:
    """What each served class gets: the worst of its groups."""
    fractiles = {route.class_: route.fractile if route.form != "none" else 0.0 for route in routes}
    columns, carried = instance.columns, np.flatnonzero(decision.fractions)
    pairs = np.unique(np.column_stack((columns.class_index[carried], columns.candidate[carried])), axis=0)
    busy = busy_replicas(instance, decision)
    mixes = {int(j): _mix(problem, instance, decision, int(j)) for j in np.unique(pairs[:, 1])}

    @cache
    def stands(j: int, percentile: int) -> tuple[LoadedReplica, float, float]:
        """The state of a group, its TPOT, and how often its cache is full; classes differ in their prompts alone."""
        state = _state(problem, instance, decision, j, mixes[j], float(busy[j] / decision.replicas[j]), percentile)
        full = load.exceeds(float(state.kv_mean), float(state.kv_p99), 99, problem.candidates[j].kv_tokens)
        return state, float(state.tpot_p(percentile)), full

    result = []
    for c, workload in enumerate(problem.workloads):
        used = [int(j) for j in pairs[pairs[:, 0] == c, 1] if decision.replicas[j]]
        if not used:
            continue
        percentile = problem.own_tiers[c].percentile
        ttft, tpot, overflow = 0.0, 0.0, 0.0
        for j in used:
            state, own_tpot, full = stands(j, percentile)
            longer = problem.parts[c][0].prompt_p - mixes[j].prompt_p
            ttft = max(ttft, float(state.ttft_p + state.prompt_token_s * longer))
            tpot, overflow = max(tpot, own_tpot), max(overflow, full)
        # A request is preempted when the cache is full and answers are longer than what was set aside for them.
        preempted = overflow * (1 - fractiles.get(workload.name, 0.0))
        result.append(
            Prediction.model_validate(
                {
                    "class": workload.name,
                    "ttftSeconds": min(ttft, LONGEST_S),
                    "tpotSeconds": tpot,
                    "percentile": percentile,
                    "preemptionProbability": min(1.0, preempted),
                }
            )
        )
    return result


def _mix(problem: Problem, instance: Instance, decision: Decision, j: int) -> Moments:
    """The mix that candidate `j` carries; of the first class that it could carry where that is nothing."""
    columns = instance.columns
    mine = np.flatnonzero((columns.candidate == j) & (decision.fractions > 0))
    if not len(mine):
        return problem.parts[int(problem.allowed[:, j].argmax())][0]
    rates = decision.fractions[mine] * instance.rates[columns.class_index[mine]]
    parts = [problem.parts[columns.class_index[k]][int(columns.resident[k])] for k in mine]
    mix = load.mixed(load.stacked(parts), rates[:, None])
    return mix.only(0)


def _state(
    problem: Problem,
    instance: Instance,
    decision: Decision,
    j: int,
    mix: Moments,
    rho: float,
    percentile: int | None = None,
) -> LoadedReplica:
    """The closed forms at a load; at less of it where a replay has shown that a replica takes more than they say."""
    candidate = problem.candidates[j]
    return load.loaded(
        candidate.step,
        mix,
        min(max(rho / float(instance.replayed[j]), 1e-6), 0.999),
        percentile or candidate.tier.percentile,
        candidate.max_num_batched_tokens,
        float(decision.replicas[j]),
    )
