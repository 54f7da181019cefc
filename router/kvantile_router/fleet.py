"""The replicas: who is there, who is healthy, and what each has in flight.

Health and load are separate states: a health check never touches the load, and a replica that is taken out of the
fleet keeps its books until its last request has ended. A replica is usable when its health check passes and its
breaker is closed. The breaker opens after failed requests in a row (no connection, or a 5xx other than 503, which says
"full"; a 4xx is the client's), and lets traffic try again after a pause. It never takes the last one away: with
nothing usable left, healthy replicas with an open breaker serve.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from kvantile_router.routing import name_hash

BREAKER_FAILURES = 3
"""In a row: one may be the request's own fault, and retries hide the second."""
BREAKER_PAUSE_S = 10.0
"""Wall seconds until an open breaker is tried again: a third of the time in which a recovered replica must serve."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica is, and the group it belongs to."""

    group: str
    url: str


@dataclass(slots=True)
class Breaker:
    """Counts failures in a row. Times are wall seconds on the caller's clock."""

    failures: int = 0
    opened_at_s: float | None = None

    def is_open(self, now_s: float) -> bool:
        """Whether the replica is to be spared for now."""
        return self.opened_at_s is not None and now_s - self.opened_at_s < BREAKER_PAUSE_S

    def succeeded(self) -> None:
        """A request was answered."""
        self.failures, self.opened_at_s = 0, None

    def failed(self, now_s: float) -> None:
        """A request failed through the replica's fault."""
        self.failures += 1
        if self.failures >= BREAKER_FAILURES:
            self.opened_at_s = now_s


@dataclass(slots=True, eq=False)
class Replica:
    """One engine. `tokens` (as `reserve` counts them) and `requests` are what this gateway has in flight there."""

    address: Address
    name_hash: int
    tokens: int = 0
    requests: int = 0
    ready: bool = False
    breaker: Breaker = field(default_factory=Breaker)
    in_fleet: bool = True

    @property
    def url(self) -> str:
        """Its base address, without a slash at the end."""
        return self.address.url

    @property
    def group(self) -> str:
        """Its group's name in the plan."""
        return self.address.group


class Fleet:
    """The replicas by group. `changed` is called when one becomes ready or the list changes."""

    def __init__(self, wall_clock: Callable[[], float] = time.monotonic) -> None:
        self._wall_clock = wall_clock
        self._replicas: dict[Address, Replica] = {}
        self._groups: dict[str, list[Replica]] = {}
        self.changed: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Replica]:
        return iter([replica for replica in self._replicas.values() if replica.in_fleet])

    def update(self, addresses: Iterable[Address]) -> None:
        """Makes `addresses` the fleet; replicas that stay keep their state."""
        wanted = dict.fromkeys(addresses)
        for address in wanted:
            replica = self._replicas.setdefault(address, Replica(address, name_hash(address.url)))
            replica.in_fleet = True
        for address, replica in list(self._replicas.items()):
            replica.in_fleet = address in wanted
            if not replica.in_fleet:
                replica.ready = False
                self._forget_when_idle(replica)
        self._groups = {}
        for replica in self:
            self._groups.setdefault(replica.group, []).append(replica)
        self.changed()

    def usable(self, group: str, tried: Collection[Replica] = ()) -> list[Replica]:
        """Ready replicas of the group with a closed breaker, less those in `tried`."""
        now_s = self._wall_clock()
        return [replica for replica in self.ready(group, tried) if not replica.breaker.is_open(now_s)]

    def ready(self, group: str, tried: Collection[Replica] = ()) -> list[Replica]:
        """Ready replicas of the group, whatever their breakers say, less those in `tried`."""
        return [replica for replica in self._groups.get(group, ()) if replica.ready and replica not in tried]

    def groups(self) -> set[str]:
        """Groups that have a replica, ready or not."""
        return set(self._groups)

    def urls(self) -> set[str]:
        """Addresses of all replicas, with those that left and still have a request in flight."""
        return {replica.url for replica in self._replicas.values()}

    def set_ready(self, replica: Replica, ready: bool) -> None:
        """Takes note of a health check."""
        became_ready = ready and not replica.ready
        replica.ready = ready and replica.in_fleet
        if became_ready:
            self.changed()

    def failed(self, replica: Replica) -> None:
        """Takes note of a request that failed through the replica's fault."""
        replica.breaker.failed(self._wall_clock())

    def breaker_is_open(self, replica: Replica) -> bool:
        """Whether the replica is spared for now."""
        return replica.breaker.is_open(self._wall_clock())

    def take(self, replica: Replica, tokens: int) -> None:
        """Counts a request as in flight."""
        replica.tokens += tokens
        replica.requests += 1

    def release(self, replica: Replica, tokens: int) -> None:
        """Ends what `take` began."""
        replica.tokens -= tokens
        replica.requests -= 1
        self._forget_when_idle(replica)

    def _forget_when_idle(self, replica: Replica) -> None:
        if not replica.in_fleet and replica.requests == 0:
            self._replicas.pop(replica.address, None)
