"""Runs `kvantile` as a user does: as a process of its own, in a session of its own, so that Ctrl-C can be sent."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

KVANTILE = str(Path(sys.executable).with_name("kvantile"))


@dataclass
class Running:
    """A `kvantile` that runs; what it has written to stderr is in `text`."""

    process: asyncio.subprocess.Process
    text: str = ""
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self) -> None:
        assert self.process.stderr is not None
        while chunk := await self.process.stderr.read(65536):
            self.text += chunk.decode()
            self._more.set()

    async def until(self, words: str, deadline_s: float = 60.0) -> str:
        """The line with `words`, as soon as it is written."""
        try:
            async with asyncio.timeout(deadline_s):
                while words not in self.text:
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            raise AssertionError(f"no {words!r} in:\n{self.text}") from None
        return next(line for line in self.text.splitlines() if words in line)

    async def send(self, number: int, deadline_s: float = 30.0) -> int:
        """Sends a signal and waits for the exit code."""
        self.process.send_signal(number)
        async with asyncio.timeout(deadline_s):
            return await self.process.wait()

    def children(self) -> list[psutil.Process]:
        """Its processes now."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def replicas(self, connections: int = 0, *, module: str = "kvantile_engine.emulator") -> list[psutil.Process]:
        """The engines among them, which run that module, that hold at least so many TCP connections."""
        found = []
        for child in self.children():
            # Other children, such as the planner, may end while they are looked at.
            with suppress(psutil.NoSuchProcess):
                held = [item for item in child.net_connections("tcp") if item.status == psutil.CONN_ESTABLISHED]
                if module in child.cmdline() and len(held) >= connections:
                    found.append(child)
        return found


@asynccontextmanager
async def kvantile(*arguments: str, cwd: Path | None = None) -> AsyncIterator[Running]:
    """`kvantile ARGUMENTS`, killed if it still runs at the end; stdout is piped and short."""
    process = await asyncio.create_subprocess_exec(
        KVANTILE,
        *arguments,
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    running = Running(process)
    following = asyncio.create_task(running.follow(), name="stderr")
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await following


async def outcome(*arguments: str, cwd: Path | None = None, deadline_s: float = 100.0) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a `kvantile` that ends by itself."""
    async with kvantile(*arguments, cwd=cwd) as running:
        assert running.process.stdout is not None
        async with asyncio.timeout(deadline_s):
            out = (await running.process.stdout.read()).decode()
            code = await running.process.wait()
    return code, out, running.text
