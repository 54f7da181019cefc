"""The engine's time line, under a clock that the test sets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from kvantile_engine.emulator.answers import Answers, Piece
from kvantile_engine.emulator.engine import Engine, TimeLine
from kvantile_engine.emulator.requests import parse
from kvantile_engine.emulator.settings import Settings

ALPHA, DELTA = 0.02, 1e-4
SETTINGS = Settings(model="m", alpha=ALPHA, beta=0, gamma=0, delta=DELTA, speed=2)


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    task = asyncio.create_task(engine.run())
    yield engine
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def submit(engine: Engine, prompt_tokens: int, output_tokens: int, **hint: float) -> Answers:
    xargs = {"emulator_prompt_tokens": prompt_tokens, "emulator_output_tokens": output_tokens, **hint}
    body = json.dumps({"prompt": "x", "stream": True, "vllm_xargs": xargs})
    return engine.submit(parse(body.encode(), chat=False, settings=engine.settings))


async def collect(answers: Answers) -> list[Piece]:
    return [piece async for pieces in answers.pieces() for piece in pieces]


def test_engine_time_runs_as_many_times_faster_as_speed_says() -> None:
    clock = Clock()
    line = TimeLine(10.0, clock)
    clock.now_s = 3.0
    assert line.now() == 30.0
    assert line.real_seconds_until(40.0) == 1.0
    assert line.real_seconds_until(20.0) == 0.0


async def test_a_late_engine_catches_up_and_its_times_do_not_drift() -> None:
    clock = Clock()
    async with running(Engine(SETTINGS, clock)) as engine:
        answers = submit(engine, 100, 50)
        clock.now_s = 500.0
        pieces = await collect(answers)
        assert pieces[-1].finish_reason == "stop"
        assert engine.tallies.first_token_s.total == pytest.approx(ALPHA + DELTA * 100)
        assert engine.tallies.whole_s.total == pytest.approx(50 * ALPHA + DELTA * 100)
        assert engine.tallies.lag_s == pytest.approx(1000 - engine.tallies.whole_s.total)


async def test_a_request_joins_at_the_first_step_after_its_arrival_however_late_that_is_computed() -> None:
    clock = Clock()
    engine = Engine(SETTINGS, clock)
    first = submit(engine, 100, 100)
    clock.now_s = 0.5
    second = submit(engine, 100, 1)
    clock.now_s = 500.0
    async with running(engine):
        await collect(second)
        alone = ALPHA + DELTA * 100
        waited = engine.tallies.whole_s.total - alone
        assert 0 <= waited <= ALPHA
        await collect(first)


async def test_an_engine_that_was_idle_starts_at_the_arrival() -> None:
    clock = Clock()
    async with running(Engine(SETTINGS, clock)) as engine:
        for arrival_s in (1.0, 70.0):
            clock.now_s = arrival_s
            answers = submit(engine, 100, 1)
            clock.now_s += 5.0
            await collect(answers)
        assert engine.tallies.first_token_s.total == pytest.approx(2 * (ALPHA + DELTA * 100))
        assert engine.idle


async def test_an_abort_frees_the_blocks_whether_a_step_has_seen_the_request_or_not() -> None:
    clock = Clock()
    async with running(Engine(SETTINGS, clock)) as engine:
        seen, unseen = submit(engine, 100, 1000), submit(engine, 100, 1000)
        engine.abort(unseen)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(engine.scheduler.running) == 1
        engine.abort(seen)
        engine.abort(seen)
        assert (engine.scheduler.pool.used, engine.scheduler.busy) == (0, False)
        assert engine.tallies.finished["abort"] == 2
        assert await collect(seen) == []
        assert not engine.idle, "the step that the aborted request was in is still under way"
        await collect(submit(engine, 100, 1))
        assert engine.idle


def test_a_budget_becomes_the_latest_start_less_the_prefill() -> None:
    clock = Clock()
    engine = Engine(SETTINGS, clock)
    clock.now_s = 10.0
    (answer,) = submit(engine, 100, 1, kv_ttft_budget=1.5).items
    assert answer.sequence.latest_start == pytest.approx(20.0 + 1.5 - ALPHA - DELTA * 100)
