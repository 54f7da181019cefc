"""Health and load are separate states, and a breaker spares a replica for a while."""

from __future__ import annotations

from dataclasses import dataclass

from kvantile_router.fleet import BREAKER_FAILURES, BREAKER_PAUSE_S, Address, Fleet, Replica

A, B = Address("g", "http://a"), Address("g", "http://b")


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_fleet(clock: Clock | None = None) -> tuple[Fleet, Replica, Replica]:
    fleet = Fleet(clock or Clock())
    fleet.update([A, B])
    for replica in fleet:
        fleet.set_ready(replica, ready=True)
    a, b = fleet
    return fleet, a, b


def test_a_health_check_never_touches_the_load() -> None:
    fleet, a, b = make_fleet()
    fleet.take(a, 50)
    fleet.set_ready(a, ready=False)
    fleet.set_ready(a, ready=True)
    assert (a.tokens, a.requests) == (50, 1)
    assert fleet.ready("g") == [a, b]


def test_a_breaker_opens_after_failures_in_a_row_and_closes_again() -> None:
    clock = Clock()
    fleet, a, b = make_fleet(clock)
    for _ in range(BREAKER_FAILURES - 1):
        fleet.failed(a)
    a.breaker.succeeded()
    fleet.failed(a)
    assert fleet.usable("g") == [a, b]
    for _ in range(BREAKER_FAILURES):
        fleet.failed(a)
    assert fleet.usable("g") == [b]
    clock.now_s += BREAKER_PAUSE_S
    assert fleet.usable("g") == [a, b]
    fleet.failed(a)
    assert fleet.usable("g") == [b]


def test_a_replica_that_left_keeps_its_books_until_it_is_idle() -> None:
    fleet, a, _ = make_fleet()
    fleet.take(a, 10)
    fleet.update([B])
    assert [replica.url for replica in fleet] == ["http://b"]
    assert fleet.urls() == {"http://a", "http://b"}
    fleet.update([A, B])
    assert next(iter(fleet)) is a
    assert a.tokens == 10
    fleet.update([B])
    fleet.release(a, 10)
    assert fleet.urls() == {"http://b"}


def test_those_who_wait_are_told_when_a_replica_becomes_ready() -> None:
    fleet, a, _ = make_fleet()
    told = []
    fleet.changed = lambda: told.append(1)
    fleet.set_ready(a, ready=True)
    fleet.set_ready(a, ready=False)
    assert not told
    fleet.set_ready(a, ready=True)
    assert told
