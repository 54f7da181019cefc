"""What a slightly different world would change: one more GPU, a dollar less, 10 ms more, a tenth of the traffic.

Each entry is the plan for that world, solved like the plan itself, never a dual price: replicas are whole, so a price
at the margin says little about a GPU more. What promises to change the cost most is solved first. The time limit is for
all of them together, and one solve may take twice its even share of what is left; what found no plan says so.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from kvantile_optimizer import hardware, planner
from kvantile_optimizer.errors import WorkError
from kvantile_optimizer.plan import Plan, PlanSlo, Route, Sensitivity
from kvantile_optimizer.spec import NodePool, RequestClass, ServingPlan
from kvantile_optimizer.workload import Workload

MOST = 200
"""Entries; of a thousand classes the most promising ones are listed."""
MORE_MILLISECONDS = 10
TRAFFIC_SHARES = ((0.9, "less"), (1.1, "more"))
TARGETS: tuple[tuple[str, str, Callable[[PlanSlo], float]], ...] = (
    ("TTFT", "ttft_milliseconds", lambda slo: slo.ttft_seconds),
    ("TPOT", "tpot_milliseconds", lambda slo: slo.tpot_seconds),
)
"""What each is called, its field in the spec, and how to read it in a plan."""
SHARE_OF_LEFT = 2.0
"""Times its even share of the time left that one solve may take: most end long before."""

Progress = Callable[[int, int, str], None]
"""Told before each solve: how many are done, of how many, and what comes next."""


@dataclass(frozen=True, slots=True)
class Variation:
    """A world to plan for."""

    change: str
    serving_plan: ServingPlan
    workloads: list[Workload]
    promise: float
    """US dollars per hour that it may be worth, roughly: the most promising is solved first."""


def sensitivities(
    plan: Plan,
    serving_plan: ServingPlan,
    workloads: list[Workload],
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    current: Plan | None = None,
    progress: Progress = lambda done, total, change: None,  # noqa: ARG005 - named for those who call it
) -> list[Sensitivity]:
    """What would change against `plan`, which was made from the same arguments; the most promising first."""
    ends = time.perf_counter() + time_limit_s
    found, base = variations(plan, serving_plan, workloads), _unserved(plan)
    entries = []
    for number, variation in enumerate(found):
        left_s = ends - time.perf_counter()
        progress(number, len(found), variation.change)
        limit_s = min(left_s, SHARE_OF_LEFT * left_s / (len(found) - number))
        other = _solved(variation, plan, limit_s, seed, current) if left_s > 0 else None
        entries.append(_entry(variation.change, plan, base, other))
    return entries


def _solved(variation: Variation, plan: Plan, time_limit_s: float, seed: int, current: Plan | None) -> Plan | None:
    try:
        other = planner.make_plan(
            variation.serving_plan,
            variation.workloads,
            time_limit_s=time_limit_s,
            seed=seed,
            current=current,
            rehearsed=False,
            like=plan,
        )
    except WorkError:
        # The time was over before any plan, or the solver gave up: the entry says that there is none.
        return None
    return None if planner.STANDS in other.warnings else other


def _entry(change: str, plan: Plan, base: float, other: Plan | None) -> Sensitivity:
    if other is None:
        return Sensitivity(change=change, status="unsolved")
    return Sensitivity(
        change=change,
        status=other.status,
        objective_usd_per_hour=other.objective_usd_per_hour,
        delta_usd_per_hour=other.objective_usd_per_hour - plan.objective_usd_per_hour,
        unserved_fraction_delta=_unserved(other) - base,
        gpus=other.gpu_count,
    )


def _unserved(plan: Plan) -> float:
    """Share of all requests that the plan does not serve."""
    rates = {item.name: item.requests_per_second for item in plan.classes}
    total = sum(rates.values())
    return sum(rates[entry.class_] * entry.fraction for entry in plan.unserved) / total if total else 0.0


def variations(plan: Plan, serving_plan: ServingPlan, workloads: list[Workload]) -> list[Variation]:
    """The worlds worth asking about, the most promising first, in the spec's order where they promise the same."""
    found = [
        *_more_gpus(plan, serving_plan, workloads),
        *_cheaper(plan, serving_plan, workloads),
        *_looser(plan, serving_plan, workloads),
        *_traffic(plan, serving_plan, workloads),
    ]
    return sorted(found, key=lambda variation: -variation.promise)[:MOST]


def _more_gpus(plan: Plan, serving_plan: ServingPlan, workloads: list[Workload]) -> Iterator[Variation]:
    """One more GPU in each pool that has a limit."""
    short = any(entry.constraint == "gpus" for entry in plan.unserved)
    for index, pool in enumerate(serving_plan.spec.node_pools):
        if pool.max_gpus is None:
            continue
        price, used = float(_price(pool, index)), _gpus_in(plan, pool.name)
        full = used >= pool.max_gpus
        # Traffic that nobody serves comes before money, and what is not used up rarely matters.
        promise = 2 * plan.objective_usd_per_hour + price if short else price if full else 0.0
        more = _with_pool(serving_plan, index, max_gpus=pool.max_gpus + 1)
        yield Variation(f"one more GPU in pool {pool.name}", more, workloads, promise)


