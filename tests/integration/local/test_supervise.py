"""A server that neither says where it listens nor ends alone: asked at /health, and ended with what it has started."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE

import httpx
import psutil
import pytest

from kvantile_optimizer.errors import WorkError
from kvantile_optimizer.local.supervise import Command, Server, free_port

HOST = "127.0.0.1"
SILENT = """
    import os, subprocess, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(os.environ["FOLDER"].encode())

        def log_message(self, *arguments):
            pass

    # It shares our output, as an engine's core does.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert not os.listdir(os.environ["FOLDER"])
    open(os.path.join(os.environ["FOLDER"], "used"), "w").close()
    HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def make_command(folder: Path, source: str, *, start_deadline_s: float = 30.0) -> Command:
    (folder / "silent.py").write_text(textwrap.dedent(source))
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return Command(
        "silent",
        "silent",
        (),
        python=sys.executable,
        environment=(("PYTHONPATH", paths),),
        folder_variable="FOLDER",
        health_host=HOST,
        start_deadline_s=start_deadline_s,
    )


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[None]:
    task = asyncio.create_task(server.run())
    try:
        await server.listening.wait()
        yield
    finally:
        server.stop()
        await task


async def folder_of(server: Server) -> str:
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(str(server.url))).text


def family(server: Server) -> list[psutil.Process]:
    assert server.pid is not None
    leader = psutil.Process(server.pid)
    return [leader, *leader.children(recursive=True)]


def exists(path: str) -> bool:
    return Path(path).exists()


def are_gone(processes: list[psutil.Process]) -> bool:
    """Whether all have ended; init may take a moment to notice those that it has inherited."""
    return not psutil.wait_procs(processes, timeout=5.0)[1]


async def test_a_killed_leader_takes_its_family_along_and_comes_back_at_its_port(tmp_path: Path) -> None:
    back = asyncio.Event()

    def changed(_server: Server, news: str) -> None:
        if "is back" in news:
            back.set()

    server = Server(make_command(tmp_path, SILENT), tmp_path, changed)
    async with running(server):
        url, folder, before = server.url, await folder_of(server), family(server)
        assert len(before) == 2
        before[0].kill()
        await back.wait()
        assert server.url == url
        assert are_gone(before)
        assert await folder_of(server) != folder
        assert not exists(folder)
        after = family(server)
    assert are_gone(after)


async def test_a_supervisor_that_dies_takes_the_family_along(tmp_path: Path) -> None:
    command = make_command(tmp_path, SILENT)
    (tmp_path / "folder").mkdir()
    environment = {**os.environ, **dict(command.environment), "FOLDER": str(tmp_path / "folder")}
    leader = psutil.Popen(command.argv(free_port(HOST)), stdin=PIPE, env=environment, start_new_session=True)
    async with asyncio.timeout(20):
        while not leader.children():  # noqa: ASYNC110 - no event crosses from another process
            await asyncio.sleep(0.02)
    members = [leader, *leader.children()]
    # The kernel does so however the supervisor dies.
    leader.stdin.close()
    assert are_gone(members)


async def test_an_error_far_up_the_log_is_told_with_its_end(tmp_path: Path) -> None:
    source = """
        print("(core) ValueError: the cache is too small")
        for number in range(40):
            print("frame", number)
        raise SystemExit("see root cause above")
    """
    with pytest.raises(WorkError, match=r"(?s)exit code 1.*the cache is too small.*frame 39.*see root cause"):
        await Server(make_command(tmp_path, source), tmp_path, lambda *_: None).run()


async def test_who_does_not_answer_in_time_is_given_up(tmp_path: Path) -> None:
    command = make_command(tmp_path, "import time\ntime.sleep(600)", start_deadline_s=1.0)
    with pytest.raises(WorkError, match="silent did not listen within 1 s"):
        await Server(command, tmp_path, lambda *_: None).run()
