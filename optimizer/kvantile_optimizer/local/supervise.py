"""Keeps one server process running until it is told to stop.

Start, wait for the line `listening on URL`, follow the output into a log, and when the process ends start it again
after a wait (`backoff`). A server that prints no such line is asked at `/health`, at a port that is chosen here. One
that never listened in `FIRST_TRIES` starts is given up with the tail of its log: its flags are wrong or its port is
taken, and trying for ever would hide that. Stopping is SIGTERM, a grace period, then SIGKILL to the process group;
being cancelled at any point kills first and tidies up afterwards. The group is killed too when the server ends by
itself: what it has started would keep its memory. Each process has a session of its own, so that Ctrl-C in the terminal
reaches the supervisor alone, which then drains in order.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx

from kvantile_optimizer.errors import WorkError
from kvantile_optimizer.local.backoff import Backoff

LISTENING = re.compile(rb"listening on http://(?P<host>\S+):(?P<port>\d+)\s")
START_DEADLINE_S = 60.0
"""Python starts in a second; a dozen of them at once on two slow cores have taken ten."""
FIRST_TRIES = 2
POLL_S = 0.1
HEALTH_DEADLINE_S = 5.0
TAIL_BYTES = 1 << 16
LAST_LINES, CAUSES = 15, 5
ERROR = re.compile(r"\w(?:Error|Exception): ")
LONGEST_LOG_BYTES = 8 << 20
CHILD = "kvantile_optimizer.local.child"
SETTINGS_PREFIX = "KVANTILE_"
"""What the servers' environment variables begin with."""


