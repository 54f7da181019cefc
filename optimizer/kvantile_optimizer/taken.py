"""GPUs of a plan's pools that others use: the plan may only have the rest."""

from __future__ import annotations

from collections.abc import Mapping

from kvantile_optimizer.errors import InputError
from kvantile_optimizer.spec import NodePool, ServingPlan


def without(serving_plan: ServingPlan, taken: Mapping[str, int]) -> ServingPlan:
    """The plan with `taken` GPUs fewer in each pool that is named; an unlimited pool stays unlimited.

    Raises InputError, one line for each fault, for a pool that the plan lacks and for more GPUs than a pool has.
    """
    pools = {pool.name: pool for pool in serving_plan.spec.node_pools}
    faults = [fault for name, count in taken.items() if (fault := _fault(pools, name, count))]
    if faults:
        raise InputError("\n".join(faults))
    left = [_lowered(pool, taken.get(pool.name, 0)) for pool in serving_plan.spec.node_pools]
    return serving_plan.model_copy(update={"spec": serving_plan.spec.model_copy(update={"node_pools": left})})


def _fault(pools: Mapping[str, NodePool], name: str, count: int) -> str | None:
    if name not in pools:
        return f"taken.{name}: found no such pool, allowed {', '.join(pools)}"
    most = pools[name].max_gpus
    if count < 0 or (most is not None and count > most):
        limit = "" if most is None else f" to {most}, the GPUs of the pool"
        return f"taken.{name}: found {count}, allowed 0{limit or ' or more'}"
    return None


def _lowered(pool: NodePool, count: int) -> NodePool:
    return pool if pool.max_gpus is None else pool.model_copy(update={"max_gpus": pool.max_gpus - count})
