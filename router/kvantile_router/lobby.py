"""Where requests wait while every replica is full.

Requests that could go to the same groups stand in one line, in the order the plan gives their class (`admission`'s
rule), so nobody waits behind someone who waits for something else. Lines are served by the arrival of whoever is
first in each; whoever does not fit keeps the groups it waits for, else a large request would be overtaken for ever.
Each class may fill a bounded number of places, each wait is bounded, and whoever is refused is told when to come
back: the tokens ahead of it over the rate at which reservations have drained of late.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from kvantile_optimizer.routing import lead_after
from kvantile_optimizer.waiting import Order, Ticket, WaitingQueue
from kvantile_router.clock import Clock
from kvantile_router.errors import FullError, NothingReadyError
from kvantile_router.placement import Lease, Placement, Wanted
from kvantile_router.reserve import counted_tokens

LONGEST_RETRY_AFTER_S = 60
DRAIN_MEMORY_S = 10.0
"""Wall seconds over which the drain rate is averaged: a few answers long, so that single ends do not show."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in a line, and where its lease will appear."""

    wanted: Wanted
    lease: asyncio.Future[Lease]


Line = WaitingQueue[Waiting]
LineKey = tuple[Order, tuple[str, ...]]


@dataclass(slots=True)
class Drain:
    """The rate at which reservations end, tokens per second, as an exponentially weighted mean over `memory_s`."""

    memory_s: float
    level: float = 0.0
    at_s: float = 0.0

    def ended(self, tokens: int, now_s: float) -> None:
        """Takes note of a reservation that ended."""
        self.level = self._decayed(now_s) + tokens
        self.at_s = now_s

    def rate(self, now_s: float) -> float:
        """Tokens per second."""
        return self._decayed(now_s) / self.memory_s

    def _decayed(self, now_s: float) -> float:
        return self.level * math.exp(-(now_s - self.at_s) / self.memory_s)


@dataclass(slots=True)
class Lead:
    """How long first tokens of a group have taken after dispatch, of late, in plan seconds.

    A replica that the books call roomy may still let requests wait: answers grow, and what they grew is not booked.
    Whoever is sent there with less time than that left is late already.
    """

    seconds: float = 0.0

    def saw(self, seconds: float) -> None:
        """Takes note of a first token that came `seconds` after its dispatch."""
        self.seconds = lead_after(self.seconds, seconds)


def retry_after_s(tokens_ahead: int, tokens_per_s: float) -> int:
    """Whole seconds until so many tokens have drained, from 1 to a minute; a minute when nothing drains."""
    if tokens_per_s * LONGEST_RETRY_AFTER_S <= tokens_ahead:
        return LONGEST_RETRY_AFTER_S
    return max(1, math.ceil(tokens_ahead / tokens_per_s))


