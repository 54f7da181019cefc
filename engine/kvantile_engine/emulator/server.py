"""The process: a listening socket, the engine's task and uvicorn, from the first request to a clean end.

uvicorn as it stands re-raises SIGTERM when it is done, which makes exit code -15 of an orderly stop; so signals are
taken here. The socket is opened before anything else: a port in use is told at once, and port 0 can be named. Should
the engine's task ever fail, the server goes down with it rather than let requests hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

import uvicorn
import uvloop

from kvantile_engine.emulator.engine import Engine, OutOfMemoryError
from kvantile_engine.emulator.service import build_app
from kvantile_engine.emulator.settings import Settings
from kvantile_optimizer.errors import WorkError

KEEP_ALIVE_S = 75
"""Idle connections live longer than a gateway keeps them in its pool, which spares it the race at their end."""
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises WorkError when the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WorkError(f"cannot listen on {host}:{port}: {reason}; choose another --port") from error


class Server(uvicorn.Server):
    """uvicorn that says where it listens and leaves signals alone."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to serve."""
        await super().startup(sockets)
        for one in sockets or []:
            host, port = one.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"listening on http://{shown}:{port}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: `serve` has taken them."""
        yield


async def serve(settings: Settings, listener: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests end within the grace period."""
    engine = Engine(settings)
    config = uvicorn.Config(
        build_app(engine),
        lifespan="off",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.grace_period)),
    )
    server = Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
    async with asyncio.TaskGroup() as tasks:
        stepping = tasks.create_task(_step(engine), name="engine")
        await server.serve([listener])
        stepping.cancel()


async def _step(engine: Engine) -> None:
    """Runs the engine. One out of memory dies like a killed process: connections break as they are."""
    try:
        await engine.run()
    except OutOfMemoryError as death:
        print(f"error: {death}", file=sys.stderr, flush=True)
        os._exit(death.exit_code)


def run(settings: Settings) -> None:
    """Opens the socket and serves on it. Raises WorkError when the port is in use."""
    time.sleep(settings.failures.slow_start_s / settings.speed)
    with listen(settings.host, settings.port) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, listener))
