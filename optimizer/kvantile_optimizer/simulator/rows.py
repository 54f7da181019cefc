"""What a simulated plan did, as rows in the names of the plan's and the evaluation's JSON: all, per class, per group.

KV shares are of the blocks of all replicas over the whole replay, idle time included. The committed share adds what
was reserved and not used, under `pooled` its pooled part, from each answer's own mean pace.
"""

from __future__ import annotations

import numpy as np

from kvantile_optimizer.figures import latency_figures, percentile
from kvantile_optimizer.simulator.fleet import PlanOutcome
from kvantile_optimizer.simulator.state import KV_BINS, Floats

Row = dict[str, float | int | str | None]


def plan_row(found: PlanOutcome, policy: str = "kvantile") -> Row:
    """One row of the evaluation's table."""
    plan, outcome = found.plan, found.outcome
    used = _kv_token_seconds(found, 0, len(outcome.busy_s))
    capacity = sum(group.kv_tokens * group.replicas for group in plan.groups) * max(outcome.span_s, 1e-9)
    count = len(outcome.preemptions)
    return {
        "policy": policy,
        "form": _all_of([route.form for route in plan.routes]),
        "order": _all_of([route.order for route in plan.routes]),
        "costUSDPerHour": plan.costs.gpu,
        "gpuUSDPerHour": plan.costs.gpu,
        "gpus": plan.gpu_count,
        "requests": count,
        "requestsFailed": int((~outcome.served).sum()),
        **latency_figures(found.answers),
        "preemptions": int(outcome.preemptions.sum()),
        "preemptionsPerRequest": float(outcome.preemptions.sum()) / count,
        "recomputedTokensFraction": outcome.recomputed_tokens / max(1, outcome.computed_tokens),
        "kvUsedFraction": used / capacity,
        "kvCommittedFraction": (used + float(np.nansum(_idle_token_seconds(found)))) / capacity,
    }


def class_rows(found: PlanOutcome) -> list[Row]:
    """What each class saw; latencies also at the percentile that its targets are for."""
    rows: list[Row] = []
    answers = found.answers
    for place, item in enumerate(found.plan.classes):
        mine = found.class_index == place
        ours, preempted = answers.only(mine), found.outcome.preemptions[mine]
        rows.append(
            {
                "class": item.name,
                "requests": int(mine.sum()),
                "requestsFailed": int((~ours.whole).sum()),
                "percentile": item.slo.percentile,
                "ttftSeconds": percentile(ours.ttft_s, item.slo.percentile),
                "ttftTargetSeconds": item.slo.ttft_seconds,
                "tpotSeconds": percentile(ours.tpot_s, item.slo.percentile),
                "tpotTargetSeconds": item.slo.tpot_seconds,
                "tpotMeanSeconds": float(np.nanmean(ours.tpot_s)) if not np.isnan(ours.tpot_s).all() else None,
                **latency_figures(ours),
                "preemptionProbability": float((preempted > 0).mean()) if mine.any() else 0.0,
            }
        )
    return rows


def group_rows(found: PlanOutcome) -> list[Row]:
    """How each group was used: the share of time in steps, and the KV of one replica."""
    rows: list[Row] = []
    span_s = max(found.outcome.span_s, 1e-9)
    for place, group in enumerate(found.plan.groups):
        begin, end = found.first_replicas[place], found.first_replicas[place + 1]
        mine = found.group_index == place
        rows.append(
            {
                "group": group.name,
                "replicas": group.replicas,
                "requests": int(mine.sum()),
                "busyFraction": float(found.outcome.busy_s[begin:end].sum()) / (span_s * max(1, group.replicas)),
                "kvMeanTokens": _kv_token_seconds(found, begin, end) / (span_s * max(1, group.replicas)),
                "kvP99Tokens": kv_percentile_tokens(found, place, 99),
                "preemptions": int(found.outcome.preemptions[mine].sum()),
            }
        )
    return rows


def kv_percentile_tokens(found: PlanOutcome, group: int, percent: float) -> float:
    """KV tokens in use on one replica of a group, not exceeded for `percent` of the time, idle time included."""
    begin, end = found.first_replicas[group], found.first_replicas[group + 1]
    seconds = found.outcome.kv_seconds[begin:end].sum(axis=0)
    total = found.outcome.span_s * (end - begin)
    idle = max(0.0, total - float(seconds.sum()))
    place = int(np.searchsorted(idle + np.cumsum(seconds), percent / 100 * (idle + float(seconds.sum()))))
    share = 0.0 if idle >= percent / 100 * total else (min(place, KV_BINS - 1) + 0.5) / KV_BINS
    return share * found.plan.groups[group].kv_tokens


def _kv_token_seconds(found: PlanOutcome, begin: int, end: int) -> float:
    """Integral of the KV tokens in use on the replicas [begin, end)."""
    sizes = np.concatenate([np.full(group.replicas, group.kv_tokens) for group in found.plan.groups])
    middles = (np.arange(KV_BINS) + 0.5) / KV_BINS
    return float(sizes[begin:end] @ (found.outcome.kv_seconds[begin:end] @ middles))


def _idle_token_seconds(found: PlanOutcome) -> Floats:
    """(N,) reserved, unused tokens times how long: the sum of (r - g)^+ over decoding steps at the mean pace."""
    shares = {
        (route.class_, route.group): {"none": 0.0, "held": 1.0, "pooled": route.pooling_fraction}[route.form]
        for route in found.plan.routes
    }
    table = np.array(
        [[shares.get((item.name, group.name), 0.0) for group in found.plan.groups] for item in found.plan.classes]
    )
    reserve = found.reserve
    steps = np.minimum(reserve, found.outcome.output - 1)
    idle = steps * reserve - steps * (steps + 1) / 2
    return np.asarray(table[found.class_index, found.group_index] * idle * found.outcome.tpot_s)


def _all_of(values: list[str]) -> str:
    return "/".join(sorted(set(values))) or "none"
