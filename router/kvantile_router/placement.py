"""Joins plan and fleet: gives a request a replica with room, counted as in flight from that moment on.

Groups are tried in the order of `routing.Shares`; one without a usable replica or without room is passed over. `place`
answers a lease, or None when everything that is ready is full. A lease is a context manager, and leaving it is the one
place where load is given back, on every path.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kvantile_optimizer.plan import Route
from kvantile_optimizer.routing import WORDS, hashed
from kvantile_router.errors import NothingReadyError
from kvantile_router.fleet import Fleet, Replica
from kvantile_router.reserve import Size, counted_tokens
from kvantile_router.routing import pick_replica
from kvantile_router.table import ClassRoutes, Table


@dataclass(slots=True, eq=False)
class Wanted:
    """A request that looks for a replica. `key` is its prefix key; `tried` are the replicas that failed it."""

    class_name: str
    size: Size
    arrival_s: float
    key: bytes | None = None
    tried: list[Replica] = field(default_factory=list)


class Lease:
    """A place on a replica."""

    __slots__ = ("_release", "replica", "route", "tokens")

    def __init__(self, replica: Replica, route: Route, tokens: int, release: Callable[[Lease], None]) -> None:
        self.replica = replica
        self.route = route
        self.tokens = tokens
        self._release: Callable[[Lease], None] | None = release

    def release(self) -> None:
        """Gives the place back; doing so twice is harmless."""
        release, self._release = self._release, None
        if release is not None:
            release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class Placement:
    """Finds places by the present table. `released` is called with each lease that ends."""

    def __init__(self, table: Table, fleet: Fleet, random: Callable[[], float]) -> None:
        self.table = table
        self.fleet = fleet
        self.released: Callable[[Lease], None] = lambda _: None
        self._random = random

    def place(self, wanted: Wanted, withheld: Collection[str] = ()) -> Lease | None:
        """A place in a group that is not `withheld`, None when there is none. Raises NothingReadyError."""
        routes = self.table.routes_of(wanted.class_name)
        candidates = self._candidates(routes, wanted)
        key = hashed(wanted.key) if wanted.key is not None else None
        by = key if key is not None else int(self._random() * WORDS)
        for name in routes.shares.order(by, [name for name in candidates if name not in withheld]):
            route, group = routes.routes[name], self.table.groups[name]
            tokens = counted_tokens(route, wanted.size)
            replica = pick_replica(key, candidates[name], tokens, group.kv_tokens, group.max_num_seqs, self._random)
            if replica is not None:
                if not wanted.tried:
                    routes.shares.record(name)
                self.fleet.take(replica, tokens)
                return Lease(replica, route, tokens, self._end)
        return None

    def has_untried(self, wanted: Wanted) -> bool:
        """Whether some ready replica has not failed the request yet."""
        routes = self.table.routes_of(wanted.class_name).routes
        return any(self.table.holds(name, wanted.size) and self.fleet.ready(name, wanted.tried) for name in routes)

    def _candidates(self, routes: ClassRoutes, wanted: Wanted) -> dict[str, list[Replica]]:
        """Replicas by group; those with an open breaker only where nothing else is left."""
        names = [name for name in routes.routes if self.table.holds(name, wanted.size)]
        for among in (self.fleet.usable, self.fleet.ready):
            found = {name: replicas for name in names if (replicas := among(name, wanted.tried))}
            if found:
                return found
        raise NothingReadyError("no replica that could serve this request is ready", retry_after_s=1)

    def _end(self, lease: Lease) -> None:
        self.fleet.release(lease.replica, lease.tokens)
        self.released(lease)
