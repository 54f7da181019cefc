"""The way from one plan to the next: never more GPUs than there are, and nobody without a group who need not be."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvantile_optimizer.change import interruptions, steps, with_steps
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.plan import Group, Plan, Step
from tests.support.plans import make_class, make_group, make_plan, make_route
from tests.support.specs import make_pool, make_serving_plan

PER_NODE = {"p": 4, "q": 8}
Part = tuple[str, str, int, int]
"""Name, pool, GPUs of a replica, most sequences."""


def fleet(*groups: dict[str, Any], routes: dict[str, str] | None = None, rates: dict[str, float] | None = None) -> Plan:
    """A plan of `groups`; `routes` say which groups (by name, space between) each class uses, all `a` unless given."""
    routes = {"a": " ".join(group["name"] for group in groups)} if routes is None else routes
    return make_plan(
        groups=list(groups),
        classes=[
            make_class(name, default=number == 0, requestsPerSecond=(rates or {}).get(name, 1.0))
            for number, name in enumerate("abc")
        ],
        routes=[
            make_route(name, group, fraction=1 / len(used.split()), order="fcfs")
            for name, used in routes.items()
            for group in used.split()
        ],
    )


def group(name: str, replicas: int, tp: int = 1, **given: Any) -> dict[str, Any]:
    return make_group(name, replicas=replicas, tensorParallel=tp, gpus=replicas * tp, **given)


def told(found: list[Step]) -> list[str]:
    """The steps in short: action, group, replicas after it."""
    return [f"{step.action} {step.group} {step.replicas}" for step in found]


def test_new_groups_start_before_old_ones_stop_where_there_is_room() -> None:
    found = steps(fleet(group("old", 2)), fleet(group("new", 2)), {"p": 4})
    assert told(found) == ["start new 2", "route new 2", "drain old 0", "stop old 0"]
    assert [step.gpus_in_use["p"] for step in found] == [4, 4, 4, 2]


def test_without_room_one_replica_makes_room_for_the_next() -> None:
    found = steps(fleet(group("old", 2)), fleet(group("new", 2)), {"p": 2})
    once = ["drain old 1", "stop old 1", "start new 1", "route new 1"]
    assert told(found) == [*once, "drain old 0", "stop old 0", "start new 2", "route new 2"]
    assert not any(step.uncovered for step in found)


def test_large_groups_make_room_a_quarter_at_a_time() -> None:
    found = steps(fleet(group("old", 8)), fleet(group("new", 8)), {"p": 8})
    assert [step.replicas for step in found if step.action == "start"] == [1, 3, 5, 7, 8]
    assert all(step.gpus_in_use["p"] >= 6 for step in found)


def test_a_lone_replica_without_room_is_said_to_interrupt_its_class() -> None:
    found = steps(fleet(group("old", 1, tp=4)), fleet(group("new", 1, tp=4)), {"p": 6})
    assert told(found)[:2] == ["drain old 0", "stop old 0"]
    assert [step.uncovered for step in found] == [["a"], ["a"], ["a"], []]
    (told_to_a_person,) = interruptions(found)
    assert told_to_a_person.startswith("class a has no ready group from step 1 until after step 3 of the change")


def test_of_two_classes_that_cannot_both_stay_the_one_with_less_traffic_is_interrupted() -> None:
    old = fleet(group("x", 1), group("y", 1), routes={"a": "x", "b": "y"}, rates={"a": 9.0, "b": 1.0})
    new = fleet(group("v", 1), group("w", 1), routes={"a": "v", "b": "w"}, rates={"a": 9.0, "b": 1.0})
    found = steps(old, new, {"p": 2})
    assert {name for step in found for name in step.uncovered} == {"b"}


def test_a_group_with_other_engine_arguments_is_replaced_and_an_unchanged_one_kept() -> None:
    old, new = fleet(group("x", 1), group("y", 1)), fleet(group("x", 1), group("y", 1, maxNumSeqs=32))
    found = steps(old, new, {"p": 3})
    assert {step.group for step in found} == {"y"}
    assert [(step.action, step.plan) for step in found] == [
        ("start", "target"),
        ("route", "target"),
        ("drain", "running"),
        ("stop", "running"),
    ]


def test_another_model_or_order_replaces_every_group() -> None:
    old = fleet(group("x", 1))
    model = {**old.to_json(), "model": {"name": "org/other", "servedName": "m", "maxModelLen": 4096}}
    ordered = {**old.to_json(), "routes": [make_route("a", "x", order="slack")]}
    for changed in (model, ordered):
        found = steps(old, Plan.model_validate(changed), {"p": 2})
        assert told(found) == ["start x 1", "route x 1", "drain x 0", "stop x 0"]


def test_routes_alone_are_one_step_and_estimates_none() -> None:
    old = fleet(group("x", 1))
    routed = {**old.to_json(), "routes": [make_route("a", "x", order="fcfs", reserveTokens=64)]}
    assert told(steps(old, Plan.model_validate(routed), {"p": 1})) == ["route x 1"]
    assert steps(old, fleet(group("x", 1, kvTokens=9_999, tailMargin=1.5)), {"p": 1}) == []


def test_a_class_moves_to_a_group_that_stays_before_its_own_stops() -> None:
    old = fleet(group("x", 1), group("y", 1), routes={"a": "x", "b": "y"})
    found = steps(old, fleet(group("x", 1), routes={"a": "x", "b": "x"}), {"p": 2})
    assert told(found) == ["route x 1", "drain y 0", "stop y 0"]


def test_replicas_come_and_go_within_a_group() -> None:
    assert told(steps(fleet(group("x", 1)), fleet(group("x", 3)), {"p": 3})) == ["start x 3", "route x 3"]
    assert told(steps(fleet(group("x", 3)), fleet(group("x", 1)), {"p": 3})) == ["drain x 1", "stop x 1"]


def test_a_first_plan_starts_everything() -> None:
    assert told(steps(None, fleet(group("x", 2)), {})) == ["start x 2", "route x 2"]


def test_what_others_take_counts() -> None:
    old, new = fleet(group("old", 1)), fleet(group("new", 1))
    assert told(steps(old, new, {"p": 2}))[0] == "start new 1"
    assert told(steps(old, new, {"p": 2}, {"p": 1}))[0] == "drain old 0"


def test_a_plan_that_does_not_fit_is_refused_by_the_pools_name() -> None:
    with pytest.raises(InputError, match=r"^pool p: found a plan that needs 2 GPUs, allowed 1: plan anew$"):
        steps(None, fleet(group("x", 2)), {"p": 2}, {"p": 1})
    with pytest.raises(InputError, match="on nodes of 2"):
        steps(None, fleet(group("x", 1, tp=4)), {"p": 4}, per_node={"p": 2})


def test_nodes_limit_what_fits_beside_the_old() -> None:
    old, new = fleet(group("old", 2, tp=2)), fleet(group("new", 1, tp=2))
    assert told(steps(old, new, {"p": 6}))[0] == "start new 1"
    assert told(steps(old, new, {"p": 6}, per_node={"p": 3}))[:2] == ["drain old 1", "stop old 1"]


def test_steps_come_with_the_plan_and_interruptions_with_its_warnings() -> None:
    serving_plan = make_serving_plan(pools=[make_pool("p", maxGPUs=1)])
    plan = with_steps(fleet(group("new", 1)), fleet(group("old", 1)), serving_plan)
    assert [step["action"] for step in plan.to_json()["steps"]] == ["drain", "stop", "start", "route"]
    assert plan.warnings[-1].startswith("class a has no ready group from step 1")
    assert Plan.model_validate(plan.to_json()) == plan


@st.composite
def _fleets(draw: st.DrawFn) -> Plan:
    names = draw(st.lists(st.sampled_from("uvwx"), unique=True, min_size=1, max_size=3))
    groups = [
        group(
            name,
            draw(st.integers(1, 3)),
            tp=draw(st.sampled_from([1, 2, 4])),
            maxNumSeqs=draw(st.sampled_from([32, 64])),
            pool=draw(st.sampled_from("pq")),
        )
        for name in names
    ]
    routes = {
        item: " ".join(draw(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=2)))
        for item in draw(st.lists(st.sampled_from("abc"), unique=True))
    }
    return fleet(*groups, routes=routes)


@st.composite
def _changes(draw: st.DrawFn) -> tuple[Plan, Plan, dict[str, int]]:
    """Two fleets, and the GPUs of pools that hold either of them, with some to spare."""
    running, target = draw(_fleets()), draw(_fleets())
    limits = {pool: draw(st.integers(0, 12)) for pool in PER_NODE}
    while not all(_holds(_counted(plan), limits) for plan in (running, target)):
        limits = {pool: limit + 1 for pool, limit in limits.items()}
    return running, target, limits


def _counted(plan: Plan) -> Counter[Part]:
    return Counter({_part(group): group.replicas for group in plan.groups})


def _part(group: Group) -> Part:
    return group.name, group.pool, group.tensor_parallel, group.max_num_seqs


def _holds(counts: Counter[Part], limits: dict[str, int]) -> bool:
    """Places replicas on nodes one by one, the largest first: for powers of two nobody can do better."""
    for pool, limit in limits.items():
        node = PER_NODE[pool]
        free = [node] * (limit // node) + [limit % node]
        for size in sorted((part[2] for part in counts.elements() if part[1] == pool), reverse=True):
            place = next((index for index, room in enumerate(free) if room >= size), None)
            if place is None:
                return False
            free[place] -= size
    return True


class Walk:
    """Follows steps and knows at each what exists, what is ready, and which classes have no group."""

    def __init__(self, running: Plan, target: Plan) -> None:
        self.plans = {"running": running, "target": target}
        self.exist, self.ready = _counted(running), _counted(running)
        self.serves: dict[Part, set[str]] = {}
        for plan in (running, target):
            for item in plan.groups:
                mine = {route.class_ for route in plan.routes if route.group == item.name}
                self.serves.setdefault(_part(item), set()).update(mine)
        self.needed = self.covered(_counted(running)) & self.covered(_counted(target))

    def covered(self, counts: Counter[Part]) -> set[str]:
        return {name for part, count in counts.items() if count for name in self.serves[part]}

    def take(self, step: Step) -> None:
        counts = self.exist if step.action in {"start", "stop"} else self.ready
        counts[_part(self.plans[step.plan].group(step.group))] = step.replicas

    def in_use(self) -> dict[str, int]:
        used = dict.fromkeys(PER_NODE, 0)
        for (_, pool, size, _), count in self.exist.items():
            used[pool] += size * count
        return used

    def could_cover_all_along(self, limits: dict[str, int]) -> bool:
        """Whether any order of single starts and stops leaves no class without a group: all are tried."""
        goal, first = _counted(self.plans["target"]), _counted(self.plans["running"])
        seen, waiting = set(), [first]
        while waiting:
            counts = waiting.pop()
            if +counts == +goal:
                return True
            for part in self.serves:
                way = (goal[part] > counts[part]) - (goal[part] < counts[part])
                after = Counter({**counts, part: counts[part] + way})
                key = tuple(after[other] for other in self.serves)
                if way and key not in seen and self.needed <= self.covered(after) and _holds(after, limits):
                    seen.add(key)
                    waiting.append(after)
        return False


@settings(max_examples=200, deadline=None, derandomize=True)
@given(_changes())
def test_no_step_uses_more_than_there_is_or_leaves_a_class_alone_without_need(
    change: tuple[Plan, Plan, dict[str, int]],
) -> None:
    running, target, limits = change
    found = steps(running, target, limits, per_node=PER_NODE)
    walk = Walk(running, target)
    for step in found:
        walk.take(step)
        assert _holds(walk.exist, limits)
        assert walk.exist >= walk.ready
        used = walk.in_use()
        assert all(used[pool] == step.gpus_in_use.get(pool, 0) for pool in limits)
        assert set(step.uncovered) == walk.needed - walk.covered(walk.ready)
    assert +walk.exist == +walk.ready == +_counted(target)
    if any(step.uncovered for step in found):
        assert not walk.could_cover_all_along(limits)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(_fleets(), _fleets())
def test_a_fleet_beyond_what_others_leave_does_not_grow_before_it_fits(running: Plan, target: Plan) -> None:
    limits = dict.fromkeys(PER_NODE, 0)
    while not _holds(_counted(target), limits):
        limits = {pool: limit + 1 for pool, limit in limits.items()}
    walk = Walk(running, target)
    for step in steps(running, target, limits, per_node=PER_NODE):
        before = walk.in_use()
        walk.take(step)
        grown = [pool for pool, count in walk.in_use().items() if count > before[pool]]
        assert all(_holds(walk.exist, {pool: limits[pool]}) for pool in grown)
    assert +walk.exist == +_counted(target)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(_fleets())
def test_equal_plans_need_no_steps(plan: Plan) -> None:
    assert steps(plan, plan, {}) == []
