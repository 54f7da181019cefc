"""What a request meets on its way: the hint, other replicas, the queue, and refusals a client can act on."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import chat, eventually, gateway
from tests.support.plans import make_class, make_group, make_plan, make_route
from tests.support.replica import Exchange, answer, stand_in, two_tokens


async def until_gone(exchange: Exchange) -> None:
    """An engine that never answers."""
    await exchange.gone.wait()


async def test_the_hint_follows_the_route_and_not_the_client(tmp_path: Path) -> None:
    async with stand_in() as replica, gateway(tmp_path, make_plan(), [replica]) as gw:
        sent = {"kv_reserve_tokens": 9999, "kv_mine": 1, "other": "stays"}
        response = await gw.post(
            chat(max_tokens=30, n=2, vllm_xargs=sent), authorization="Bearer mine", x_request_id="r1"
        )
    hint = replica.received[0].hint
    assert 0 < hint.pop("kv_ttft_budget") <= 1
    assert hint == {"kv_reserve_tokens": 30, "kv_pooling": 0.1, "kv_class": "chat", "other": "stays"}
    assert "authorization" not in replica.received[0].headers
    assert replica.received[0].headers["x-request-id"] == "r1"
    labels = {name: response.headers[f"x-{name}"] for name in ("request-id", "kvantile-class", "kvantile-group")}
    assert labels == {"request-id": "r1", "kvantile-class": "chat", "kvantile-group": "g"}
    assert response.headers["x-kvantile-replica"] == replica.url


async def test_answers_do_not_name_their_replica_where_that_is_not_wanted(tmp_path: Path) -> None:
    async with stand_in() as replica, gateway(tmp_path, make_plan(), [replica], "--no-replica-header") as gw:
        response = await gw.post(chat())
    assert response.status_code == 200
    assert "x-kvantile-replica" not in response.headers
    assert response.headers["x-kvantile-group"] == "g"


async def test_requests_of_one_prefix_go_to_one_replica_while_it_has_room(tmp_path: Path) -> None:
    async with stand_in() as a, stand_in() as b, stand_in() as c, gateway(tmp_path, make_plan(), [a, b, c]) as gw:
        found = {(await gw.post(chat(f"{i}", system="same"))).headers["x-kvantile-replica"] for i in range(12)}
        assert len(found) == 1
        found = {(await gw.post(chat(system=f"{i}"))).headers["x-kvantile-replica"] for i in range(24)}
        assert found == {a.url, b.url, c.url}


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_what_another_replica_may_do_better_is_tried_there(tmp_path: Path, status: int) -> None:
    async def unavailable(exchange: Exchange) -> None:
        await exchange.respond(status, {})

    async with stand_in(unavailable) as bad, stand_in() as good, gateway(tmp_path, make_plan(), [bad, good]) as gw:
        answers = [await gw.post(chat(system=f"{i}")) for i in range(12)]
        assert [item.status_code for item in answers] == [200] * 12
        assert bad.received
        good.script = unavailable
        last = await gw.post(chat())
        assert last.status_code == status
        assert last.json()["error"]["type"] == "upstream_error"
        await gw.until_idle()


@pytest.mark.parametrize("status", [400, 422, 500])
async def test_other_errors_are_the_answer_and_are_not_tried_again(tmp_path: Path, status: int) -> None:
    async def fails(exchange: Exchange) -> None:
        await exchange.respond(status, b"went wrong", content_type="text/plain")

    async with stand_in(fails) as a, stand_in(fails) as b, gateway(tmp_path, make_plan(), [a, b]) as gw:
        response = await gw.post(chat())
    assert response.status_code == status
    assert "went wrong" in response.json()["error"]["message"]
    assert len(a.received) + len(b.received) == 1


async def test_a_killed_replica_loses_no_request_that_had_no_byte(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await release.wait()
        await two_tokens(exchange)

    async def headers_only(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.gone.wait()

    async with (
        stand_in(slow) as kept,
        stand_in(headers_only) as killed,
        gateway(tmp_path, make_plan(), [kept, killed]) as gw,
    ):
        pending = [asyncio.create_task(gw.post(chat(system=f"{i}", stream=i % 2 == 0))) for i in range(20)]

        async def all_are_there() -> bool:
            return len(kept.received) + len(killed.received) == len(pending)

        await eventually(all_are_there, "all requests were with a replica")
        assert killed.received
        await killed.stop()
        release.set()
        answers = await asyncio.gather(*pending)
        assert [item.status_code for item in answers] == [200] * 20
        assert not [item.text for item in answers if "error" in item.text]

        await killed.start()
        killed.script = two_tokens

        before = len(killed.received)

        async def is_used() -> bool:
            await gw.post(chat())
            return len(killed.received) > before

        await eventually(is_used, "the recovered replica was used")
        await gw.until_idle()


async def test_a_full_replica_makes_wait_and_then_says_when_to_come_back(tmp_path: Path) -> None:
    plan = make_plan(groups=[make_group(maxNumSeqs=1)])
    flags = ("--queue-length", "1", "--queue-wait", "60")
    async with stand_in(until_gone) as replica, gateway(tmp_path, plan, [replica], *flags) as gw:
        running = asyncio.create_task(gw.post(chat()))
        await replica.arrived.get()
        waiting = asyncio.create_task(gw.post(chat()))

        async def one_waits() -> bool:
            return await gw.metric("kvantile_router_waiting_requests") == 1

        await eventually(one_waits, "a request was waiting")
        refused = await gw.post(chat())
        assert refused.status_code == 429
        assert refused.headers["x-kvantile-reason"] == "full"
        assert int(refused.headers["retry-after"]) >= 1

        replica.script = two_tokens
        running.cancel()
        assert (await waiting).status_code == 200
        await gw.until_idle()


async def test_a_wait_that_is_too_long_ends_with_429(tmp_path: Path) -> None:
    plan = make_plan(groups=[make_group(maxNumSeqs=1)])
    async with stand_in(until_gone) as replica, gateway(tmp_path, plan, [replica], "--queue-wait", "0.05") as gw:
        running = asyncio.create_task(gw.post(chat()))
        await replica.arrived.get()
        refused = await gw.post(chat())
        assert (refused.status_code, refused.headers["x-kvantile-reason"]) == (429, "waited")
        running.cancel()
        await gw.until_idle()


async def test_reservations_and_not_requests_fill_a_replica(tmp_path: Path) -> None:
    plan = make_plan(groups=[make_group(kvTokens=1000)], routes=[make_route(form="held", reserveTokens=400)])
    async with stand_in(until_gone) as replica, gateway(tmp_path, plan, [replica], "--queue-wait", "0") as gw:
        running = [asyncio.create_task(gw.post(chat())) for _ in range(2)]
        for _ in running:
            await replica.arrived.get()
        assert (await gw.state())["reservedTokens"] in range(800, 810)
        assert (await gw.post(chat())).status_code == 429
        small = asyncio.create_task(gw.post(chat(max_tokens=50)))
        await replica.arrived.get()
        for task in (*running, small):
            task.cancel()
        await gw.until_idle()


async def test_nothing_ready_is_503_and_the_gateway_stays_alive(tmp_path: Path) -> None:
    async with stand_in() as replica:
        replica.healthy = False
        async with gateway(tmp_path, make_plan(), [replica], ready=0) as gw:
            response = await gw.post(chat())
            assert (response.status_code, response.headers["x-kvantile-reason"]) == (503, "unready")
            assert int(response.headers["retry-after"]) >= 1
            assert (await gw.client.get("/readyz")).status_code == 503
            assert (await gw.client.get("/healthz")).status_code == 200


async def test_another_group_serves_when_the_chosen_one_has_nothing_ready(tmp_path: Path) -> None:
    routes = [make_route(group="a", fraction=0.9), make_route(group="b", fraction=0.1)]
    plan = make_plan(groups=[make_group("a"), make_group("b")], routes=routes)
    async with stand_in() as only, gateway(tmp_path, plan, {"b": [only]}) as gw:
        answers = [await gw.post(chat(system=f"{i}")) for i in range(5)]
    assert [(item.status_code, item.headers["x-kvantile-group"]) for item in answers] == [(200, "b")] * 5


async def test_a_deadline_ends_with_504_before_the_first_byte_and_with_an_event_after(tmp_path: Path) -> None:
    async def one_token(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.token("only")
        await exchange.gone.wait()

    async with stand_in(until_gone) as replica, gateway(tmp_path, make_plan(), [replica], "--deadline", "0.3") as gw:
        response = await gw.post(chat())
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline")
        replica.script = one_token
        response = await gw.post(chat(stream=True))
        assert response.status_code == 200
        assert '"code": "deadline"' in response.text
        assert "[DONE]" not in response.text
        await gw.until_idle()


BAD = [
    (b"{", 400, None),
    (b"[1]", 400, None),
    (b"\xff\xfe", 400, None),
    (b'{"model": "model", "messages": [], "temperature": NaN}', 400, None),
    (b'{"model": "model", "messages": [], "temperature": 1e999}', 400, None),
    (b"[" * 100_000, 400, None),
    ({"messages": [{"role": "user", "content": "hi"}]}, 400, "model"),
    ({"model": "model"}, 400, "messages"),
    (chat(max_tokens=0), 400, "max_tokens"),
    (chat(max_tokens=1.5), 400, "max_tokens"),
    (chat(max_completion_tokens="7"), 400, "max_completion_tokens"),
    (chat(stream="yes"), 400, "stream"),
    (chat(n=True), 400, "n"),
    (chat(max_tokens=4096), 400, "max_tokens"),
    (chat("word " * 8000), 400, "messages"),
    (chat() | {"model": "another"}, 404, "model"),
    (b" " * 100_001, 413, None),
]


async def test_bad_requests_are_told_what_is_wrong_and_reach_no_replica(tmp_path: Path) -> None:
    async with stand_in() as replica, gateway(tmp_path, make_plan(), [replica], "--max-body", "100000") as gw:
        for body, status, field in BAD:
            response = await gw.post(body)
            assert response.status_code == status, body
            error = response.json()["error"]
            assert error["param"] == field, body
            assert error["message"]
            assert response.headers["x-request-id"]
        assert (await gw.client.get("/nowhere")).json()["error"]["type"] == "not_found_error"
        assert (await gw.client.get("/v1/models/another")).status_code == 404
        assert (await gw.client.get("/v1/models")).json()["data"][0]["id"] == "model"
        await gw.until_idle()
    assert not replica.received


async def test_only_clients_with_a_key_are_served(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n\ntwo\n")
    async with stand_in() as replica, gateway(tmp_path, make_plan(), [replica], "--api-keys", str(keys)) as gw:
        for authorization, status in {
            "": 401,
            "Bearer three": 401,
            "two": 401,
            "Bearer two": 200,
            "bearer one": 200,
        }.items():
            assert (await gw.post(chat(), authorization=authorization)).status_code == status
        assert (await gw.client.get("/v1/models")).status_code == 401


async def test_other_surfaces_are_passed_on_untouched(tmp_path: Path) -> None:
    async def embeds(exchange: Exchange) -> None:
        await exchange.respond(200, {"data": [1]})

    body: dict[str, Any] = {"model": "model", "input": "text"}
    async with stand_in(embeds) as replica, gateway(tmp_path, make_plan(), [replica]) as gw:
        response = await gw.post(body, path="/v1/embeddings")
    assert response.json() == {"data": [1]}
    assert replica.received[0].body == body


@pytest.mark.parametrize("path", ["/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/x/%2E%2E/%2e%2e/metrics"])
async def test_no_path_leads_to_what_replicas_keep_for_their_operators(tmp_path: Path, path: str) -> None:
    async with stand_in() as replica, gateway(tmp_path, make_plan(), [replica]) as gw:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 17\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", gw.served.port)
        writer.write(head.encode() + b'{"model":"model"}')
        said = await reader.read()
        writer.close()
    assert said.startswith(b"HTTP/1.1 404 ")
    assert not replica.received


async def test_a_path_reaches_the_replica_as_it_was_meant(tmp_path: Path) -> None:
    async with stand_in() as replica, gateway(tmp_path, make_plan(), [replica]) as gw:
        await gw.post({"model": "model"}, path="/v1/a%3Fb%23c%00d%25e%20f")
    assert replica.received[0].path == "/v1/a%3Fb%23c%00d%25e%20f"


async def test_a_redirect_does_not_send_the_client_past_the_gateway(tmp_path: Path) -> None:
    async def elsewhere(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 307 X\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n")

    async with stand_in(elsewhere) as replica, gateway(tmp_path, make_plan(), [replica]) as gw:
        response = await gw.post(chat(), path="/v1/chat/completions/")
    assert response.status_code == 404
    assert "location" not in response.headers
    assert "without a slash" in response.json()["error"]["message"]


async def test_classes_hints_and_headers_follow_the_plan(tmp_path: Path) -> None:
    classes = [make_class("short", match=[{"maxTokens": {"lte": 10}}]), make_class("chat")]
    routes = [make_route("short", reserveTokens=8, form="held", order="fcfs"), make_route("chat", form="none")]
    router = {"allowClassHeader": True, "allowHints": True}
    plan = make_plan(classes=classes, routes=routes, router=router)
    async with stand_in() as replica, gateway(tmp_path, plan, [replica]) as gw:
        await gw.post(chat(max_tokens=10, vllm_xargs={"kv_mine": 1}))
        await gw.post(chat(max_tokens=11))
        await gw.post(chat(max_tokens=11), x_kvantile_class="short")
    hints = [exchange.hint for exchange in replica.received]
    assert hints[0] == {"kv_reserve_tokens": 8, "kv_class": "short", "kv_mine": 1}
    assert hints[1].keys() == {"kv_class", "kv_ttft_budget"}
    assert hints[2] == {"kv_reserve_tokens": 8, "kv_class": "short"}


async def test_planned_fractions_are_kept_when_one_prefix_dominates(tmp_path: Path) -> None:
    routes = [make_route(group="a", fraction=0.3), make_route(group="b", fraction=0.7)]
    plan = make_plan(groups=[make_group("a"), make_group("b")], routes=routes)
    async with AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(stand_in()) for _ in range(2)]
        gw = await stack.enter_async_context(gateway(tmp_path, plan, {"a": [a], "b": [b]}))
        for index in range(300):
            await gw.post(chat(system="hot" if index % 2 else f"{index}"))
        realised = {entry["group"]: entry["fraction"] for entry in (await gw.state())["realised"]}
    assert abs(realised["a"] - 0.3) < 17 / 300


async def test_an_answer_in_one_piece_teaches_its_length(tmp_path: Path) -> None:
    async def cut_off(exchange: Exchange) -> None:
        await exchange.respond(200, answer(40, finish="length"))

    async with stand_in(cut_off) as replica, gateway(tmp_path, make_plan(), [replica]) as gw:
        await gw.post(chat(max_tokens=40))
        seen = (await gw.client.get("/observations")).json()["classes"]["chat"]
    assert (seen["requests"], seen["finished"], seen["censored"]) == (1, {}, {"40": 1})
