"""A plan small enough to run on a laptop: two classes, one group of emulated replicas."""

from __future__ import annotations

from kvantile_optimizer.plan import (
    Form,
    Group,
    Plan,
    PlanClass,
    PlanCosts,
    PlanEngineModel,
    PlanId,
    PlanRouter,
    PlanSlo,
    Route,
    StepTime,
)
from kvantile_optimizer.waiting import Order


def make_group(name: str = "l4", *, replicas: int = 1, kv_tokens: int = 8192) -> Group:
    return Group(
        name=name,
        pool=name,
        replicas=replicas,
        gpus=replicas,
        gpu_type="L4",
        kv_tokens=kv_tokens,
        max_num_seqs=64,
        step_time=StepTime(alpha=0.02, beta=1e-4, gamma=1e-7, delta=1e-4),
        price_usd_per_hour=0.8 * replicas,
    )


def make_route(
    class_name: str, group: str, *, reserve: int = 128, form: Form = "pooled", order: Order = "slack"
) -> Route:
    return Route(
        class_=class_name,
        group=group,
        fraction=1.0,
        reserve_tokens=reserve,
        mean_tokens=60.0,
        fractile=0.9,
        form=form,
        pooling_fraction=0.25,
        order=order,
    )


def make_plan(*groups: Group, generation: int = 0, ttft_seconds: float = 5.0) -> Plan:
    """A plan that sends both classes to the first group."""
    groups = groups or (make_group(),)
    return Plan(
        plan=PlanId(name="small", namespace="default", generation=generation),
        model=PlanEngineModel(name="emulated", served_name="small-model", max_model_len=4096),
        router=PlanRouter(allow_class_header=True),
        classes=[
            PlanClass(name="chat", default=True, slo=PlanSlo(ttft_seconds=ttft_seconds, tpot_seconds=0.2)),
            PlanClass(name="code", slo=PlanSlo(ttft_seconds=ttft_seconds, tpot_seconds=0.2)),
        ],
        groups=list(groups),
        routes=[make_route("chat", groups[0].name), make_route("code", groups[0].name, reserve=64)],
        costs=PlanCosts(gpu=sum(group.price_usd_per_hour for group in groups)),
    )