@dataclass(frozen=True, slots=True)
class Command:
    """A server as it is started: its module, and its arguments but for `--port`."""

    name: str
    module: str
    arguments: tuple[str, ...]
    python: str = sys.executable
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that it gets besides ours."""
    folder_variable: str | None = None
    """A variable that names an empty folder, another at each start."""
    health_host: str | None = None
    """Where to ask /health whether it listens; None for a server that prints it, and that takes port 0."""
    start_deadline_s: float = START_DEADLINE_S

    def argv(self, port: int) -> list[str]:
        """What is executed; `port` 0 lets the kernel choose."""
        # -P: files of the folder that the user is in must not stand in for modules.
        return [self.python, "-P", "-m", CHILD, self.module, *self.arguments, "--port", str(port)]


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """What a server gets of our environment: its settings are its flags, so none that the user has set for another."""
    return {name: value for name, value in own.items() if not name.startswith(SETTINGS_PREFIX)}


def free_port(host: str) -> int:
    """A port that nobody listens at, for a server that takes it at once."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Server:
    """One process that is kept alive. `url` is None while it does not listen."""

    def __init__(
        self,
        command: Command,
        logs: Path,
        changed: Callable[[Server, str], None],
        port: int = 0,
        grace_s: float = 10.0,
        *,
        must_start: bool = True,
    ) -> None:
        """`changed(server, what)` is called after `url` changed, with a sentence for people when it is news.

        Without `must_start` it is tried for ever, and whoever waits for `listening` decides for how long.
        """
        self.command = command
        self.url: str | None = None
        self.pid: int | None = None
        self.restarts = 0
        self.listening = asyncio.Event()
        self._log_path = logs / f"{command.name}.log"
        self._changed = changed
        self._port = self._wanted_port = port
        self._grace_s = grace_s
        self._must_start = must_start
        self._stopping = asyncio.Event()
        self._backoff = Backoff()
        self._tail = b""
        self._deadline = asyncio.timeout(None)

    @property
    def name(self) -> str:
        """The name in messages and of the log."""
        return self.command.name

    def stop(self) -> None:
        """Asks `run` to drain the process and return."""
        self._stopping.set()

    async def run(self) -> None:
        """Keeps the process alive until `stop`. Raises WorkError if it never listens."""
        with self._log_path.open("ab", buffering=0) as log:
            while not self._stopping.is_set():
                started = time.monotonic()
                ended = await self._run_once(log)
                if not self._stopping.is_set():
                    await self._pause(ended, time.monotonic() - started)

    async def _run_once(self, log: BinaryIO) -> str:
        self._tail = b""
        command = self.command
        port = self._port or (free_port(command.health_host) if command.health_host else 0)
        with tempfile.TemporaryDirectory(
            prefix=f"{self.name}-", dir=self._log_path.parent, ignore_cleanup_errors=True
        ) as folder:
            own = {command.folder_variable: folder} if command.folder_variable else {}
            process = await asyncio.create_subprocess_exec(
                *command.argv(port),
                stdin=PIPE,
                stdout=PIPE,
                stderr=STDOUT,
                start_new_session=True,
                env={**environment(os.environ), **dict(command.environment), **own},
            )
            return await self._watched(process, port, log)

    async def _watched(self, process: Process, port: int, log: BinaryIO) -> str:
        """Until the process has ended, or has been ended; says how."""
        self.pid = process.pid
        stopping = asyncio.create_task(self._stopping.wait(), name=f"stop {self.name}")
        following = asyncio.create_task(self._follow(process, log), name=f"log {self.name}")
        ending = asyncio.create_task(_ended(process), name=f"end {self.name}")
        asking = asyncio.create_task(self._ask(port), name=f"health {self.name}")
        try:
            await asyncio.wait({stopping, following, ending}, return_when=asyncio.FIRST_COMPLETED)
            await end(process, self._grace_s if self._stopping.is_set() or self.url else 0.0)
            return await following
        finally:
            kill(process)
            for task in (stopping, ending, asking):
                task.cancel()
            await asyncio.gather(stopping, following, ending, asking, process.wait(), return_exceptions=True)
            self.pid = None

    async def _follow(self, process: Process, log: BinaryIO) -> str:
        """Copies the output until it ends; says how it ended."""
        assert process.stdout is not None  # noqa: S101 - asked for above
        deadline_s = self.command.start_deadline_s
        try:
            async with asyncio.timeout(deadline_s) as self._deadline:
                while chunk := await process.stdout.read(1 << 16):
                    self._note(chunk, log)
                    if self.url is None and not self.command.health_host and (found := LISTENING.search(self._tail)):
                        self._listens(found["host"].decode(), int(found["port"]))
                code = await process.wait()
        except TimeoutError:
            return f"did not listen within {deadline_s:.0f} s"
        return f"ended with {_named(code)}"

    async def _ask(self, port: int) -> None:
        """Asks a server that does not print it whether it listens, until it does."""
        if (host := self.command.health_host) is None:
            return
        async with httpx.AsyncClient(trust_env=False, timeout=HEALTH_DEADLINE_S) as http:
            while not await _is_healthy(http, f"http://{host}:{port}/health"):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(POLL_S)
        self._listens(host, port)

    def _note(self, chunk: bytes, log: BinaryIO) -> None:
        self._tail = (self._tail + chunk)[-TAIL_BYTES:]
        if log.tell() > LONGEST_LOG_BYTES:
            log.truncate(0)
        log.write(chunk)

    def _listens(self, host: str, port: int) -> None:
        self._deadline.reschedule(None)
        self.url, self._port = f"http://{host}:{port}", port
        news = f"{self.name} is back at {self.url}" if self.listening.is_set() else ""
        self.listening.set()
        self._changed(self, news)

    async def _pause(self, ended: str, ran_s: float) -> None:
        """What follows an end that nobody asked for."""
        if self.url is None:
            # The kernel's last choice of port may be taken by now; a port that was asked for stays asked for.
            self._port = self._wanted_port
            if self._must_start and not self.listening.is_set() and self.restarts + 1 >= FIRST_TRIES:
                raise WorkError(f"{self.name} {ended}; the end of its log:\n{self.tail()}")
        self.url = None
        self.restarts += 1
        wait_s = self._backoff.next_wait_s(ran_s)
        self._changed(self, f"{self.name} {ended}; starting it again in {wait_s:.1f} s")
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._stopping.wait()

    def tail(self) -> str:
        """The last lines of the output, and the last errors before them: one process may die of what another wrote."""
        lines = self._tail.decode(errors="replace").splitlines()
        causes = dict.fromkeys(line for line in lines[:-LAST_LINES] if ERROR.search(line))
        return "\n".join("  " + line for line in [*list(causes)[-CAUSES:], *lines[-LAST_LINES:]])


async def end(process: Process, grace_s: float) -> None:
    """SIGTERM, then SIGKILL to the process group after `grace_s` seconds, or at once when cancelled."""
    try:
        if process.returncode is None and grace_s > 0:
            process.terminate()
            async with asyncio.timeout(grace_s):
                await _ended(process)
    except (TimeoutError, ProcessLookupError):
        pass
    finally:
        kill(process)
    await process.wait()


def kill(process: Process) -> None:
    """SIGKILL to the group of a process, which may have ended and left others behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _ended(process: Process) -> None:
    """Until the process has ended. `Process.wait` waits for its output too, which others of its group may hold open."""
    while process.returncode is None:  # noqa: ASYNC110 - asyncio has no event for it
        await asyncio.sleep(POLL_S)


async def _is_healthy(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url)).is_success
    except httpx.HTTPError:
        return False


def _named(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
