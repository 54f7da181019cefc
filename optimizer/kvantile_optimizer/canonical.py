"""An order of classes and pools that does not depend on how they are listed or called.

A search goes other ways on the same problem in another order, and may end at another plan within its gap. So problems
are solved in one order, by what classes and pools are, and names decide only between those that are the same; the plan
is then told in the spec's order again.
"""

from __future__ import annotations

from kvantile_optimizer import candidates
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.spec import NodePool, RequestClass, ServingPlan
from kvantile_optimizer.workload import Workload


def ordered(serving_plan: ServingPlan, workloads: list[Workload]) -> tuple[ServingPlan, list[Workload]]:
    """The same with classes and pools in their own order; `workloads` are one for each class.

    Raises InputError, a line for each fault, for workloads that are none, and for a GPU that nobody knows.
    """
    spec = serving_plan.spec
    # Before they are moved, so that a fault has its own place.
    candidates.pools(spec.node_pools)
    _check(serving_plan, workloads)
    pairs = sorted(zip(spec.classes, workloads, strict=True), key=lambda pair: _class_key(*pair))
    changed = {
        "classes": [item for item, _ in pairs],
        "node_pools": sorted(spec.node_pools, key=_pool_key),
    }
    plan = serving_plan.model_copy(update={"spec": spec.model_copy(update=changed)})
    return plan, [workload for _, workload in pairs]


def as_asked(plan: Plan, serving_plan: ServingPlan) -> Plan:
    """A plan with everything of a class in the order of the spec's classes."""
    place = {item.name: index for index, item in enumerate(serving_plan.spec.classes)}
    return plan.model_copy(
        update={
            "classes": sorted(plan.classes, key=lambda item: place[item.name]),
            "routes": sorted(plan.routes, key=lambda item: place[item.class_]),
            "predictions": sorted(plan.predictions, key=lambda item: place[item.class_]),
            "unserved": sorted(plan.unserved, key=lambda item: place[item.class_]),
            "resident_prefixes": sorted(plan.resident_prefixes, key=lambda item: place[item.class_]),
        }
    )


def _check(serving_plan: ServingPlan, workloads: list[Workload]) -> None:
    count = len(serving_plan.spec.classes)
    if len(workloads) != count:
        raise InputError(f"workloads: found {len(workloads)}, allowed {count}, one for each class")
    if faults := [fault for workload in workloads for fault in workload.faults]:
        raise InputError("\n".join(faults))


def _class_key(item: RequestClass, workload: Workload) -> tuple[float | str, ...]:
    slo = item.slo
    return (
        slo.tpot_milliseconds,
        slo.ttft_milliseconds,
        slo.percentile,
        workload.requests_per_second,
        workload.burstiness,
        workload.expect(workload.prompt),
        workload.expect(workload.output),
        workload.upper,
        workload.prefix_tokens,
        workload.prefix_share,
        item.robustness.radius if item.robustness else "",
        item.name,
    )


def _pool_key(pool: NodePool) -> tuple[float | str, ...]:
    limit = float("inf") if pool.max_gpus is None else pool.max_gpus
    return pool.gpu.type, pool.gpu.per_node, limit, pool.price_per_gpu_hour or "", pool.name
