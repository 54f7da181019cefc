"""What a simulated plan did, as rows in the names of the plan's and the evaluation's JSON: all, per class, per group.

KV shares are of the blocks of all replicas over the whole replay, idle time included. The committed share adds what
was reserved and not used, under `pooled` its pooled part, from each answer's own mean pace.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvantile_optimizer.figures import latency_figures, percentile
from kvantile_optimizer.plan import Group
from kvantile_optimizer.simulator.fleet import PlanOutcome
from kvantile_optimizer.simulator.state import Floats

Row = dict[str, float | int | str | None]


def plan_row(found: PlanOutcome, policy: str = "kvantile") -> Row:
    """One row of the evaluation's table."""
    plan, outcome = found.plan, found.outcome
    span_s = max(outcome.span_s, 1e-9)
    used = sum(outcome.kv_mean_share(replicas) * group.kv_tokens * group.replicas for group, replicas in _groups(found))
    capacity = sum(group.kv_tokens * group.replicas for group in plan.groups)
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
        "prefixHitFraction": _hit_fraction(found, outcome.served),
        "recomputedTokensFraction": outcome.recomputed_tokens / max(1, outcome.computed_tokens),
        "kvUsedFraction": used / capacity,
        "kvCommittedFraction": (used + float(np.nansum(_idle_token_seconds(found))) / span_s) / capacity,
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
                "prefixHitFraction": _hit_fraction(found, mine),
                "preemptionProbability": float((preempted > 0).mean()) if mine.any() else 0.0,
            }
        )
    return rows


def group_rows(found: PlanOutcome) -> list[Row]:
    """How each group was used: the share of time in steps, and the KV of one replica."""
    outcome = found.outcome
    rows: list[Row] = []
    for place, (group, replicas) in enumerate(_groups(found)):
        mine = found.group_index == place
        rows.append(
            {
                "group": group.name,
                "replicas": group.replicas,
                "requests": int(mine.sum()),
                "busyFraction": float(outcome.utilisation[replicas].sum()) / max(1, group.replicas),
                "kvMeanTokens": outcome.kv_mean_share(replicas) * group.kv_tokens,
                "kvP99Tokens": outcome.kv_share(99, replicas) * group.kv_tokens,
                "prefixHitFraction": _hit_fraction(found, mine),
                "preemptions": int(outcome.preemptions[mine].sum()),
            }
        )
    return rows


def _hit_fraction(found: PlanOutcome, which: npt.NDArray[np.bool_]) -> float:
    """The share of the prompt tokens of those that `which` (N,) marks that was computed before they came."""
    served = which & found.outcome.served
    return float(found.outcome.hit_tokens[served].sum() / max(1, found.requests.prompt[served].sum()))


def _groups(found: PlanOutcome) -> list[tuple[Group, slice]]:
    """The plan's groups, each with its replicas among all."""
    return [
        (group, slice(int(found.first_replicas[place]), int(found.first_replicas[place + 1])))
        for place, group in enumerate(found.plan.groups)
    ]


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
