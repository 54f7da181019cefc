"""Whether the running plan should give way: what was seen against what was planned for, and what came of that.

Pure. The running plan is looked at again only when the output lengths of some class have drifted. Whether a change is
worth it is the planner's to weigh (it knows the running plan and the hysteresis); here it only counts whether there
is one, and whether it can be served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvantile_optimizer import workload
from kvantile_optimizer.observation import Observations
from kvantile_optimizer.plan import Plan, PlanStatus
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


def adopts(running: Plan, candidate: Plan) -> bool:
    """Whether `candidate` replaces `running`: it serves something, and differently."""
    if candidate.status is PlanStatus.INFEASIBLE or not candidate.groups:
        return False
    return (candidate.groups, candidate.routes) != (running.groups, running.routes)
