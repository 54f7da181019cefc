"""The gateway as a process: its flags and files, what it does when they change, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.gateways import chat, eventually, gateway, write_plan
from tests.support.plans import make_group, make_plan, make_route
from tests.support.replica import Exchange, stand_in, two_tokens
from tests.support.servers import served


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a gateway that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "kvantile_router", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=os.environ | env,
    )


async def test_a_changed_plan_takes_over_and_an_unreadable_one_does_not(tmp_path: Path) -> None:
    async with stand_in() as replica, gateway(tmp_path, make_plan(), [replica]) as gw:
        gw.plan_path.write_text("{")

        async def complained() -> bool:
            return any("changed file is ignored" in line for line in gw.served.lines)

        await eventually(complained, "the gateway said that the plan is unreadable")
        assert (await gw.post(chat())).status_code == 200
        write_plan(gw.plan_path, make_plan(routes=[make_route(form="held", reserveTokens=7)]))

        async def holds() -> bool:
            await gw.post(chat())
            return bool(replica.received[-1].hint["kv_reserve_tokens"] == 7)

        await eventually(holds, "the new plan was in force")
        assert sum("changed file is ignored" in line for line in gw.served.lines) == 1


async def test_requests_on_a_group_that_went_finish(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await release.wait()
        await two_tokens(exchange)

    plan = make_plan(groups=[make_group("old"), make_group("new")], routes=[make_route(group="old")])
    later = make_plan(groups=[make_group("new")], routes=[make_route(group="new")])
    async with stand_in(slow) as old, stand_in() as new, gateway(tmp_path, plan, {"old": [old], "new": [new]}) as gw:
        pending = asyncio.create_task(gw.post(chat()))
        await old.arrived.get()
        write_plan(gw.plan_path, later)

        async def routed_anew() -> bool:
            return [group["name"] for group in (await gw.state())["groups"]] == ["new"]

        await eventually(routed_anew, "the new plan was in force")
        assert (await gw.post(chat())).headers["x-kvantile-group"] == "new"
        release.set()
        finished = await pending
        assert (finished.status_code, finished.headers["x-kvantile-group"]) == (200, "old")
        await gw.until_idle()
    assert any("the plan lacks are ignored group=old" in line for line in gw.served.lines)


async def test_the_replicas_file_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "replicas.json"
    file.write_text('{"replicas": []}')
    async with stand_in() as replica, gateway(tmp_path, make_plan(), [], "--replicas", str(file)) as gw:
        assert (await gw.post(chat())).status_code == 503
        file.write_text(json.dumps({"replicas": [{"group": "g", "url": replica.url}]}))

        async def serves() -> bool:
            return (await gw.post(chat())).status_code == 200

        await eventually(serves, "the new replica served")
        file.write_text('{"replicas": []}')

        async def is_empty() -> bool:
            return not (await gw.state())["replicas"]

        await eventually(is_empty, "the replica was gone")


async def test_sigterm_lets_streams_finish_and_exits_with_0(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.token("first")
        await release.wait()
        await exchange.token("last", finish="stop")
        await exchange.end_stream()

    async with (
        stand_in(slow) as replica,
        gateway(tmp_path, make_plan(), [replica]) as gw,
        gw.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        chunks = response.aiter_raw()
        await anext(chunks)
        gw.served.terminate()

        async def refuses() -> bool:
            try:
                async with httpx.AsyncClient() as client:
                    await client.get(gw.served.url + "/healthz")
            except httpx.TransportError:
                return True
            return False

        async with asyncio.timeout(3):
            await eventually(refuses, "new connections were refused")
        release.set()
        rest = b"".join([chunk async for chunk in chunks])
        assert b"last" in rest
        assert rest.endswith(b"[DONE]\n\n")
        assert await gw.served.exit_code() == 0


def test_a_port_in_use_is_exit_1(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.json", make_plan())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run("--plan", str(plan), "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 1
    assert "choose another with --port" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--replica", "other=http://127.0.0.1:1"), "the plan has no such group; it has g"),
        (("--replica", "g"), "expected GROUP=URL"),
        (("--replicas", "absent.json"), "absent.json: No such file"),
        (("--port", "70000"), "70000"),
        (("--api-keys", "empty"), "has no key"),
        (("--config", "config.toml"), "quue-length: no such setting"),
    ],
)
def test_wrong_flags_are_exit_2_and_say_what_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_plan(tmp_path / "plan.json", make_plan())
    (tmp_path / "empty").touch()
    (tmp_path / "config.toml").write_text("quue-length = 3")
    ended = run("--plan", "plan.json", "--port", "0", *flags)
    assert ended.returncode == 2
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("flag", ["--speed", "--deadline", "--queue-wait"])
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_time_that_is_no_number_is_exit_2(tmp_path: Path, flag: str, number: str) -> None:
    ended = run("--plan", str(write_plan(tmp_path / "plan.json", make_plan())), flag, number)
    assert ended.returncode == 2
    assert "allowed a finite number" in ended.stderr


def test_a_host_that_is_no_name_is_exit_1(tmp_path: Path) -> None:
    ended = run("--plan", str(write_plan(tmp_path / "plan.json", make_plan())), "--host", "a..b", "--port", "0")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: cannot listen on a..b port 0: ")


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_a_plan_with_a_number_that_is_none_is_exit_2(tmp_path: Path, number: str) -> None:
    text = json.dumps(make_plan().to_json())
    (tmp_path / "plan.json").write_text(text[:-1] + f', "costs": {{"gpuUSDPerHour": {number}}}, "gap": {number}}}')
    ended = run("--plan", str(tmp_path / "plan.json"))
    assert ended.returncode == 2
    assert "gap: Input should be a finite number" in ended.stderr


def test_a_plan_that_is_wrong_is_exit_2_with_the_field(tmp_path: Path) -> None:
    data = make_plan().to_json()
    data["routes"][0]["fraction"] = 2
    (tmp_path / "plan.json").write_text(json.dumps(data))
    ended = run("--plan", str(tmp_path / "plan.json"))
    assert ended.returncode == 2
    assert "plan.json: routes[0].fraction" in ended.stderr


async def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", make_plan())
    config = {"plan": str(tmp_path / "plan.json"), "port": 1, "max-body": 1, "queue-length": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    env = os.environ | {
        "KVANTILE_CONFIG": str(tmp_path / "config.json"),
        "KVANTILE_MAX_BODY": "40",
        "KVANTILE_PORT": "2",
    }
    async with (
        served("kvantile_router", "--port", "0", env=env) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        assert (await client.post("/v1/completions", content=b" " * 41)).status_code == 413
        assert (await client.post("/v1/completions", content=b" " * 39)).status_code == 400
