"""Streams over real sockets: nothing is held back, and whoever goes away is noticed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.support.gateways import chat, gateway
from tests.support.plans import make_plan
from tests.support.replica import Exchange, stand_in

NOTICED_WITHIN_S = 2.0


async def test_a_chunk_arrives_before_the_next_one_exists(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.token("first")
        await release.wait()
        await exchange.token("second", finish="stop")
        await exchange.usage(10, 2)
        await exchange.end_stream()

    async with stand_in(script) as replica, gateway(tmp_path, make_plan(), [replica]) as gw:
        async with gw.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
            chunks = response.aiter_raw()
            first = await anext(chunks)
            assert b"first" in first
            assert b"second" not in first
            release.set()
            rest = b"".join([chunk async for chunk in chunks])
        assert rest.count(b"data: ") == 2
        assert b"second" in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        await gw.until_idle()
        seen = (await gw.client.get("/observations")).json()["classes"]["chat"]
        assert seen["finished"] == {"2": 1}
        assert seen["prompts"] == {"10": 1}


async def test_usage_reaches_only_the_client_that_asked_for_it(tmp_path: Path) -> None:
    async with stand_in() as replica, gateway(tmp_path, make_plan(), [replica]) as gw:
        unasked = await gw.post(chat(stream=True))
        refused = await gw.post(chat(stream=True, stream_options={"include_usage": False}))
        asked = await gw.post(chat(stream=True, stream_options={"include_usage": True}))
    assert "usage" not in unasked.text
    assert "usage" not in refused.text
    assert '"usage"' in asked.text
    assert all(exchange.body["stream_options"] == {"include_usage": True} for exchange in replica.received)


async def test_a_client_that_goes_while_nothing_flows_ends_the_upstream_request(tmp_path: Path) -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.gone.wait()

    async def one_token(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.token("only")
        await exchange.gone.wait()

    async with stand_in(silent) as replica, gateway(tmp_path, make_plan(), [replica]) as gw:
        before_headers = asyncio.create_task(gw.post(chat(stream=True)))
        exchange = await replica.arrived.get()
        before_headers.cancel()
        async with asyncio.timeout(NOTICED_WITHIN_S):
            await exchange.gone.wait()

        replica.script = one_token
        async with gw.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
            await anext(response.aiter_raw())
            exchange = await replica.arrived.get()
        async with asyncio.timeout(NOTICED_WITHIN_S):
            await exchange.gone.wait()

        await gw.until_idle()
        assert await gw.metric('kvantile_router_requests_total{class="chat",group="g",status="499"}') == 1
        assert await gw.metric('kvantile_router_requests_total{class="chat",group="",status="499"}') == 1
        assert (await gw.client.get("/observations")).json()["classes"]["chat"]["censored"] == {"1": 1}


async def test_a_stream_that_breaks_ends_with_an_error_event_and_without_done(tmp_path: Path) -> None:
    async def breaks(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.token("only")
        exchange.cut()

    async with stand_in(breaks) as replica, gateway(tmp_path, make_plan(), [replica]) as gw:
        response = await gw.post(chat(stream=True))
        await gw.until_idle()
    events = response.text.strip().split("\n\n")
    assert "only" in events[0]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "broken"
    assert "[DONE]" not in response.text


async def test_nothing_follows_an_error_event_of_the_replica(tmp_path: Path) -> None:
    async def fails(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.token("only")
        await exchange.event({"error": {"message": "out of memory"}})
        await exchange.end_stream()

    async with stand_in(fails) as replica, gateway(tmp_path, make_plan(), [replica]) as gw:
        response = await gw.post(chat(stream=True))
        await gw.until_idle()
    assert response.text.count("data: ") == 2
    assert "out of memory" in response.text
    assert "[DONE]" not in response.text


async def test_an_http_1_0_client_gets_no_chunked_encoding(tmp_path: Path) -> None:
    async with stand_in() as replica, gateway(tmp_path, make_plan(), [replica]) as gw:
        body = json.dumps(chat(stream=True)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", gw.served.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    assert b"transfer-encoding" not in head.lower()
    assert answer.startswith(b"data: ")
    assert answer.endswith(b"data: [DONE]\n\n")
