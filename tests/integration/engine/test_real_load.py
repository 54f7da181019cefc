"""Random load on the real vLLM with the plug-in, whose cache is too small for it: nobody hangs and nothing is left.

Requests come at a random rate with random lengths, prefixes and hints, good and bad; clients go away before or during
their answer. KVANTILE_LOAD_MINUTES says for how long.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.tiny_model import make_model
from tests.support.vllm_server import MODEL, VllmServer, is_empty, vllm_server

MINUTES = float(os.environ.get("KVANTILE_LOAD_MINUTES", "3"))
LONGEST = 2048
KV_BLOCKS = 128
"""4,096 tokens: some ten of the requests that run at once."""
MOST_WAITING = 150
"""In flight at once; more would only wait."""
PATIENCE_S = 120.0
"""For one answer, on a busy machine: what takes longer hangs."""
BAD: tuple[dict[str, Any], ...] = (
    {"kv_reserve_tokens": -1},
    {"kv_reserve_tokens": "x", "kv_pooling": 7},
    {"kv_ttft_budget": [1], "kv_class": 7},
    {"kv_reserve_tokens": 1e300},
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600 + 60 * MINUTES)]


async def test_random_load_ends_with_nothing_held_and_nothing_promised(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    arguments = ("--max-num-seqs", "48", "--max-num-batched-tokens", "512", "--max-model-len", str(LONGEST))
    with vllm_server(tmp_path, model, *arguments, kv_blocks=KV_BLOCKS) as server:
        load = Load(server, random.Random(0))
        await load.run(60 * MINUTES)
        await is_empty(server)
        # The load was what the test is about.
        assert load.whole > 60 * MINUTES
        assert load.left > 10 * MINUTES
        assert server.metric("vllm:num_preemptions_total") > 0
        assert server.metric("kvantile:admission_waits_total", reason="reservation") > 0
        assert server.metric("kvantile:overshoots_total") > 0
        assert server.metric("kvantile:broken_hints_total") > 0


class Load:
    """Sends requests until time is over, and waits for all of them."""

    def __init__(self, server: VllmServer, rng: random.Random) -> None:
        self._server, self._rng = server, rng
        self.whole = self.left = 0

    async def run(self, seconds: float) -> None:
        """Raises whatever an answer that is not as it should be raises."""
        until_s = time.monotonic() + seconds
        places = asyncio.Semaphore(MOST_WAITING)
        # The server closes connections that idle, at times just as the next request takes one.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(base_url=self._server.url, timeout=PATIENCE_S, limits=limits) as http,
            asyncio.TaskGroup() as tasks,
        ):
            while time.monotonic() < until_s:
                # Crowds and lulls.
                for _ in range(self._rng.choice((1, 1, 1, 5, 40))):
                    await places.acquire()
                    task = tasks.create_task(self._one(http, self._body()))
                    task.add_done_callback(lambda _: places.release())
                await asyncio.sleep(self._rng.expovariate(4.0))

    def _body(self) -> dict[str, Any]:
        rng = self._rng
        shared = [7] * rng.choice((0, 0, 64, 200))
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": [*shared, *(rng.randrange(256) for _ in range(rng.choice((1, 10, 60, 400))))],
            "max_tokens": min(LONGEST - 700, max(1, int(rng.lognormvariate(4.0, 1.0)))),
            "ignore_eos": True,
            "n": rng.choice((1, 1, 1, 1, 3)),
            "stream": rng.random() < 0.7,
        }
        if rng.random() < 0.1:
            del body["max_tokens"], body["ignore_eos"]
            body |= {"stop": ["a", "e"], "max_tokens": 300}
        if rng.random() < 0.8:
            body["vllm_xargs"] = self._hint()
        return body

    def _hint(self) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.1:
            return rng.choice(BAD)
        hint: dict[str, Any] = {
            "kv_reserve_tokens": rng.choice((0, 20, 100, 400, 10_000)),
            "kv_class": rng.choice("abc"),
        }
        if rng.random() < 0.6:
            hint["kv_pooling"] = rng.choice((0.0, 0.1, 0.25, 1.0))
        if rng.random() < 0.6:
            hint["kv_ttft_budget"] = rng.choice((0.01, 1.0, 10.0))
        return hint

    async def _one(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        # A fifth of the clients goes away, after a moment or in the middle of the answer.
        if self._rng.random() < 0.2:
            await self._leave(body, self._rng.choice((0.01, 0.3, 2.0)))
            self.left += 1
            return
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            text = (await answer.aread()).decode()
        assert answer.status_code == 200, text[:500]
        assert not body["stream"] or text.endswith("data: [DONE]\n\n"), text[-500:]
        self.whole += 1

    async def _leave(self, body: dict[str, Any], stays_s: float) -> None:
        """Asks, and closes the connection after so many seconds, whatever has come."""
        url = httpx.URL(self._server.url)
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            with suppress(TimeoutError):
                async with asyncio.timeout(stays_s):
                    while await reader.read(1 << 16):
                        pass
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
