"""Whether the running plan should give way: what was seen against what was planned for, and what a change is worth.

Pure. The running plan is looked at again only when the output lengths of some class have drifted. A new plan with the
same replicas costs nothing to adopt, and one that needs more money is needed by the traffic; one that is cheaper must
be so by the hysteresis, or plans would flap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvantile_optimizer import workload
from kvantile_optimizer.observation import Observations
from kvantile_optimizer.plan import Group, Plan, PlanStatus
from kvantile_optimizer.workload import Workload


@dataclass(frozen=True, slots=True)
class Seen:
    """The workloads as the gateway saw them, and the classes whose output lengths have drifted."""

    workloads: list[Workload]
    drifted: list[str]


def seen(planned: Sequence[Workload], observed: Observations, *, observed_traffic: bool) -> Seen:
    """What `observed` says of each planned class; without `observed_traffic` the planned rates stay."""
    workloads: list[Workload] = []
    drifted: list[str] = []
    for prior in planned:
        found = observed.classes.get(prior.name)
        now = workload.of_observation(prior.name, found, prior, observed.since_seconds) if found else prior
        if not observed_traffic:
            now = replace(now, requests_per_second=prior.requests_per_second, burstiness=prior.burstiness)
        if workload.shifted(prior.lengths, now.lengths):
            drifted.append(prior.name)
        workloads.append(now)
    return Seen(workloads, drifted)


def adopts(running: Plan, candidate: Plan, hysteresis_percent: int) -> bool:
    """Whether `candidate` replaces `running`."""
    if candidate.status is PlanStatus.INFEASIBLE or not candidate.groups:
        return False
    if _hardware(running) == _hardware(candidate):
        return candidate.routes != running.routes
    if candidate.costs.gpu > running.costs.gpu:
        return True
    return candidate.costs.gpu <= running.costs.gpu * (1 - hysteresis_percent / 100)


def _hardware(plan: Plan) -> list[Group]:
    return sorted(plan.groups, key=lambda group: group.name)
