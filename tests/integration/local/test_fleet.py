"""A fleet of real processes: started, told apart, killed, replaced, drained; and gone afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
from pathlib import Path

import httpx
import pytest

from kvantile_optimizer.errors import WorkError
from kvantile_optimizer.local import fleet
from kvantile_optimizer.local.flags import FleetSettings
from kvantile_optimizer.local.records import Clock, Request
from kvantile_optimizer.local.replay import Target, connected
from kvantile_optimizer.local.supervise import Command, Server
from tests.support.small_plan import make_group, make_plan

SPEED = 20.0


class News:
    """What a fleet says, to be waited for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._more = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._more.set()

    async def until(self, words: str, deadline_s: float = 20.0) -> str:
        async with asyncio.timeout(deadline_s):
            while True:
                for line in self.lines:
                    if words in line:
                        return line
                self._more.clear()
                await self._more.wait()


def make_requests(count: int, *, every_s: float = 0.1, output: int = 40) -> list[Request]:
    return [Request(i, ("chat", "code")[i % 2], i * every_s, 100, output) for i in range(count)]


def ignore(_done: int) -> None:
    return None


async def test_a_replay_gets_every_answer_in_engine_seconds() -> None:
    async with (
        fleet.running(make_plan(), FleetSettings(speed=SPEED), News()) as running,
        connected(Target(running.gateway_url, "small-model", SPEED)) as player,
    ):
        records = await player.play(make_requests(40), Clock(SPEED), ignore)
    assert [record.error for record in records] == [""] * 40
    assert all(record.tokens == 40 for record in records)
    alpha_s = make_group().step_time.alpha
    # A busy machine can only make an answer late, so no whole answer beats its steps. The time per token it also
    # shortens, for a first token that comes late leaves the others less time: of that a median's upper bound stands.
    assert all(record.e2e_s is not None and record.e2e_s >= 0.8 * record.tokens * alpha_s for record in records)
    times_s = [record.tpot_s for record in records if record.tpot_s is not None]
    assert statistics.median(times_s) < 10 * alpha_s


async def test_a_killed_replica_comes_back_and_no_request_without_a_byte_is_lost() -> None:
    news = News()
    plan = make_plan(make_group(replicas=2))
    async with fleet.running(plan, FleetSettings(speed=SPEED, queue_wait_s=600), news) as running:
        victim = running.replica_pids[0]

        def kill_half_way(done: int) -> None:
            if done == 30:
                os.kill(victim, signal.SIGKILL)

        async with connected(Target(running.gateway_url, "small-model", SPEED)) as player:
            records = await player.play(make_requests(120, every_s=0.05), Clock(SPEED), kill_half_way)
        await news.until("is back")
        assert running.restarts == 1
    lost = [record for record in records if record.error and record.first_s is None]
    assert not lost
    assert "SIGKILL" in await news.until("starting it again")


async def test_a_new_plan_serves_before_the_old_replicas_leave() -> None:
    before, after = make_plan(make_group("old")), make_plan(make_group("new", replicas=2), generation=1)
    async with (
        fleet.running(before, FleetSettings(speed=SPEED, queue_wait_s=600), News()) as running,
        connected(Target(running.gateway_url, "small-model", SPEED)) as player,
    ):
        replay = asyncio.create_task(player.play(make_requests(300, every_s=0.2), Clock(SPEED), ignore))
        await running.apply(after)
        assert {group for group, _ in running.replica_urls} == {"new"}
        assert len(running.replica_pids) == 2
        records = await replay
    assert [record.error for record in records if record.error] == []


async def test_what_never_listens_is_given_up_with_the_end_of_its_log(tmp_path: Path) -> None:
    server = Server(Command("bad", "kvantile_engine.emulator", ("--no-such-flag",)), tmp_path, lambda *_: None)
    with pytest.raises(WorkError, match=r"(?s)bad ended with exit code 2; .*no-such-flag"):
        await server.run()


async def test_a_fleet_that_cannot_start_says_why_and_leaves_nothing() -> None:
    plan = make_plan(make_group(kv_tokens=8))
    with pytest.raises(WorkError, match="ended with exit code"):
        async with fleet.running(plan, FleetSettings(), News()):
            pytest.fail("it started")


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.4, 0.9])
async def test_cancelling_at_any_moment_leaves_nothing(delay_s: float) -> None:
    async def serve() -> None:
        async with fleet.running(make_plan(make_group(replicas=2)), FleetSettings(), News()):
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await asyncio.wait({task}, timeout=delay_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_gateway_comes_back_at_its_address() -> None:
    news = News()
    async with fleet.running(make_plan(), FleetSettings(speed=SPEED), news) as running:
        url = running.gateway_url
        gateway_pid = running.gateway_pid
        assert gateway_pid is not None
        os.kill(gateway_pid, signal.SIGKILL)
        await news.until("gateway is back")
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{url}/healthz")).status_code == 200
