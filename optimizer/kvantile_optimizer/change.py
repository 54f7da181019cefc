"""From the plan that runs to the next one, in steps that never use more GPUs than there are.

Where there is room, everything new starts before anything old stops. Where there is not, first replicas come before
further ones, in the order that `handover` found, so that no class loses its last ready group before it has a new one;
then room is made for a quarter of a group at once. What gives way is the replica that takes the least served traffic
with it. A group of the same name with other engine arguments is another group: it is replaced, not kept. Steps are
data: who carries them out starts, waits until it is ready, moves requests, waits until they are done, and stops.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from kvantile_optimizer import handover
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.handover import Part, Room
from kvantile_optimizer.plan import Group, Plan, Step
from kvantile_optimizer.spec import ServingPlan

BATCH_SHARE = 0.25
"""Of a group's replicas, started at once where others have to stop first: the usual share of a rolling update. One at
a time would take the least traffic away and, with hundreds of replicas, most of a day."""
NOBODY: Mapping[str, int] = MappingProxyType({})
Action: TypeAlias = Literal["start", "route", "drain", "stop"]
_Key: TypeAlias = tuple[object, ...]


def with_steps(target: Plan, running: Plan, serving_plan: ServingPlan) -> Plan:
    """`target` with the steps that lead to it from `running`, and a warning for each class they interrupt.

    `serving_plan` says what its pools hold, without what others take. Raises InputError where the target does not fit.
    """
    pools = serving_plan.spec.node_pools
    found = steps(
        running,
        target,
        {pool.name: pool.max_gpus for pool in pools},
        per_node={pool.name: pool.gpu.per_node for pool in pools},
    )
    return target.model_copy(update={"steps": found, "warnings": [*target.warnings, *interruptions(found)]})


def steps(
    running: Plan | None,
    target: Plan,
    limits: Mapping[str, int | None],
    taken: Mapping[str, int] = NOBODY,
    *,
    per_node: Mapping[str, int] = NOBODY,
) -> list[Step]:
    """The steps from `running` (nothing, where None) to `target`; none for plans that ask for the same.

    `limits` are the GPUs of each pool, None or absent where unlimited, of which others use `taken`; `per_node` are the
    GPUs of a node, where known. Raises InputError when the target does not fit into what is left.
    """
    room = Room({pool: _left(limit, taken.get(pool, 0)) for pool, limit in limits.items()}, per_node)
    parts = _parts(running, target)
    _check_fits(parts, room)
    change = _Change(parts, room, running, target)
    for move in handover.order(parts, room, change.kept_rates):
        if move.starts:
            change.start(move.part)
        else:
            change.release(move.part)
    while (part := change.next_start()) is not None:
        change.start(part, change.batch(part))
    return change.finish()


def interruptions(found: list[Step]) -> list[str]:
    """A sentence for each class that has no ready group during some steps."""
    spans: dict[str, list[int]] = {}
    for number, step in enumerate(found, start=1):
        for name in step.uncovered:
            spans.setdefault(name, []).append(number)
    return [
        f"class {name} has no ready group from step {numbers[0]} until after step {numbers[-1]} of the change: there "
        "are too few GPUs to start its new group before its old one stops"
        for name, numbers in spans.items()
    ]


def _left(limit: int | None, taken: int) -> int | None:
    return None if limit is None else max(0, limit - taken)


def _check_fits(parts: list[Part], room: Room) -> None:
    goal = [part.target for part in parts]
    for pool in sorted({part.pool for part in parts}):
        size = room.lacking(pool, parts, goal)
        if size is not None:
            used = sum(part.target * part.gpus for part in parts if part.pool == pool)
            where = f", on nodes of {room.per_node[pool]}" if size > 1 else ""
            raise InputError(
                f"pool {pool}: found a plan that needs {used} GPUs, allowed {room.limits[pool]}{where}: plan anew"
            )


def _parts(running: Plan | None, target: Plan) -> list[Part]:
    """What stays or comes, in the target's order, then what leaves."""
    old, new = (_keyed(running) if running else {}), _keyed(target)
    before, after = (_carried(running) if running else {}), _carried(target)
    parts = []
    for key, group in new.items():
        count = old[key].replicas if key in old else 0
        carries = _most(after.get(group.name, {}), before.get(group.name, {}) if key in old else {})
        parts.append(_part(group, "target", count, group.replicas, carries))
    parts += [
        _part(group, "running", group.replicas, 0, before.get(group.name, {}))
        for key, group in old.items()
        if key not in new
    ]
    return [part for part in parts if part.running or part.target]


def _part(group: Group, plan: Literal["running", "target"], before: int, after: int, carries: dict[str, float]) -> Part:
    size, stages = group.tensor_parallel, group.pipeline_parallel
    return Part(group.name, plan, group.pool, size, size * stages, before, after, carries)


