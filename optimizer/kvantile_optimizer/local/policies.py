"""The policies the demo compares: the plan as it was made, and the same fleet with two usual ways of reserving.

Only what the gateway tells the engine differs. Groups, routes and their fractions are the plan's, so every policy has
the same GPUs and the same requests in the same places.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvantile_optimizer.admission import blocks_for
from kvantile_optimizer.plan import Plan, PlanRouter, Route
from kvantile_optimizer.workload import Lengths

KVANTILE, STOCK, P90_HELD = "kvantile", "stock", "p90"
TITLES = {KVANTILE: "Kvantile's plan", STOCK: "stock vLLM", P90_HELD: "fixed P90, held"}


def variants(plan: Plan, lengths: Mapping[str, Lengths]) -> dict[str, Plan]:
    """The plan of each policy by its name; `lengths` are each class's output lengths."""
    return {
        KVANTILE: _with_routes(plan, list(plan.routes)),
        STOCK: _with_routes(plan, [_stock(route) for route in plan.routes]),
        P90_HELD: _with_routes(plan, [_held(plan, route, lengths[route.class_], 0.9) for route in plan.routes]),
    }


def _with_routes(plan: Plan, routes: list[Route]) -> Plan:
    # A replay knows the class of each row, which no rule could tell from the text it sends.
    return plan.model_copy(update={"routes": routes, "router": PlanRouter(allow_class_header=True)})


def _stock(route: Route) -> Route:
    return route.model_copy(
        update={"form": "none", "order": "fcfs", "reserve_tokens": 0, "fractile": 0.0, "pooling_fraction": 1.0}
    )


def _held(plan: Plan, route: Route, lengths: Lengths, share: float) -> Route:
    block = plan.group(route.group).block_size
    reserve = blocks_for(round(float(lengths.quantile(share))), block) * block
    return route.model_copy(
        update={
            "form": "held",
            "order": "fcfs",
            "reserve_tokens": reserve,
            "fractile": min(1.0, float(lengths.cdf(reserve))),
            "pooling_fraction": 1.0,
        }
    )
