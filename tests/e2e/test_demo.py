"""`kvantile demo` from end to end: planned, served and replayed over HTTP, compared, drawn, and gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.command import Running, kvantile, outcome

SHORT = ("--speed", "20", "--seconds", "30")


@pytest.mark.slow
async def test_the_demo_compares_three_policies_and_ends_by_itself(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, err = await outcome("demo", *SHORT, "-o", "json", "--output", str(page))
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [(row["policy"], row["form"], row["order"]) for row in rows][1:] == [
        ("stock", "none", "fcfs"),
        ("p90", "held", "fcfs"),
    ]
    assert rows[0]["policy"] == "kvantile"
    assert [row["requestsFailed"] for row in rows] == [0, 0, 0]
    assert len({row["requests"] for row in rows}) == 1
    assert len({row["gpus"] for row in rows}) == 1
    assert all(row["goodputRequestsPerSecond"] > 0 for row in rows)
    assert all(row["ttftP99Seconds"] >= row["ttftP50Seconds"] > 0 for row in rows)
    assert "won" in err or "did not win" in err
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") == 5
    assert "<script" not in html
    assert "src=" not in html


@pytest.mark.slow
async def test_a_replica_that_dies_in_mid_demo_is_told_and_started_again(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    async with kvantile("demo", *SHORT, "-o", "json", "--output", str(page)) as running:
        assert running.process.stdout is not None
        await running.until("req/s")
        victim = await _a_replica_in_work(running)
        victim.kill()
        await running.until("is back")
        rows = json.loads(await running.process.stdout.read())["rows"]
        assert await running.process.wait() == 0
    assert sum(row["replicaRestarts"] for row in rows) == 1
    assert page.exists()


async def _a_replica_in_work(running: Running) -> psutil.Process:
    """A replica that the gateway has sent requests to, as soon as there is one."""
    async with asyncio.timeout(60):
        while True:
            if found := running.replicas(connections=3):
                return found[0]
            await asyncio.sleep(0.02)


async def test_an_unwritable_page_is_told_before_anything_starts(tmp_path: Path) -> None:
    code, out, err = await outcome("demo", "--output", str(tmp_path / "missing" / "page.html"))
    assert (code, out) == (1, "")
    assert "missing/page.html cannot be written: No such file or directory" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_ctrl_c_in_mid_start_leaves_nothing(number: int, tmp_path: Path) -> None:
    async with kvantile("demo", "--output", str(tmp_path / "page.html")) as running:
        await running.until("req/s")
        # Before there is anything to end, the system's own handling of SIGTERM will do.
        assert await running.send(number) in {130, -signal.SIGTERM}
    assert "Traceback" not in running.text


async def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    async with kvantile("demo", "--output", str(tmp_path / "page.html")) as running:
        await _a_replica_in_work(running)
        children = running.children()
        os.kill(running.process.pid, signal.SIGKILL)
        await running.process.wait()
        gone, alive = psutil.wait_procs(children, timeout=5)
    assert len(gone) >= 2
    assert not alive
