"""The plug-in inside the real vLLM server, over HTTP: hints good and bad, many at once, clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvantile_engine.__main__ import main
from tests.support.gateways import eventually
from tests.support.tiny_model import make_model
from tests.support.vllm_server import MODEL, VllmServer, comes_to, is_empty, vllm_server

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the server alone takes a minute to start
]

JSON = {"content-type": "application/json"}
KV_BLOCKS = 256
AT_ONCE = 120
PROMPT, ANSWER = 30, 150
"""Tokens; 120 of them ask for 21,600 in a cache of 8,192."""
DEFAULTS = {"classes": {"batch": {"reserveTokens": ANSWER}}}

BAD_HINTS: list[tuple[str, int]] = [
    ('{"kv_reserve_tokens": -5}', 1),
    ('{"kv_reserve_tokens": 3.7}', 1),
    ('{"kv_reserve_tokens": "many"}', 1),
    ('{"kv_reserve_tokens": 1e300, "kv_pooling": 0.1}', 1),
    ('{"kv_reserve_tokens": 10, "kv_pooling": 2}', 1),
    ('{"kv_reserve_tokens": [1, 2]}', 1),
    ('{"kv_reserve_tokens": NaN}', 1),
    ('{"kv_ttft_budget": "soon", "kv_class": 7}', 2),
    ('{"kv_nothing": 1}', 1),
]
"""What a client wrote, and how much of it makes no sense."""


@pytest.fixture(scope="module")
def defaults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("defaults") / "defaults.json"
    path.write_text(json.dumps(DEFAULTS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, defaults: Path) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("vllm")
    model, packages = make_model(folder / "model"), folder / "packages"
    # As an init container does for a stock image.
    assert main(["copy", str(packages)]) == 0
    arguments = ("--max-num-seqs", "128", "--max-model-len", "2048", "--no-enable-prefix-caching")
    with vllm_server(
        folder,
        model,
        *arguments,
        kv_blocks=KV_BLOCKS,
        PYTHONPATH=str(packages),
        KVANTILE_ENGINE_DEFAULTS=str(defaults),
    ) as running:
        yield running


def body(number: int = 0, answer: int = ANSWER, **more: Any) -> dict[str, Any]:
    prompt = f"{number:05d}".ljust(PROMPT, ".")
    return {"model": MODEL, "prompt": prompt, "max_tokens": answer, "ignore_eos": True, **more}


async def complete(http: httpx.AsyncClient, content: dict[str, Any]) -> int:
    """The tokens of the answer."""
    # Written here: httpx refuses NaN, which clients do send.
    answer = await http.post("/v1/completions", content=json.dumps(content), headers=JSON)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["completion_tokens"])


async def preemptions(server: VllmServer, xargs: dict[str, Any] | None) -> float:
    """How many requests vLLM preempts when many come at once with these hints; all are answered in full."""
    before = server.metric("vllm:num_preemptions_total")
    async with httpx.AsyncClient(base_url=server.url, timeout=300.0) as http:
        bodies = [body(number) | ({"vllm_xargs": xargs} if xargs is not None else {}) for number in range(AT_ONCE)]
        answers = await asyncio.gather(*(complete(http, content) for content in bodies))
    assert answers == [ANSWER] * AT_ONCE
    return server.metric("vllm:num_preemptions_total") - before


async def test_reservations_end_the_preemptions_of_many_at_once(server: VllmServer) -> None:
    stock = await preemptions(server, None)
    held = await preemptions(server, {"kv_reserve_tokens": ANSWER, "kv_class": "chat"})
    assert stock > 10
    assert held <= 0.05 * stock
    assert server.metric("kvantile:admission_waits_total", reason="reservation") > 0
    await is_empty(server)


async def test_a_class_has_defaults_from_the_file(server: VllmServer) -> None:
    assert await preemptions(server, {"kv_class": "batch"}) == 0
    await is_empty(server)


async def test_answers_longer_than_their_reservation_are_counted(server: VllmServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as http:
        assert await complete(http, body(answer=20, vllm_xargs={"kv_reserve_tokens": 5, "kv_class": "short"})) == 20
    await comes_to(server, 1, "kvantile:overshoots_total", **{"class": "short"})


@pytest.mark.parametrize(("xargs", "broken"), BAD_HINTS)
async def test_a_bad_hint_is_counted_and_the_request_served(server: VllmServer, xargs: str, broken: int) -> None:
    before = server.metric("kvantile:broken_hints_total")
    async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as http:
        assert await complete(http, body(answer=4, vllm_xargs=json.loads(xargs))) == 4
    await comes_to(server, before + broken, "kvantile:broken_hints_total")
    await is_empty(server)


async def test_several_answers_to_one_prompt_are_reserved_for_each(server: VllmServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as http:
        assert await complete(http, body(answer=8, n=3, vllm_xargs={"kv_reserve_tokens": 8})) == 24
    await is_empty(server)


async def test_clients_that_go_away_leave_nothing_behind(server: VllmServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as http:

        async def leave(number: int) -> None:
            xargs = {"kv_reserve_tokens": 1500, "kv_pooling": 0.5, "kv_ttft_budget": 1.0}
            content = body(number, answer=1500, stream=True, vllm_xargs=xargs)
            # The first to come get a token; the others go while they wait.
            with suppress(TimeoutError):
                async with asyncio.timeout(2.0), http.stream("POST", "/v1/completions", json=content) as answer:
                    await anext(answer.aiter_lines())

        await asyncio.gather(*map(leave, range(40)))
    await is_empty(server)


@pytest.fixture
def _broken_file(server: VllmServer, defaults: Path) -> Iterator[None]:
    """While the server runs."""
    del server
    defaults.write_text("{", encoding="utf-8")
    yield
    defaults.write_text(json.dumps(DEFAULTS), encoding="utf-8")


@pytest.mark.usefixtures("_broken_file")
async def test_a_defaults_file_that_breaks_leaves_the_last_good_one(server: VllmServer) -> None:
    async def is_noticed() -> bool:
        async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as http:
            await complete(http, body(answer=2))
        return server.metric("kvantile:broken_defaults_total") == 1

    await eventually(is_noticed, "the broken file was noticed")
    assert await preemptions(server, {"kv_class": "batch"}) == 0
    assert server.log.read_text(encoding="utf-8").count("what was read before stays in force") == 1
    await is_empty(server)
