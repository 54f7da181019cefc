"""The waiting queue in the order of `admission`: the engine's and the gateway's.

Three heaps: preempted requests (by arrival), requests that can still meet their target (by the latest moment at which
they may start), and the rest (by arrival): those whose moment has passed and those that have none. With no moment
given at all that is first come, first served. Every operation is O(log n); a removed entry stays in its heap, marked,
until it comes up.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Literal, TypeVar

from kvantile_optimizer.admission import LATE_SHARE_PER_MILLE, late_turn

Item = TypeVar("Item")
Order = Literal["fcfs", "deadline", "slack"]


@dataclass(slots=True, eq=False)
class Ticket(Generic[Item]):
    """A place in the queue; `WaitingQueue.remove` takes it."""

    item: Item
    arrival: tuple[float, int]
    latest_start: float | None
    preempted: bool
    waiting: bool = True


@dataclass(slots=True)
class WaitingQueue(Generic[Item]):
    """Requests in the order in which they are to be admitted.

    `order`: `slack` is the rule of `admission`; `deadline` is plain earliest deadline first, late or not; `fcfs`
    ignores deadlines. Times are seconds on one clock, the caller's.
    """

    order: Order = "slack"
    late_share: int = LATE_SHARE_PER_MILLE
    _preempted: list[tuple[tuple[float, int], Ticket[Item]]] = field(default_factory=list)
    _on_time: list[tuple[float, tuple[float, int], Ticket[Item]]] = field(default_factory=list)
    _late: list[tuple[tuple[float, int], Ticket[Item]]] = field(default_factory=list)
    _credit: int = 0
    _waiting: int = 0
    _sequence: count[int] = field(default_factory=count)

    def __len__(self) -> int:
        return self._waiting

    def push(
        self, item: Item, arrival: float, latest_start: float | None = None, *, preempted: bool = False
    ) -> Ticket[Item]:
        """Adds a request; `latest_start` is its deadline less the time that its prefill takes."""
        ticket = Ticket(item, (arrival, next(self._sequence)), latest_start, preempted)
        if preempted:
            # Of those that came together the last to be preempted was let in first.
            heapq.heappush(self._preempted, ((arrival, -ticket.arrival[1]), ticket))
        elif latest_start is None or self.order == "fcfs":
            heapq.heappush(self._late, (ticket.arrival, ticket))
        else:
            heapq.heappush(self._on_time, (latest_start, ticket.arrival, ticket))
        self._waiting += 1
        return ticket

    def remove(self, ticket: Ticket[Item]) -> None:
        """Takes a request out, wherever it stands; doing so twice is harmless."""
        if ticket.waiting:
            ticket.waiting = False
            self._waiting -= 1

    def peek(self, now: float) -> Ticket[Item] | None:
        """The request whose turn it is at `now`, left in the queue; None when nothing waits."""
        return self._next(now)[0]

    def pop(self, now: float) -> Item | None:
        """Takes out the request whose turn it is at `now`, the one that `peek` would show."""
        ticket, self._credit = self._next(now)
        if ticket is None:
            return None
        self.remove(ticket)
        return ticket.item

    def _next(self, now: float) -> tuple[Ticket[Item] | None, int]:
        self._settle(now)
        if self._preempted:
            return self._preempted[0][-1], self._credit
        late, credit = late_turn(self._credit, bool(self._on_time), bool(self._late), self.late_share)
        if late:
            return self._late[0][-1], credit
        return (self._on_time[0][-1] if self._on_time else None), credit

    def _settle(self, now: float) -> None:
        """Drops what was removed from the three heads and moves to the late what can no longer be on time."""
        while self._on_time:
            ticket = self._on_time[0][-1]
            if ticket.waiting and (self.order == "deadline" or self._on_time[0][0] >= now):
                break
            heapq.heappop(self._on_time)
            if ticket.waiting:
                heapq.heappush(self._late, (ticket.arrival, ticket))
        for heap in (self._preempted, self._late):
            while heap and not heap[0][-1].waiting:
                heapq.heappop(heap)
