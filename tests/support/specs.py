"""ServingPlans for tests: give only what the test is about."""

from __future__ import annotations

from typing import Any

from kvantile_optimizer import planner, workload
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.spec import ServingPlan


def make_class(
    name: str = "chat", rate: float | str = 4.0, *, default: bool = True, **overrides: Any
) -> dict[str, Any]:
    """A class of the spec as it stands in YAML; `ttft`, `tpot` (ms), `prompt` and `output` may be given."""
    return {
        "name": name,
        "default": default,
        "slo": {
            "ttftMilliseconds": overrides.pop("ttft", 3000),
            "tpotMilliseconds": overrides.pop("tpot", 100),
            "percentile": 99,
        },
        "demand": {
            "requestsPerSecond": str(rate),
            "burstiness": str(overrides.pop("burstiness", 1.0)),
            "promptTokens": overrides.pop("prompt", {"p50": 500, "p90": 1600, "p99": 2300, "max": 4000}),
            "outputTokens": overrides.pop("output", {"p50": 240, "p90": 530, "p99": 930, "max": 2000}),
        },
        **overrides,
    }


def make_pool(name: str = "l40s", gpu: str = "L40S", **overrides: Any) -> dict[str, Any]:
    """A node pool of the spec; `per_node` GPUs in a node."""
    return {"name": name, "gpu": {"type": gpu, "perNode": overrides.pop("per_node", 4)}, **overrides}


def make_serving_plan(**overrides: Any) -> ServingPlan:
    """A ServingPlan of Llama-3.1-8B; `classes`, `pools` and any further key of the spec may be given."""
    spec: dict[str, Any] = {
        "model": overrides.pop("model", {"name": "meta-llama/Llama-3.1-8B-Instruct", "maxModelLen": 8192}),
        "nodePools": overrides.pop("pools", None) or [make_pool(), make_pool("l4", "L4"), make_pool("a10g", "A10G")],
        "classes": overrides.pop("classes", None) or [make_class()],
        **overrides,
    }
    return ServingPlan.model_validate(
        {
            "apiVersion": "kvantile.dev/v1alpha1",
            "kind": "ServingPlan",
            "metadata": {"name": "test", "namespace": "default"},
            "spec": spec,
        }
    )


def planned(
    current: Plan | None = None,
    time_limit_s: float = 30.0,
    *,
    rehearsed: bool = False,
    like: Plan | None = None,
    **overrides: Any,
) -> Plan:
    """The plan of `make_serving_plan(**overrides)`, by the closed forms unless `rehearsed`."""
    serving_plan = make_serving_plan(**overrides)
    workloads = workload.of_plan(serving_plan, {})
    return planner.make_plan(
        serving_plan, workloads, current=current, time_limit_s=time_limit_s, rehearsed=rehearsed, like=like
    )
