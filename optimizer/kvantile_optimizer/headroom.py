"""How near a group comes to its limits, with the replicas it has or with fewer: from the plan's own figures.

Load moves as the inverse of the replicas that share it. Times stretch as 1 / (1 - load), and so does the KV in use on
top of its load: with a step T = alpha + beta B + gamma context + delta prefill, TPOT = alpha / (1 - rho) and KV in use
= alpha lambda f / (n (1 - rho)), docs/model.md, "Load". The percentiles are stretched like the means, which is a little
too kind to fewer replicas: their tails are wider. So these figures explain a plan; they do not make one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from kvantile_optimizer.plan import Group, GroupPrediction, Plan, Route


class Limit(StrEnum):
    """What a replica has only so much of."""

    LOAD = "load"
    """Engine seconds a second."""
    TPOT = "tpot"
    TTFT = "ttft"
    KV = "kv"
    SEQUENCES = "sequences"


@dataclass(frozen=True, slots=True)
class Use:
    """How much of a limit is used; seconds, tokens or sequences, at the percentile that is planned for."""

    limit: Limit
    used: float
    """Infinite where the queue grows without end."""
    allowed: float
    class_name: str = ""
    """Whose target it is, of the two times."""

    @property
    def share(self) -> float:
        """Above 1 it is missed."""
        return self.used / self.allowed


def tightest(plan: Plan, group: Group, replicas: int) -> Use | None:
    """The limit that `group` would come nearest to, or miss by most, with `replicas` for what is routed to it.

    None where nothing is routed to it or predicted of it.
    """
    return max(uses(plan, group, replicas), key=lambda use: use.share, default=None)


def uses(plan: Plan, group: Group, replicas: int) -> list[Use]:
    """How much of each limit `group` would use with `replicas`; load alone where that is 1 or more."""
    seen = next((item for item in plan.group_predictions if item.group == group.name), None)
    routes = [route for route in plan.routes if route.group == group.name and route.fraction > 0]
    if seen is None or not routes or not group.replicas or replicas < 1:
        return []
    crowding = group.replicas / replicas
    load = seen.utilisation * crowding
    if load >= 1:
        return [Use(Limit.LOAD, load, 1.0)]
    stretch = (1 - seen.utilisation) / (1 - load)
    return [
        Use(Limit.LOAD, load, 1.0),
        *_times(plan, routes, stretch),
        Use(Limit.KV, seen.kv_p99_tokens * crowding * stretch, group.kv_tokens),
        Use(Limit.SEQUENCES, _sequences(plan, group, routes, seen) * crowding * stretch, group.max_num_seqs),
    ]


def _times(plan: Plan, routes: list[Route], stretch: float) -> list[Use]:
    names = {route.class_ for route in routes}
    targets = {item.name: item.slo for item in plan.classes}
    found = []
    for seen in plan.predictions:
        if seen.class_ in names:
            slo = targets[seen.class_]
            found.append(Use(Limit.TPOT, seen.tpot_seconds * stretch, slo.tpot_seconds, seen.class_))
            found.append(Use(Limit.TTFT, seen.ttft_seconds * stretch, slo.ttft_seconds, seen.class_))
    return found


def _sequences(plan: Plan, group: Group, routes: list[Route], seen: GroupPrediction) -> float:
    """P99 of the sequences that decode at once on a replica: their mean by Little's law, times the tail of the KV."""
    rates = {item.name: item.requests_per_second for item in plan.classes}
    per_token_s = group.step_time.alpha / max(1 - seen.utilisation, 1e-9)
    mean = sum(rates[route.class_] * route.fraction * route.mean_tokens * per_token_s for route in routes)
    tail = seen.kv_p99_tokens / seen.kv_mean_tokens if seen.kv_mean_tokens > 0 else 1.0
    return mean / group.replicas * (tail if math.isfinite(tail) else 1.0)
