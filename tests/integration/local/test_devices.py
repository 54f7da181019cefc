"""Replicas of a machine with GPUs: each is shown its own, also after it died, and a new plan takes what is free."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvantile_optimizer.errors import WorkError
from kvantile_optimizer.local import fleet
from kvantile_optimizer.local.flags import FleetSettings, Vllm
from tests.integration.local.test_fleet import News
from tests.support.small_plan import make_group, make_plan

STAND_IN = """
    import json, os, sys
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"flags": sys.argv[1:], "variables": dict(os.environ)}).encode())

        def log_message(self, *arguments):
            pass

    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


@pytest.fixture
def settings(tmp_path: Path) -> FleetSettings:
    """A fleet of stand-ins at the place of vLLM's server, on a machine with three GPUs."""
    folder = tmp_path / "vllm" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    (folder / "api_server.py").write_text(textwrap.dedent(STAND_IN))
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    return FleetSettings(vllm=Vllm(sys.executable, {"PYTHONPATH": paths}, devices=("4", "5", "7")))


async def told(running: fleet.Fleet) -> list[dict[str, Any]]:
    """What each replica says of itself."""
    async with httpx.AsyncClient(trust_env=False) as http:
        return [(await http.get(url)).json() for _, url in running.replica_urls]


async def devices(running: fleet.Fleet) -> list[str]:
    return [said["variables"]["CUDA_VISIBLE_DEVICES"] for said in await told(running)]


async def test_each_replica_has_gpus_and_a_folder_of_its_own(settings: FleetSettings) -> None:
    news = News()
    async with fleet.running(make_plan(make_group(replicas=2)), settings, news) as running:
        assert await devices(running) == ["4", "5"]
        folders = {said["variables"]["PROMETHEUS_MULTIPROC_DIR"] for said in await told(running)}
        assert len(folders) == 2
        os.kill(running.replica_pids[0], signal.SIGKILL)
        await news.until("is back")
        assert sorted(await devices(running)) == ["4", "5"]


async def test_a_new_plan_takes_the_gpus_that_are_free(settings: FleetSettings) -> None:
    before, after = make_plan(make_group("old")), make_plan(make_group("new", replicas=2), generation=1)
    async with fleet.running(before, settings, News()) as running:
        await running.apply(after)
        assert await devices(running) == ["5", "7"]
        # Those of the replica that left are free again.
        await running.apply(make_plan(make_group("third"), generation=2))
        assert await devices(running) == ["4"]


async def test_a_plan_for_more_gpus_than_are_free_leaves_the_running_one(settings: FleetSettings) -> None:
    before, after = make_plan(make_group("old", replicas=2)), make_plan(make_group("new", replicas=2), generation=1)
    async with fleet.running(before, settings, News()) as running:
        with pytest.raises(WorkError, match="2 GPUs are needed, and 1 of this machine's 3 are free"):
            await running.apply(after)
        assert await devices(running) == ["4", "5"]
