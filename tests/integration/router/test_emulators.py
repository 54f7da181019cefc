"""The gateway before real emulator processes, over real sockets, twenty times faster than life."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.gateways import PATIENCE_S, chat, eventually, write_plan
from tests.support.plans import make_class, make_group, make_plan
from tests.support.replica import MODEL
from tests.support.servers import Served, served

SPEED = "20"


@dataclass(eq=False)
class Loop:
    """Two emulators, the gateway before them and a client."""

    emulators: list[Served]
    gateway: Served
    client: httpx.AsyncClient


@asynccontextmanager
async def running_loop(tmp_path: Path) -> AsyncIterator[Loop]:
    plan = make_plan(
        groups=[make_group(kvTokens=4096)], classes=[make_class(slo={"ttftSeconds": 30.0, "tpotSeconds": 1.0})]
    )
    path = write_plan(tmp_path / "plan.json", plan)
    engine = ("--served-model-name", MODEL, "--port", "0", "--speed", SPEED, "--kv-tokens", "4096")
    async with served("kvantile_engine.emulator", *engine) as one, served("kvantile_engine.emulator", *engine) as two:
        replicas = [part for item in (one, two) for part in ("--replica", f"g={item.url}")]
        async with (
            served("kvantile_router", "--plan", str(path), "--port", "0", "--speed", SPEED, *replicas) as gateway,
            httpx.AsyncClient(
                base_url=gateway.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=200)
            ) as client,
        ):

            async def is_ready() -> bool:
                return all(item["ready"] for item in (await client.get("/plan")).json()["replicas"])

            await eventually(is_ready, "both emulators were ready")
            yield Loop([one, two], gateway, client)


async def test_lengths_come_back_as_observations_and_nothing_stays_in_flight(tmp_path: Path) -> None:
    async with running_loop(tmp_path) as loop:
        bodies = [chat("word " * 40, stream=True, max_tokens=20, ignore_eos=True) for _ in range(30)]
        answers = await asyncio.gather(*(loop.client.post("/v1/chat/completions", json=body) for body in bodies))
        assert {item.status_code for item in answers} == {200}
        assert all(item.text.endswith("data: [DONE]\n\n") for item in answers)
        assert {item.headers["x-kvantile-replica"] for item in answers} == {item.url for item in loop.emulators}
        seen = (await loop.client.get("/observations")).json()["classes"]["chat"]
        assert seen["requests"] == 30
        assert seen["censored"] == {"20": 30}
        state = (await loop.client.get("/plan")).json()
        assert (state["inFlightRequests"], state["reservedTokens"]) == (0, 0)


async def test_a_killed_emulator_loses_no_request_that_had_no_byte(tmp_path: Path) -> None:
    async with running_loop(tmp_path) as loop:
        body = chat("word " * 200, stream=True, max_tokens=40, ignore_eos=True)
        killed = loop.emulators[0]
        first_token = asyncio.Event()

        async def ask() -> tuple[str, str]:
            """The replica that answered and the whole answer."""
            async with loop.client.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.status_code == 200, await response.aread()
                text = ""
                async for piece in response.aiter_text():
                    text += piece
                    if response.headers["x-kvantile-replica"] == killed.url:
                        first_token.set()
                return response.headers["x-kvantile-replica"], text

        asking = [asyncio.create_task(ask()) for _ in range(80)]
        await first_token.wait()
        killed.process.kill()
        answers = await asyncio.gather(*asking)
        broken = [text for _, text in answers if not text.endswith("data: [DONE]\n\n")]
        assert all("[DONE]" not in text for text in broken)
        for text in broken:
            events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
            assert events[-1]["error"]["code"] == "broken"
            assert "choices" in events[0], "a request that had no byte was lost"

        async def idle() -> bool:
            return bool((await loop.client.get("/plan")).json()["inFlightRequests"] == 0)

        await eventually(idle, "nothing was in flight")