def _keyed(plan: Plan) -> dict[_Key, Group]:
    """The groups by what cannot change while a replica runs; the order of admission is an argument of the engine."""
    orders = {route.group: route.order for route in reversed(plan.routes)}
    return {
        (
            group.name,
            group.pool,
            group.gpu_type,
            group.tensor_parallel,
            group.pipeline_parallel,
            group.max_num_seqs,
            group.max_num_batched_tokens,
            group.max_model_len or plan.model.max_model_len,
            orders.get(group.name, "fcfs"),
            plan.model.name,
            plan.model.served_name,
        ): group
        for group in plan.groups
    }


def _carried(plan: Plan) -> dict[str, dict[str, float]]:
    """Requests per second of each class that one replica of each group carries."""
    rates = {item.name: item.requests_per_second for item in plan.classes}
    replicas = {group.name: group.replicas for group in plan.groups}
    carried: dict[str, dict[str, float]] = {}
    for route in plan.routes:
        if route.fraction > 0 and replicas[route.group]:
            share = rates[route.class_] * route.fraction / replicas[route.group]
            carried.setdefault(route.group, {})[route.class_] = share
    return carried


def _most(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    names = dict.fromkeys([*first, *second])
    return {name: max(first.get(name, 0.0), second.get(name, 0.0)) for name in names}


class _Change:
    """The fleet on its way; `found` grows by what is done to it. Counts are by part, in the order of `parts`."""

    def __init__(self, parts: list[Part], room: Room, running: Plan | None, target: Plan) -> None:
        self.parts, self.room = parts, room
        self.by_pool: dict[str, list[int]] = defaultdict(list)
        for index, part in enumerate(parts):
            self.by_pool[part.pool].append(index)
        self.exist = [part.running for part in parts]
        self.ready = [part.running for part in parts]
        # The last replica of a group that leaves stays until the handover releases it.
        self.floor = [max(part.target, 1) for part in parts]
        self.starting: Counter[int] = Counter()
        self.found: list[Step] = []
        self.freed_by: dict[str, str] = {}
        self.gains, self.moved = _moved(parts, running, target)
        self.rates = _rates(running, target)
        self.carried: dict[str, float] = defaultdict(float)
        for part, count in zip(parts, self.ready, strict=True):
            self._carry(part, count)
        self.kept_rates = self._kept_rates()

    def start(self, index: int, count: int = 1) -> None:
        """Starts `count` replicas, after as few have stopped as make room for them."""
        part = self.parts[index]
        drops: Counter[int] = Counter()
        while (size := self._lacking(index, count)) is not None:
            self._flush()
            victim = self._victim(part.pool, size)
            drops[victim] += 1
            self._leave(victim)
        if drops:
            self._stop(drops, f"makes room for {part.name} in pool {part.pool}")
        self.exist[index] += count
        self.starting[index] += count

    def release(self, index: int) -> None:
        """Allows the last replica of a part that leaves to stop."""
        self.floor[index] = 0

    def next_start(self) -> int | None:
        """Where the next replica is to start: where there is room, else where it serves the most for its GPUs."""
        waiting = [index for index, part in enumerate(self.parts) if self.exist[index] < part.target]
        for index in waiting:
            if self._lacking(index) is None:
                return index
        return max(waiting, key=lambda index: self._gain(index) / self.parts[index].gpus, default=None)

    def batch(self, index: int) -> int:
        """How many replicas to start next: one where there is room, else several whose room others make."""
        if self._lacking(index) is None:
            return 1
        part = self.parts[index]
        return min(part.target - self.exist[index], math.ceil(BATCH_SHARE * part.target))

    def finish(self) -> list[Step]:
        """Moves the routes to the target, stops what is not in it, and returns all steps."""
        for index in self.moved:
            self.gains.pop(index, None)
        self._flush()
        for index in self.moved:
            self._note("route", index, self.ready[index], "shares and reservations become the new plan's")
        drops = +Counter({index: self.exist[index] - part.target for index, part in enumerate(self.parts)})
        for index in drops.elements():
            self._leave(index)
        self._stop(drops, "")
        return self.found

    def _lacking(self, index: int, count: int = 1) -> int | None:
        pool = self.parts[index].pool
        mine = self.by_pool[pool]
        counts = [self.exist[other] + (count if other == index else 0) for other in mine]
        return self.room.lacking(pool, [self.parts[other] for other in mine], counts)

    def _victim(self, pool: str, size: int) -> int:
        """The part of `pool`, of at least `size`, whose next replica takes the least served traffic with it."""
        surplus = [
            index
            for index in self.by_pool[pool]
            if self.parts[index].size >= size and self.exist[index] > self.floor[index]
        ]
        return min(surplus, key=lambda index: (self._loss(index) / self.parts[index].gpus, index))

    def _gain(self, index: int) -> float:
        return sum(
            min(self.rates[name], self.carried[name] + share) - min(self.rates[name], self.carried[name])
            for name, share in self.parts[index].carries.items()
        )

    def _loss(self, index: int) -> float:
        return sum(
            min(self.rates[name], self.carried[name]) - min(self.rates[name], self.carried[name] - share)
            for name, share in self.parts[index].carries.items()
        )

    def _carry(self, part: Part, replicas: int) -> None:
        for name, share in part.carries.items():
            self.carried[name] += share * replicas

    def _leave(self, index: int) -> None:
        self.exist[index] -= 1
        self.ready[index] -= 1
        self._carry(self.parts[index], -1)

    def _flush(self) -> None:
        """Writes down what was started since the last stop, and that it takes requests."""
        in_use = self._in_use(self.exist)
        for index, count in self.starting.items():
            in_use[self.parts[index].pool] -= count * self.parts[index].gpus
        for index, count in self.starting.items():
            part = self.parts[index]
            in_use[part.pool] += count * part.gpus
            freed = self.freed_by.get(part.pool)
            reason = f"in the room that stopping {freed} made" if freed else "there is room for it"
            self._note("start", index, self.exist[index], reason, in_use)
        for index, count in self.starting.items():
            self.ready[index] += count
            self._carry(self.parts[index], count)
            self._note("route", index, self.ready[index], f"takes {_listed(self.parts[index].carries)}")
        for index, names in self.gains.items():
            self._note("route", index, self.ready[index], f"takes {_listed(names)} too")
        self.starting.clear()
        self.gains = {}

    def _stop(self, drops: Counter[int], reason: str) -> None:
        in_use = self._in_use(self.exist)
        for index, count in drops.items():
            in_use[self.parts[index].pool] += count * self.parts[index].gpus
        ready = list(self.ready)
        for index, count in drops.items():
            self.ready[index] += count
        for index in drops:
            self.ready[index] = ready[index]
            self._note("drain", index, ready[index], reason or self._why_less(index), in_use)
        for index, count in drops.items():
            part = self.parts[index]
            in_use[part.pool] -= count * part.gpus
            self.freed_by[part.pool] = part.name
            self._note("stop", index, self.exist[index], "its requests are done", in_use)

    def _why_less(self, index: int) -> str:
        part = self.parts[index]
        return f"{part.target} of {part.running} are enough" if part.target else "is not in the new plan"

    def _note(self, action: Action, index: int, count: int, reason: str, in_use: Counter[str] | None = None) -> None:
        part = self.parts[index]
        self.found.append(
            Step(
                action=action,
                group=part.name,
                plan=part.plan,
                replicas=count,
                gpus_in_use=dict(in_use if in_use is not None else self._in_use(self.exist)),
                uncovered=self._uncovered(),
                reason=reason,
            )
        )

    def _in_use(self, counts: list[int]) -> Counter[str]:
        used: Counter[str] = Counter({part.pool: 0 for part in self.parts})
        for part, count in zip(self.parts, counts, strict=True):
            used[part.pool] += count * part.gpus
        return used

    def _uncovered(self) -> list[str]:
        covered = {name for part, count in zip(self.parts, self.ready, strict=True) if count for name in part.carries}
        return [name for name in self.kept_rates if name not in covered]

    def _kept_rates(self) -> dict[str, float]:
        """Requests per second of the classes that have a ready group now and will have one."""
        before = {name for part in self.parts if part.running for name in part.carries}
        after = {name for part in self.parts if part.target for name in part.carries}
        return {name: rate for name, rate in self.rates.items() if name in before and name in after}


def _rates(running: Plan | None, target: Plan) -> dict[str, float]:
    plans = [running, target] if running else [target]
    return {item.name: item.requests_per_second for plan in plans for item in plan.classes}


def _moved(parts: list[Part], running: Plan | None, target: Plan) -> tuple[dict[int, list[str]], list[int]]:
    """Of the parts that stay: the classes that come to each, and the parts whose routes change."""
    gains: dict[int, list[str]] = {}
    moved = []
    for index, part in enumerate(parts):
        if running is None or part.comes or part.leaves:
            continue
        before = [route for route in running.routes if route.group == part.name and route.fraction > 0]
        after = [route for route in target.routes if route.group == part.name and route.fraction > 0]
        if before != after:
            moved.append(index)
        names = [route.class_ for route in after if route.class_ not in {old.class_ for old in before}]
        if names:
            gains[index] = names
    return gains, moved


def _listed(names: Mapping[str, float] | list[str]) -> str:
    """The first few names."""
    shown = list(names)[:4]
    more = len(names) - len(shown)
    return (", ".join(shown) or "nothing") + (f" and {more} more" if more else "")
