"""The running gateway: puts the parts together, serves until a signal comes, and leaves in order.

On SIGTERM or SIGINT the listening socket closes within a tenth of a second, what has been accepted is served to its
end, and the process exits with 0; a second signal cuts short. uvicorn's own signal handling is replaced, because it
raises the signal again when it is done, and the exit status would be the signal's.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import socket
import sys
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
import uvloop
from fastapi import FastAPI

from kvantile_optimizer.errors import InputError, WorkError
from kvantile_optimizer.plan import Plan
from kvantile_router.app import make_app
from kvantile_router.clock import Clock
from kvantile_router.files import FollowedFile, parse_keys, parse_plan, parse_replicas, parsed, read
from kvantile_router.fleet import Address, Fleet
from kvantile_router.gateway import Gateway
from kvantile_router.health import HealthChecks
from kvantile_router.intake import ApiKeys
from kvantile_router.lobby import Lobby
from kvantile_router.metrics import Metrics
from kvantile_router.observer import Observer
from kvantile_router.placement import Placement
from kvantile_router.settings import Settings
from kvantile_router.table import Table
from kvantile_router.upstream import Upstream

log = logging.getLogger(__name__)

BACKLOG = 2048
IDLE_CONNECTION_S = 75
"""Longer than the common clients keep theirs (httpx 5 s, nginx 60 s): who closes first must not be the server."""

SWEEP_PERIOD_S = 10.0


class Server(uvicorn.Server):
    """uvicorn that leaves signals to its caller and says where it listens."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures nothing."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts, then tells so on stderr."""
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            sys.stderr.write(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}\n")
            sys.stderr.flush()


class Assembly:
    """All parts of one gateway. Making it reads the files and raises InputError where one is no good."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._plan_file = FollowedFile(settings.plan, parse_plan)
        table = Table(self._plan_file.load())
        _refuse_unknown_groups(settings.replicas, table)
        self._replicas_file = FollowedFile(settings.replicas_file, parse_replicas) if settings.replicas_file else None
        self._listed = self._replicas_file.load() if self._replicas_file else []
        keys = ApiKeys(_keys(settings.api_keys) if settings.api_keys else ())
        clock = Clock(settings.speed)
        self._metrics = Metrics()
        self._upstream = Upstream()
        self._fleet = Fleet()
        self._health = HealthChecks(self._fleet, self._upstream)
        self._placement = Placement(table, self._fleet, random.random)
        self._lobby = Lobby(self._placement, clock, settings.queue_length, settings.queue_wait_s)
        self._fleet.changed = self._lobby.serve
        gateway = Gateway(
            placement=self._placement,
            lobby=self._lobby,
            fleet=self._fleet,
            upstream=self._upstream,
            observer=Observer(clock),
            metrics=self._metrics,
            clock=clock,
            max_body_bytes=settings.max_body_bytes,
            deadline_s=settings.deadline_s,
            replica_header=settings.replica_header,
            keys=keys,
        )
        self._app = make_app(gateway, keys)
        self._unknown: set[str] = set()

    async def run(self, listener: socket.socket) -> None:
        """Serves until a signal comes and everything accepted has ended."""
        server = Server(_uvicorn_config(self._app))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.handle_exit, number, None)
        self._update_fleet()
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(work) for work in self._beside()]
            await server.serve(sockets=[listener])
            for task in beside:
                task.cancel()
        await self._health.aclose()
        await self._upstream.aclose()

    def _beside(self) -> list[Coroutine[None, None, None]]:
        """What runs beside the server until it ends."""
        files = [self._plan_file.follow(self._apply_plan)]
        if self._replicas_file is not None:
            files.append(self._replicas_file.follow(self._apply_replicas))
        return [*files, self._sweep()]

    def _apply_plan(self, plan: Plan) -> None:
        self._placement.table = Table(plan)
        self._metrics.reloads.inc()
        log.info("plan applied", extra={"plan": plan.plan.name, "generation": plan.plan.generation})
        self._tell_unknown_groups()
        self._lobby.serve()

    def _apply_replicas(self, listed: list[Address]) -> None:
        self._listed = listed
        self._update_fleet()

    def _update_fleet(self) -> None:
        self._fleet.update((*self._settings.replicas, *self._listed))
        self._health.follow_fleet()
        self._tell_unknown_groups()

    def _tell_unknown_groups(self) -> None:
        """Once for each time that a group is missing: a new plan may still bring it."""
        unknown = self._fleet.groups() - self._placement.table.groups.keys()
        for group in sorted(unknown - self._unknown):
            log.warning("replicas of a group that the plan lacks are ignored", extra={"group": group})
        self._unknown = unknown

    async def _sweep(self) -> None:
        """Closes connections to replicas that went, once their last request has ended."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            await self._upstream.keep_only(self._fleet.urls())


def serve(settings: Settings) -> None:
    """Runs a gateway until a signal ends it. Raises InputError before it serves, WorkError for a port in use."""
    assembly = Assembly(settings)
    listener = _listen(settings.host, settings.port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(assembly.run(listener))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WorkError(f"cannot listen on {host} port {port}: {reason}; choose another with --port") from error


def _uvicorn_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_CONNECTION_S,
    )


def _keys(path: Path) -> list[str]:
    return parsed(path, read(path), parse_keys)


def _refuse_unknown_groups(replicas: Iterable[Address], table: Table) -> None:
    for address in replicas:
        if address.group not in table.groups:
            known = ", ".join(table.groups) or "none"
            raise InputError(f"--replica {address.group}={address.url}: the plan has no such group; it has {known}")
