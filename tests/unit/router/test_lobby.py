"""Waiting for a place: who is next, who is refused, and that no place is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvantile_router.clock import Clock
from kvantile_router.errors import FullError, NothingReadyError
from kvantile_router.fleet import Address, Fleet
from kvantile_router.lobby import LONGEST_RETRY_AFTER_S, Drain, Lobby, retry_after_s
from kvantile_router.placement import Lease, Placement, Wanted
from kvantile_router.reserve import Size
from kvantile_router.table import Table
from tests.support.plans import make_class, make_group, make_plan, make_route

HELD: dict[str, Any] = {"form": "held", "reserveTokens": 90}


def make_lobby(*, length: int = 10, wait_s: float = 60.0, replicas: int = 1, **plan: Any) -> tuple[Lobby, Fleet]:
    """Replicas of 100 tokens that hold one request of 10 prompt tokens each, all ready."""
    usual = {"groups": [make_group(kvTokens=100)], "routes": [make_route(**HELD)]}
    table = Table(make_plan(**(usual | plan)))
    fleet = Fleet()
    placement = Placement(table, fleet, lambda: 0.5)
    lobby = Lobby(placement, Clock(), length, wait_s)
    fleet.changed = lobby.serve
    fleet.update([Address(name, f"http://{name}-{i}") for name in table.groups for i in range(replicas)])
    for replica in fleet:
        fleet.set_ready(replica, ready=True)
    return lobby, fleet


def wanted(at_s: float = 0.0, name: str = "chat", tokens: int = 10) -> Wanted:
    return Wanted(name, Size(tokens), at_s)


async def start(lobby: Lobby, *requests: Wanted) -> list[asyncio.Task[Lease]]:
    """Lets requests ask for a place, in this order."""
    tasks = [asyncio.create_task(lobby.acquire(request)) for request in requests]
    await settled()
    return tasks


async def settled() -> None:
    """Lets every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def end(lobby: Lobby, *tasks: asyncio.Task[Lease]) -> None:
    """Ends whatever a test left, and holds the lobby to having nothing in flight."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Lease):
            result.release()
    assert set(lobby.waiting.values()) <= {0}


async def test_the_next_in_slack_order_gets_the_place_that_ends() -> None:
    lobby, fleet = make_lobby()
    running = await lobby.acquire(wanted())
    late, urgent, relaxed = await start(lobby, wanted(-50.0), wanted(0.1), wanted(0.2))
    running.release()
    await settled()
    assert [task.done() for task in (late, urgent, relaxed)] == [False, True, False]
    await end(lobby, late, urgent, relaxed)
    assert [replica.requests for replica in fleet] == [0]


async def test_whoever_has_less_time_left_than_first_tokens_take_is_late_already() -> None:
    lobby, _ = make_lobby(routes=[make_route(**HELD, order="slack")])
    now = lobby._clock()
    (first,) = await start(lobby, wanted(now))
    for _ in range(100):
        lobby.first_token("g", 0.5)
    # The target is 1 s: one has 0.3 s left and could have been served at once, had the engine been quick.
    tight, roomy = await start(lobby, wanted(now - 0.7), wanted(now))
    first.result().release()
    await settled()
    assert roomy.done()
    assert not tight.done()
    await end(lobby, first, tight, roomy)


async def test_a_request_that_lost_its_replica_goes_first() -> None:
    lobby, fleet = make_lobby()
    running = await lobby.acquire(wanted())
    again = wanted(5.0)
    again.tried.append(next(iter(make_lobby()[1])))
    first, second = await start(lobby, wanted(0.0), again)
    running.release()
    await settled()
    assert (first.done(), second.done()) == (False, True)
    await end(lobby, first, second)
    assert [replica.tokens for replica in fleet] == [0]


async def test_a_class_fills_its_own_places_only() -> None:
    rules = [make_class("a", match=[{"tools": True}]), make_class("b")]
    routes = [make_route("a", **HELD), make_route("b", **HELD)]
    lobby, _ = make_lobby(length=1, classes=rules, routes=routes)
    running, a, b = await start(lobby, wanted(name="a"), wanted(name="a"), wanted(name="b"))
    with pytest.raises(FullError) as caught:
        await lobby.acquire(wanted(name="a"))
    assert caught.value.reason == "full"
    assert not a.done()
    assert not b.done()
    await end(lobby, running, a, b)


async def test_a_wait_ends_when_it_is_too_long() -> None:
    lobby, _ = make_lobby(wait_s=0.0)
    running = await lobby.acquire(wanted())
    with pytest.raises(FullError) as caught:
        await lobby.acquire(wanted())
    assert caught.value.reason == "waited"
    running.release()


async def test_a_place_that_comes_as_the_client_goes_is_given_back() -> None:
    lobby, fleet = make_lobby()
    running = await lobby.acquire(wanted())
    (waiting,) = await start(lobby, wanted())
    running.release()
    waiting.cancel()
    await end(lobby, waiting)
    assert [(replica.tokens, replica.requests) for replica in fleet] == [(0, 0)]


async def test_a_large_request_is_not_overtaken_for_ever() -> None:
    lobby, _ = make_lobby(routes=[make_route(form="none")])
    running = [await lobby.acquire(wanted(tokens=30)) for _ in range(3)]
    large, small = await start(lobby, wanted(0.0, tokens=80), wanted(1.0, tokens=30))
    running[0].release()
    await settled()
    assert not small.done()
    running[1].release()
    running[2].release()
    await settled()
    assert large.done()
    await end(lobby, large, small)


async def test_those_who_wait_for_another_group_are_not_held_up() -> None:
    rules = [make_class("a", match=[{"tools": True}]), make_class("b")]
    groups = [make_group("one", kvTokens=100), make_group("two", kvTokens=100)]
    routes = [make_route("a", "one", **HELD), make_route("b", "two", **HELD)]
    lobby, _ = make_lobby(classes=rules, groups=groups, routes=routes)
    in_a, in_b, waits_a, waits_b = await start(lobby, *(wanted(name=name) for name in "abab"))
    in_b.result().release()
    await settled()
    assert (waits_a.done(), waits_b.done()) == (False, True)
    await end(lobby, in_a, in_b, waits_a, waits_b)


async def test_whoever_waits_is_told_when_nothing_is_ready_any_more() -> None:
    lobby, fleet = make_lobby()
    running = await lobby.acquire(wanted())
    (waiting,) = await start(lobby, wanted())
    fleet.set_ready(next(iter(fleet)), ready=False)
    lobby.serve()
    with pytest.raises(NothingReadyError):
        await waiting
    running.release()
    await end(lobby)


@given(st.lists(st.tuples(st.floats(0.01, 1.0), st.integers(1, 100)), min_size=200, max_size=200))
def test_the_drain_rate_is_what_drained(ends: list[tuple[float, int]]) -> None:
    drain, now_s = Drain(memory_s=10.0), 0.0
    for gap_s, tokens in [(0.1, 40)] * 1000:
        now_s += gap_s
        drain.ended(tokens, now_s)
    assert drain.rate(now_s) == pytest.approx(400, rel=0.01)
    for gap_s, tokens in ends:
        now_s += gap_s
        drain.ended(tokens, now_s)
    assert 0 < drain.rate(now_s) <= 100 * 100 / 10 + 400


def test_retry_after_is_the_time_in_which_the_queue_drains() -> None:
    assert retry_after_s(1000, 100.0) == 10
    assert retry_after_s(1001, 100.0) == 11
    assert retry_after_s(0, 100.0) == 1
    assert retry_after_s(10, 0.0) == LONGEST_RETRY_AFTER_S
    assert retry_after_s(10**9, 1.0) == LONGEST_RETRY_AFTER_S
