"""In which order groups hand over: who starts its first replica, who stops its last one, when GPUs are few.

Only first and last replicas matter for whether a class has a ready group at all, so the question is put with every
group that leaves at one replica and every group that stays at the fewer of its two counts. A best-first search over
what has begun and what has gone then finds the order in which the least traffic is without a group: none, where such
an order exists. Stopping everything first is always an order, so the search cannot fail; when its budget is over it
follows the state that got furthest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

SEARCHED_STATES = 2_000
"""Tens of groups with a free order need one state a group; what is not found by then has no free order, mostly."""


@dataclass(frozen=True, slots=True)
class Part:
    """Replicas of one kind on their way from one count to another."""

    name: str
    plan: Literal["running", "target"]
    """`running` for a group that leaves, `target` for one that comes or stays."""
    pool: str
    size: int
    """GPUs that must be on one node."""
    gpus: int
    """Of one replica."""
    running: int
    target: int
    carries: Mapping[str, float]
    """Requests per second of each class that one replica carries."""

    @property
    def leaves(self) -> bool:
        """Whether none of it is in the target."""
        return self.target == 0

    @property
    def comes(self) -> bool:
        """Whether none of it runs."""
        return self.running == 0


@dataclass(frozen=True, slots=True)
class Room:
    """What the pools hold."""

    limits: Mapping[str, int | None]
    """GPUs by pool; None, or a pool that is not here, is unlimited."""
    per_node: Mapping[str, int] = field(default_factory=dict)
    """GPUs of a node, where that is known."""

    def lacking(self, pool: str, parts: Sequence[Part], counts: Sequence[int]) -> int | None:
        """The smallest size of which `pool` has too few places for `counts` (P,) replicas, or None when all fit.

        Sizes are powers of two, so replicas of at least a size fit if they fit into the multiples of it on the nodes.
        """
        limit = self.limits.get(pool)
        if limit is None:
            return None
        mine = [(part, count) for part, count in zip(parts, counts, strict=True) if part.pool == pool and count]
        node = self.per_node.get(pool)
        sizes = [1, *sorted({part.size for part, _ in mine} - {1})] if node else [1]
        for size in sizes:
            used = sum(count * part.gpus for part, count in mine if part.size >= size)
            if used > size * (_places(limit, node, size) if node else limit):
                return size
        return None


def _places(gpus: int, node: int, size: int) -> int:
    whole, rest = divmod(gpus, node)
    return whole * (node // size) + rest // size


@dataclass(frozen=True, slots=True)
class Move:
    """One part, by index, starts its first replica or may stop its last."""

    part: int
    starts: bool


def order(parts: Sequence[Part], room: Room, rates: Mapping[str, float]) -> list[Move]:
    """The moves of all parts that come or leave; `rates` are requests per second of the classes to keep served."""
    return _Search(parts, room, rates).moves()


State: TypeAlias = tuple[int, ...]
"""Replicas of each part."""
_Entry: TypeAlias = tuple[float, float, int, State]
"""Cost, moves made (negative), a number that breaks ties, and the state."""


class _Search:
    def __init__(self, parts: Sequence[Part], room: Room, rates: Mapping[str, float]) -> None:
        self.parts, self.room = parts, room
        bits = {name: 1 << place for place, name in enumerate(rates)}
        self.rates = {bits[name]: rate for name, rate in rates.items()}
        # Sets of classes are integers: thousands of states are looked at, each with all classes.
        self.classes = [sum(bits.get(name, 0) for name in part.carries) for part in parts]
        self.everything = sum(self.rates)

    def moves(self) -> list[Move]:
        start = tuple(1 if part.leaves else min(part.running, part.target) for part in self.parts)
        end = tuple(max(1, min(part.running, part.target)) if part.target else 0 for part in self.parts)
        greedy = False
        heap: list[_Entry] = [(0.0, 0.0, 0, start)]
        came: dict[State, tuple[State, Move] | None] = {start: None}
        while heap:
            entry = heapq.heappop(heap)
            cost, depth, _, state = _furthest_first(entry) if greedy else entry
            if state == end:
                return _path(came, state)
            for move, after in self._next(state):
                if after not in came:
                    came[after] = (state, move)
                    entry = (cost + self._uncovered(after), depth - 1, len(came), after)
                    heapq.heappush(heap, _furthest_first(entry) if greedy else entry)
            if not greedy and len(came) > SEARCHED_STATES:
                greedy = True
                heap = [_furthest_first(entry) for entry in heap]
                heapq.heapify(heap)
        raise ValueError("the target does not fit into the pools")

    def _next(self, state: State) -> Iterator[tuple[Move, State]]:
        stays = self._covered(state, leaving=False)
        stops = [index for index, part in enumerate(self.parts) if part.leaves and state[index]]
        for index in stops:
            if not self.classes[index] & ~stays:
                # What nobody needs any more only takes room: no other move can be better.
                yield Move(index, starts=False), _with(state, index, 0)
                return
        for index, part in enumerate(self.parts):
            if part.comes and not state[index]:
                after = _with(state, index, 1)
                if self.room.lacking(part.pool, self.parts, after) is None:
                    yield Move(index, starts=True), after
        for index in stops:
            yield Move(index, starts=False), _with(state, index, 0)

    def _covered(self, state: State, *, leaving: bool) -> int:
        """The classes that have a replica, with those that leave or without."""
        covered = 0
        for part, mine, count in zip(self.parts, self.classes, state, strict=True):
            if count and (leaving or not part.leaves):
                covered |= mine
        return covered

    def _uncovered(self, state: State) -> float:
        """Requests per second of the classes that have no replica."""
        missing = self.everything & ~self._covered(state, leaving=True)
        return sum(rate for bit, rate in self.rates.items() if bit & missing) if missing else 0.0


def _furthest_first(entry: _Entry) -> _Entry:
    """Swaps cost and depth, which is its own inverse."""
    cost, depth, number, state = entry
    return depth, cost, number, state


def _with(state: State, index: int, count: int) -> State:
    return (*state[:index], count, *state[index + 1 :])


def _path(came: Mapping[State, tuple[State, Move] | None], state: State) -> list[Move]:
    moves = []
    while (step := came[state]) is not None:
        state, move = step
        moves.append(move)
    return moves[::-1]
