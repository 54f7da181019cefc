"""Small plans for tests; give only what the test is about."""

from __future__ import annotations

from typing import Any

from kvantile_optimizer.plan import Plan
from tests.support.replica import MODEL

STEP_TIME = {"alpha": 0.01, "beta": 0.0001, "gamma": 1e-8, "delta": 1e-5}


def make_group(name: str = "g", **given: Any) -> dict[str, Any]:
    """A group in the plan's JSON."""
    return {"name": name, "pool": "p", "kvTokens": 10_000, "maxNumSeqs": 64, "stepTime": STEP_TIME} | given


def make_class(name: str = "chat", **given: Any) -> dict[str, Any]:
    """A class; the default one unless it has rules."""
    slo = {"ttftSeconds": 1.0, "tpotSeconds": 0.05}
    return {"name": name, "default": "match" not in given, "slo": slo} | given


def make_route(class_name: str = "chat", group: str = "g", **given: Any) -> dict[str, Any]:
    """A route: everything, 100 tokens, pooled at a tenth, slack order."""
    usual = {"fraction": 1.0, "reserveTokens": 100, "form": "pooled", "poolingFraction": 0.1, "order": "slack"}
    return {"class": class_name, "group": group} | usual | given


def make_plan(
    *,
    groups: list[dict[str, Any]] | None = None,
    classes: list[dict[str, Any]] | None = None,
    routes: list[dict[str, Any]] | None = None,
    **given: Any,
) -> Plan:
    """A plan: one group, one class and a route between them, unless said otherwise."""
    return Plan.model_validate(
        {
            "plan": {"name": "test", "namespace": "default"},
            "model": {"name": "org/model", "servedName": MODEL, "maxModelLen": 4096},
            "groups": [make_group()] if groups is None else groups,
            "classes": [make_class()] if classes is None else classes,
            "routes": [make_route()] if routes is None else routes,
        }
        | given
    )
