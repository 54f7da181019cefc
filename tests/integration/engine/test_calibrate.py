"""`kvantile calibrate URL` against the emulator, and against servers that are none."""

from __future__ import annotations

import json
import socket

import pytest

from kvantile_optimizer.errors import InputError, WorkError
from kvantile_optimizer.local import engine_probe
from kvantile_optimizer.local.engine_probe import Bounds
from kvantile_optimizer.probing import Limits, fitted, probes
from tests.integration.engine.process import MODEL, emulator
from tests.support.command import outcome
from tests.support.replica import Exchange, stand_in, two_tokens

KNOWN = {"alpha": 0.01, "beta": 4e-4, "gamma": 4e-7, "delta": 5e-5}
ONE_ROUND = sum(probe.count for probe in probes(Limits(16_384, 65_536)))


async def test_the_emulators_step_time_and_cache_are_found() -> None:
    with emulator(**KNOWN) as running:
        code, out, err = await outcome("calibrate", running.url, "--requests", str(ONE_ROUND), "-o", "json")
    assert code == 0, err
    result = json.loads(out)
    assert result["requests"] == ONE_ROUND
    assert (result["model"], result["kvTokens"], result["blockSize"]) == (MODEL, 65_536, 16)
    # On a quiet machine all four are found to 2 %; a busy one delays what is measured.
    for name, value in KNOWN.items():
        assert result["stepTime"][name] == pytest.approx(value, rel=0.15), name
    assert result["calibration"]["kvTokens"] == 65_536
    assert float(result["calibration"]["gammaNanoseconds"]) == pytest.approx(400, rel=0.15)


async def test_a_model_that_is_not_served_and_a_limit_that_is_too_short_are_told() -> None:
    with emulator(alpha=0.5) as running:
        with pytest.raises(InputError, match=MODEL):
            await engine_probe.look(running.url, "another")
        with pytest.raises(WorkError, match="--time-limit"):
            await measured(running.url, seconds=1.0)
        with pytest.raises(WorkError, match="--requests"):
            await measured(running.url, requests=3)
        with pytest.raises(WorkError, match="answered 404 for model another"):
            await measured(running.url, model="another")


async def measured(url: str, model: str = MODEL, *, seconds: float = 60.0, requests: int = 500) -> None:
    rounds = await engine_probe.measure(
        url, model, Limits(16_384, 65_536), Bounds(seconds, requests), 0, lambda _: None
    )
    fitted(rounds)


async def test_where_nobody_listens_the_server_is_asked_after() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, _, err = await outcome("calibrate", url)
    assert code == 1
    assert "is the server running?" in err
    assert "Traceback" not in err


async def test_a_server_that_lists_no_model_is_not_measured() -> None:
    async with stand_in() as server:
        with pytest.raises(WorkError, match="lists no model"):
            await engine_probe.look(server.url, None)


async def in_one_piece(exchange: Exchange) -> None:
    await exchange.respond(200, {"choices": [{"text": "all at once"}]})


async def test_an_answer_without_streaming_is_told() -> None:
    async with stand_in(in_one_piece) as server:
        with pytest.raises(WorkError, match="application/json where a stream was asked for"):
            await measured(server.url)


async def test_a_stream_that_breaks_off_is_told() -> None:
    async def cut(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.token("a")
        exchange.cut()

    async with stand_in(cut) as server:
        with pytest.raises(WorkError, match="broke off"):
            await measured(server.url)


async def test_short_answers_of_a_server_that_ignores_ignore_eos_tell_nothing() -> None:
    async with stand_in(two_tokens) as server:
        with pytest.raises(WorkError, match="side by side"):
            await measured(server.url)
