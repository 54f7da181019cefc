"""The plan as its rehearsal leaves it: routes and predictions of what was played, untouched where nothing was."""

from __future__ import annotations

from collections.abc import Mapping

from kvantile_optimizer.plan import Plan, Prediction, Route
from kvantile_optimizer.rehearsal import predictions
from kvantile_optimizer.rehearsal.performance import Performance
from kvantile_optimizer.rehearsal.scene import Manner, Part


def routed(plan: Plan, played: Mapping[str, Performance]) -> Plan:
    """`plan` with what `played`, by group, chose for its routes."""
    routes = {
        (part.item.name, name): _route(part, found.manner, tokens)
        for name, found in played.items()
        for part, tokens in zip(found.scene.parts, found.manner.reserve, strict=True)
    }
    return plan.model_copy(update={"routes": [routes.get((route.class_, route.group), route) for route in plan.routes]})


def predicted(plan: Plan, played: Mapping[str, Performance]) -> Plan:
    """`plan` with what `played`, by group, shows its classes and groups."""
    told = {name: predictions.of_group(found.scene, found.takes) for name, found in played.items()}
    return plan.model_copy(
        update={
            "predictions": [_prediction(plan, before, played) for before in plan.predictions],
            "group_predictions": [told.get(before.group, before) for before in plan.group_predictions],
        }
    )


def _route(part: Part, manner: Manner, tokens: int) -> Route:
    reserves = manner.form != "none"
    return part.route.model_copy(
        update={
            "form": manner.form,
            "pooling_fraction": manner.phi,
            "order": manner.order,
            "reserve_tokens": tokens,
            "priced_tokens": part.route.reserve_tokens,
            "fractile": float(part.workload.lengths.cdf(tokens)) if reserves else 0.0,
        }
    )


def _prediction(plan: Plan, before: Prediction, played: Mapping[str, Performance]) -> Prediction:
    """The class as replayed, if all of its groups were."""
    names = [route.group for route in plan.routes_of(before.class_)]
    if not names or any(name not in played for name in names):
        return before
    item = next(item for item in plan.classes if item.name == before.class_)
    return predictions.of_class(item, [(played[name].scene, played[name].takes) for name in names]) or before