class Lobby:
    """All lines. `queue_wait_s` None means the class's target for the first token."""

    def __init__(self, placement: Placement, clock: Clock, queue_length: int, queue_wait_s: float | None) -> None:
        self._placement = placement
        self._clock = clock
        self._queue_length = queue_length
        self._queue_wait_s = queue_wait_s
        self._lines: dict[LineKey, Line] = {}
        self._tokens_waiting = 0
        self._drain = Drain(DRAIN_MEMORY_S * clock.speed)
        self._leads: dict[str, Lead] = {}
        self.waiting: dict[str, int] = {}
        placement.released = self._released

    async def acquire(self, wanted: Wanted) -> Lease:
        """A place, at once or after waiting for it. Raises FullError and NothingReadyError."""
        if not self._lines:
            lease = self._placement.place(wanted)
            if lease is not None:
                return lease
        return await self._wait(wanted)

    def first_token(self, group: str, seconds: float) -> None:
        """Takes note of how long after its dispatch a request to `group` got its first token."""
        self._leads.setdefault(group, Lead()).saw(seconds)

    def serve(self) -> None:
        """Gives places to whoever can have one now; to be called whenever there may be room."""
        withheld: set[str] = set()
        stuck: set[LineKey] = set()
        now_s = self._clock()
        while (found := self._foremost(stuck, now_s)) is not None:
            key, ticket = found
            try:
                lease = self._placement.place(ticket.item.wanted, withheld)
            except NothingReadyError as error:
                self._lines[key].pop(now_s)
                ticket.item.lease.set_exception(error)
                continue
            if lease is None:
                stuck.add(key)
                if not ticket.item.wanted.tried:  # one that tried others waits for few replicas, not for the group
                    withheld.update(key[1])
            else:
                self._lines[key].pop(now_s)
                ticket.item.lease.set_result(lease)

    def _foremost(self, stuck: set[LineKey], now_s: float) -> tuple[LineKey, Ticket[Waiting]] | None:
        heads = [
            (key, ticket)
            for key, line in self._lines.items()
            if key not in stuck and (ticket := line.peek(now_s)) is not None
        ]
        return min(heads, key=lambda head: head[1].arrival, default=None)

    async def _wait(self, wanted: Wanted) -> Lease:
        name, tokens = wanted.class_name, self._tokens(wanted)
        if self.waiting.get(name, 0) >= self._queue_length and not wanted.tried:
            raise self._full("full", tokens)
        key = self._key(wanted)
        line = self._lines.setdefault(key, WaitingQueue(order=key[0]))
        ticket = self._stand(line, wanted)
        self.waiting[name] = self.waiting.get(name, 0) + 1
        self._tokens_waiting += tokens
        lease, got = ticket.item.lease, False
        try:
            self.serve()
            await asyncio.wait({lease}, timeout=self._clock.wall_s(self._patience_s(wanted)))
            got = lease.done()
        finally:
            self._tokens_waiting -= tokens
            self.waiting[name] -= 1
            self._leave(key, line, ticket)
            if not got and lease.done() and lease.exception() is None:
                lease.result().release()  # it came in the moment in which the client went
        if not got:
            raise self._full("waited", tokens)
        return lease.result()

    def _key(self, wanted: Wanted) -> LineKey:
        table = self._placement.table
        routes = table.routes_of(wanted.class_name)
        return routes.order, tuple(sorted(name for name in routes.routes if table.holds(name, wanted.size)))

    def _stand(self, line: Line, wanted: Wanted) -> Ticket[Waiting]:
        """Puts a request into its line. One that a replica failed has waited before and goes first."""
        table = self._placement.table
        routes = table.routes_of(wanted.class_name)
        shortest_s = min((self._leads.get(name, Lead()).seconds for name in routes.routes), default=0.0)
        lead_s = max(shortest_s, table.prefill_s(routes, wanted.size.prompt_tokens))
        latest_s = wanted.arrival_s + routes.rules.slo.ttft_seconds - lead_s
        waiting = Waiting(wanted, asyncio.get_running_loop().create_future())
        return line.push(waiting, wanted.arrival_s, latest_s, preempted=bool(wanted.tried))

    def _leave(self, key: LineKey, line: Line, ticket: Ticket[Waiting]) -> None:
        """Ends a wait. An empty line goes; another request may have opened a new one of the same key since."""
        line.remove(ticket)
        if not len(line) and self._lines.get(key) is line:
            del self._lines[key]

    def _tokens(self, wanted: Wanted) -> int:
        """What the request will count for, roughly: groups differ little."""
        route = next(iter(self._placement.table.routes_of(wanted.class_name).routes.values()))
        return counted_tokens(route, wanted.size)

    def _patience_s(self, wanted: Wanted) -> float:
        if self._queue_wait_s is not None:
            return self._queue_wait_s
        return self._placement.table.routes_of(wanted.class_name).rules.slo.ttft_seconds

    def _released(self, lease: Lease) -> None:
        self._drain.ended(lease.tokens, self._clock())
        if self._lines:
            self.serve()

    def _full(self, reason: str, tokens: int) -> FullError:
        per_wall_s = self._drain.rate(self._clock()) * self._clock.speed
        seconds = retry_after_s(self._tokens_waiting + tokens, per_wall_s)
        return FullError("every replica is full", reason=reason, retry_after_s=seconds)