def _cheaper(plan: Plan, serving_plan: ServingPlan, workloads: list[Workload]) -> Iterator[Variation]:
    """A GPU-hour of each pool for a dollar less, or for half where it costs no two dollars."""
    for index, pool in enumerate(serving_plan.spec.node_pools):
        price = _price(pool, index)
        less = min(Decimal(1), price / 2)
        cheaper = _with_pool(serving_plan, index, price_per_gpu_hour=f"{price - less:.6f}")
        promise = float(less) * _gpus_in(plan, pool.name)
        yield Variation(f"a GPU-hour of pool {pool.name} for ${less:.2f} less", cheaper, workloads, promise)


def _looser(plan: Plan, serving_plan: ServingPlan, workloads: list[Workload]) -> Iterator[Variation]:
    """10 ms more for each target that binds."""
    for target, field, seconds in TARGETS:
        bound = _bound_by(plan, seconds)
        for index, item in enumerate(serving_plan.spec.classes):
            if item.name not in bound:
                continue
            now = getattr(item.slo, field)
            slo = item.slo.model_copy(update={field: now + MORE_MILLISECONDS})
            looser = _with_class(serving_plan, index, item.model_copy(update={"slo": slo}))
            change = f"{target} of {item.name} {now + MORE_MILLISECONDS} ms instead of {now} ms"
            yield Variation(change, looser, workloads, bound[item.name] * MORE_MILLISECONDS / now)


def _bound_by(plan: Plan, target: Callable[[PlanSlo], float]) -> dict[str, float]:
    """By class whose target binds: US dollars per hour of the groups on which nobody has a tighter one.

    A class that is not served wholly is bound by its targets in any case.
    """
    targets = {item.name: target(item.slo) for item in plan.classes}
    bound: dict[str, float] = defaultdict(float)
    for group, routes in _routes_by_group(plan).items():
        tightest = min(targets[route.class_] for route in routes)
        for route in routes:
            if targets[route.class_] <= tightest:
                bound[route.class_] += plan.group(group).price_usd_per_hour
    for entry in plan.unserved:
        bound[entry.class_] += plan.objective_usd_per_hour
    return bound


def _traffic(plan: Plan, serving_plan: ServingPlan, workloads: list[Workload]) -> Iterator[Variation]:
    """A tenth less and a tenth more of each class."""
    spent = _spent(plan)
    for index, workload in enumerate(workloads):
        for share, word in TRAFFIC_SHARES:
            other = replace(workload, requests_per_second=share * workload.requests_per_second)
            changed = [*workloads[:index], other, *workloads[index + 1 :]]
            change = f"{100 * abs(1 - share):.0f} % {word} traffic of {workload.name}"
            yield Variation(change, serving_plan, changed, abs(1 - share) * spent[workload.name])


def _spent(plan: Plan) -> dict[str, float]:
    """US dollars per hour of GPUs for each class, by the engine time that it takes of its groups."""
    rates = {item.name: item.requests_per_second for item in plan.classes}
    spent: dict[str, float] = defaultdict(float)
    for group, routes in _routes_by_group(plan).items():
        seconds = [rates[route.class_] * route.fraction * route.engine_seconds_per_request for route in routes]
        for route, own in zip(routes, seconds, strict=True):
            if own > 0:
                spent[route.class_] += plan.group(group).price_usd_per_hour * own / sum(seconds)
    return spent


def _routes_by_group(plan: Plan) -> dict[str, list[Route]]:
    """The routes that carry anything."""
    routes: dict[str, list[Route]] = {}
    for route in plan.routes:
        if route.fraction > 0:
            routes.setdefault(route.group, []).append(route)
    return routes


def _gpus_in(plan: Plan, pool: str) -> int:
    return sum(group.gpus for group in plan.groups if group.pool == pool)


def _price(pool: NodePool, index: int) -> Decimal:
    """US dollars for a GPU-hour."""
    if pool.price_per_gpu_hour is not None:
        return Decimal(pool.price_per_gpu_hour)
    return Decimal(str(hardware.gpu_type(pool.gpu.type, f"spec.nodePools[{index}].gpu.type").price_usd_per_hour))


def _with_pool(serving_plan: ServingPlan, index: int, **changed: Any) -> ServingPlan:  # noqa: ANN401 - of any field
    pools = list(serving_plan.spec.node_pools)
    pools[index] = pools[index].model_copy(update=changed)
    return serving_plan.model_copy(update={"spec": serving_plan.spec.model_copy(update={"node_pools": pools})})


def _with_class(serving_plan: ServingPlan, index: int, item: RequestClass) -> ServingPlan:
    classes = [*serving_plan.spec.classes[:index], item, *serving_plan.spec.classes[index + 1 :]]
    return serving_plan.model_copy(update={"spec": serving_plan.spec.model_copy(update={"classes": classes})})
