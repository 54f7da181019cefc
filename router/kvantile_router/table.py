"""What the gateway routes by: a plan, made ready for looking things up per request.

A table is made once per plan and replaced as a whole, so a request sees one plan from start to end. A class that the
plan routes nowhere is served all the same while there is room: by every group in proportion to its memory, with
nothing reserved.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvantile_optimizer.plan import Group, Plan, PlanClass, Route
from kvantile_optimizer.waiting import Order
from kvantile_router.classify import Facts, classify
from kvantile_router.reserve import Size, can_hold
from kvantile_router.routing import Shares


@dataclass(frozen=True, slots=True)
class ClassRoutes:
    """A class with its routes by group and the books of its fractions."""

    rules: PlanClass
    routes: dict[str, Route]
    shares: Shares
    order: Order

    @property
    def name(self) -> str:
        """The class's name."""
        return self.rules.name


class Table:
    """A plan by names."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.groups: dict[str, Group] = {group.name: group for group in plan.groups}
        self.classes: dict[str, ClassRoutes] = {item.name: self._routes(item) for item in plan.classes}
        self.default = next(self.classes[item.name] for item in plan.classes if item.default)

    @property
    def model(self) -> str:
        """What clients call the model."""
        return self.plan.model.served_name

    def classify(self, facts: Facts) -> ClassRoutes:
        """The class of a request."""
        found = classify(self.plan.classes, facts, header_allowed=self.plan.router.allow_class_header)
        return self.classes[found.name]

    def routes_of(self, name: str) -> ClassRoutes:
        """The class of that name; of one that a newer plan lacks, the default."""
        return self.classes.get(name, self.default)

    def holds(self, group: str, size: Size) -> bool:
        """Whether a replica of the group could ever serve a request of that size."""
        return can_hold(self.groups[group], self.plan.model.max_model_len, size)

    def prefill_s(self, routes: ClassRoutes, prompt_tokens: int) -> float:
        """How long the fastest of the class's groups takes for a prompt when it does nothing else."""
        steps = [self.groups[name].step_time for name in routes.routes]
        return min((step.alpha + step.delta * prompt_tokens for step in steps), default=0.0)

    def _routes(self, item: PlanClass) -> ClassRoutes:
        routes = {route.group: route for route in self.plan.routes_of(item.name)}
        if not routes:
            routes = {group.name: _unplanned(item.name, group) for group in self.plan.groups}
        fractions = {name: route.fraction for name, route in routes.items()}
        if not any(self.plan.routes_of(item.name)):
            fractions = {group.name: float(group.kv_tokens * max(1, group.replicas)) for group in self.plan.groups}
        order: Order = next((route.order for route in routes.values()), "fcfs")
        return ClassRoutes(item, routes, Shares(fractions), order)


def _unplanned(class_name: str, group: Group) -> Route:
    return Route(class_=class_name, group=group.name, fraction=1.0, reserve_tokens=0)
