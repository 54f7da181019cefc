"""Asks every replica now and then whether it is healthy: GET /health, one task per replica.

A replica that refuses or answers anything but 200 is not ready at once; one that is silent only after several times,
since an engine in a long step answers late. All times are wall seconds.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from kvantile_router.errors import ReplicaFailedError
from kvantile_router.fleet import Fleet, Replica
from kvantile_router.upstream import Upstream

log = logging.getLogger(__name__)

READY_PERIOD_S = 2.0
"""Between checks of a ready replica; requests themselves notice a dead one sooner."""
UNREADY_PERIOD_S = 0.5
"""Between checks of one that starts or recovers."""
PATIENCE_S = 5.0
SILENT_CHECKS = 3


class HealthChecks:
    """The checking tasks, one per replica of the fleet."""

    def __init__(self, fleet: Fleet, upstream: Upstream) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._tasks: dict[Replica, asyncio.Task[None]] = {}

    def follow_fleet(self) -> None:
        """Starts checking replicas that came and stops checking those that went."""
        present = set(self._fleet)
        for replica in present - self._tasks.keys():
            self._tasks[replica] = asyncio.create_task(self._check(replica), name=f"health {replica.url}")
        for replica in self._tasks.keys() - present:
            self._tasks.pop(replica).cancel()

    async def aclose(self) -> None:
        """Ends all checks."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task

    async def _check(self, replica: Replica) -> None:
        silent = 0
        while True:
            healthy = await self._is_healthy(replica)
            silent = silent + 1 if healthy is None else 0
            if healthy is not None or silent >= SILENT_CHECKS:
                self._note(replica, healthy is True)
            await asyncio.sleep(READY_PERIOD_S if replica.ready else UNREADY_PERIOD_S)

    async def _is_healthy(self, replica: Replica) -> bool | None:
        """None when there was no answer in time."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._upstream.status(replica.url, "/health") == 200
        except TimeoutError:
            return None
        except ReplicaFailedError:
            return False

    def _note(self, replica: Replica, healthy: bool) -> None:
        if healthy != replica.ready:
            state = "ready" if healthy else "not ready"
            log.info("replica is %s", state, extra={"group": replica.group, "url": replica.url})
        self._fleet.set_ready(replica, healthy)
