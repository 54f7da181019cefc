"""From the records of a replay to one row of figures, in the names of the evaluation's JSON.

Latencies are those of whole answers; refused and broken ones count as missed targets and in `requestsFailed`, so that
refusing never makes a policy look fast. Goodput is the answers that met both targets of their class over the time from
the first arrival to the last finish. All times are engine seconds. A percentile is joined linearly between records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvantile_optimizer.local.records import Record
from kvantile_optimizer.plan import Plan, PlanSlo

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
    targets = {item.name: item.slo for item in run.plan.classes}
    met = sum(meets(record, targets) for record in run.records)
    ttft = [record.ttft_s for record in run.records if record.ttft_s is not None]
    tpot = [record.tpot_s for record in run.records if not record.error and record.tpot_s is not None]
    e2e = [record.e2e_s for record in run.records if record.e2e_s is not None]
    count = max(1, len(run.records))
    return {
        "policy": run.policy,
        "form": _common([route.form for route in run.plan.routes]),
        "order": _common([route.order for route in run.plan.routes]),
        "costUSDPerHour": run.plan.costs.gpu,
        "gpuUSDPerHour": run.plan.costs.gpu,
        "gpus": run.plan.gpu_count,
        "requests": len(run.records),
        "requestsFailed": sum(bool(record.error) for record in run.records),
        "ttftP50Seconds": percentile(ttft, 50),
        "ttftP99Seconds": percentile(ttft, 99),
        "tpotP99Seconds": percentile(tpot, 99),
        "e2eP99Seconds": percentile(e2e, 99),
        "goodputRequestsPerSecond": met / span_s(run.records) if run.records else 0.0,
        "sloViolationFraction": 1 - met / count,
        "preemptions": run.preemptions,
        "preemptionsPerRequest": run.preemptions / count,
        "replicaRestarts": run.restarts,
        "sentLateP99Seconds": percentile([record.sent_s - record.request.arrival_s for record in run.records], 99),
    }


def meets(record: Record, targets: Mapping[str, PlanSlo]) -> bool:
    """Whether an answer is whole and met both targets of its class."""
    slo = targets[record.request.class_name]
    on_time = record.ttft_s is not None and record.ttft_s <= slo.ttft_seconds
    return not record.error and on_time and (record.tpot_s or 0.0) <= slo.tpot_seconds


def span_s(records: Sequence[Record]) -> float:
    """From the first arrival to the last finish, never quite zero."""
    return max(last_s(records) - min(record.sent_s for record in records), 1e-9)


def last_s(records: Sequence[Record]) -> float:
    """When the last answer ended; a refused request ends when it was sent."""
    return max((record.sent_s if record.last_s is None else record.last_s for record in records), default=0.0)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """None where nothing was measured."""
    return float(np.percentile(values, percent)) if values else None


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
