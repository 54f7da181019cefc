"""From the records of a replay to one row of figures, in the names of the evaluation's JSON.

The arithmetic is `figures`'; here records become its arrays, and what only a replay over HTTP has is added: requests
that failed, replicas that died, requests that left late. All times are engine seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvantile_optimizer.figures import Answers, latency_figures, percentile
from kvantile_optimizer.local.records import Record
from kvantile_optimizer.plan import Plan

Row = dict[str, float | int | str | None]


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's replay: the plan it ran, what came of each request, and what the replicas counted."""

    policy: str
    plan: Plan
    records: Sequence[Record]
    preemptions: int
    restarts: int = 0


def row(run: Run) -> Row:
    """The figures of one policy."""
    count = max(1, len(run.records))
    sent_late_s = np.array([record.sent_s - record.request.arrival_s for record in run.records], float)
    return {
        "policy": run.policy,
        "form": _common([route.form for route in run.plan.routes]),
        "order": _common([route.order for route in run.plan.routes]),
        "costUSDPerHour": run.plan.costs.gpu,
        "gpuUSDPerHour": run.plan.costs.gpu,
        "gpus": run.plan.gpu_count,
        "requests": len(run.records),
        "requestsFailed": sum(bool(record.error) for record in run.records),
        **latency_figures(answers(run)),
        "preemptions": run.preemptions,
        "preemptionsPerRequest": run.preemptions / count,
        "replicaRestarts": run.restarts,
        "sentLateP99Seconds": percentile(sent_late_s, 99),
    }


def answers(run: Run) -> Answers:
    """The records as arrays, each with its class's targets."""
    targets = {item.name: item.slo for item in run.plan.classes}
    slos = [targets[record.request.class_name] for record in run.records]
    return Answers(
        arrival_s=np.array([record.sent_s for record in run.records], float),
        first_s=np.array([math.nan if record.first_s is None else record.first_s for record in run.records], float),
        last_s=np.array([math.nan if record.last_s is None else record.last_s for record in run.records], float),
        tokens=np.array([record.tokens for record in run.records], np.int64),
        whole=np.array([not record.error for record in run.records], bool),
        ttft_target_s=np.array([slo.ttft_seconds for slo in slos], float),
        tpot_target_s=np.array([slo.tpot_seconds for slo in slos], float),
    )


def last_s(records: Sequence[Record]) -> float:
    """When the last answer ended; a refused request ends when it was sent."""
    return max((record.sent_s if record.last_s is None else record.last_s for record in records), default=0.0)


def verdict(rows: Sequence[Row], titles: Mapping[str, str]) -> str:
    """Who won by how much, as measured: the first row against the others. Goodput decides."""
    ours, *others = rows
    best = max(rows, key=lambda item: _number(item, "goodputRequestsPerSecond"))
    name = titles[str(ours["policy"])]
    opening = f"{name} won" if best is ours else f"{name} did not win, {titles[str(best['policy'])]} did"
    return "; ".join(
        [opening, *(f"against {titles[str(other['policy'])]}: {_against(ours, other)}" for other in others)]
    )


def _against(ours: Row, other: Row) -> str:
    goodput = _change(_number(ours, "goodputRequestsPerSecond"), _number(other, "goodputRequestsPerSecond"))
    ttft = _change(_number(ours, "ttftP99Seconds"), _number(other, "ttftP99Seconds"))
    return f"goodput {goodput}, P99 TTFT {ttft}, {ours['preemptions']} preemptions to {other['preemptions']}"


def _change(ours: float, other: float) -> str:
    return f"{100 * (ours / other - 1):+.0f} %" if other > 0 else f"{ours:.2f} to 0"


def _number(item: Row, key: str) -> float:
    value = item[key]
    return float(value) if isinstance(value, (int, float)) else 0.0


def _common(values: Sequence[str]) -> str:
    return "/".join(sorted(set(values))) or "none"
