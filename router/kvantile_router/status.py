"""What the gateway tells about itself as JSON: the plan with what became of it, and the model."""

from __future__ import annotations

from typing import Any

from kvantile_router.fleet import Fleet, Replica
from kvantile_router.table import Table


def plan_json(table: Table, fleet: Fleet) -> dict[str, Any]:
    """The plan as it came, with `realised` (shares of each class since the plan came) and `replicas` beside it."""
    replicas = list(fleet)
    return table.plan.to_json() | {
        "realised": [entry for name in table.classes for entry in _realised(table, name)],
        "replicas": [_replica(replica, fleet) for replica in replicas],
        "inFlightRequests": sum(replica.requests for replica in replicas),
        "reservedTokens": sum(replica.tokens for replica in replicas),
    }


def _realised(table: Table, name: str) -> list[dict[str, Any]]:
    shares = table.classes[name].shares
    fractions = shares.realised()
    return [
        {"class": name, "group": group, "fraction": fractions[group], "requests": count}
        for group, count in shares.counts.items()
    ]


def _replica(replica: Replica, fleet: Fleet) -> dict[str, Any]:
    return {
        "group": replica.group,
        "url": replica.url,
        "ready": replica.ready,
        "breakerOpen": fleet.breaker_is_open(replica),
        "inFlightRequests": replica.requests,
        "reservedTokens": replica.tokens,
    }


def models_json(table: Table) -> dict[str, Any]:
    """The served model as an entry of the models list."""
    model = table.plan.model
    return {
        "id": model.served_name,
        "object": "model",
        "created": 0,
        "owned_by": "kvantile",
        "root": model.name,
        "max_model_len": model.max_model_len,
    }
