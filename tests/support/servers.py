"""Starts servers as processes of their own and waits until they say where they listen.

Both `kvantile-router` and `kvantile-emulator` print `listening on URL` on stderr. Whatever else they say is kept for
the assertion that fails; whatever happens they are ended.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0


@dataclass(eq=False)
class Served:
    """A running server. `lines` is what it wrote to stderr so far."""

    url: str
    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    async def exit_code(self) -> int:
        """Waits for the end."""
        async with asyncio.timeout(STOP_TIMEOUT_S):
            return await self.process.wait()


@asynccontextmanager
async def served(module: str, *arguments: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Served]:
    """`python -m MODULE ARGUMENTS`, from the moment it listens."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stderr=asyncio.subprocess.PIPE, env=env
    )
    assert process.stderr is not None
    server = Served("", process)
    reading = None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            server.url = await _listening(process.stderr, server.lines)
        reading = asyncio.create_task(_collect(process.stderr, server.lines))
        yield server
    finally:
        await _end(process)
        if reading is not None:
            await reading


async def _listening(stderr: asyncio.StreamReader, lines: list[str]) -> str:
    async for line in stderr:
        lines.append(line.decode())
        if found := re.search(r"listening on (http://\S+)", lines[-1]):
            return found[1]
    raise AssertionError("the server ended before it listened:\n" + "".join(lines))


async def _collect(stderr: asyncio.StreamReader, lines: list[str]) -> None:
    while line := await stderr.readline():
        lines.append(line.decode())


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
