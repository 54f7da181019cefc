"""The loop on this machine: a fleet that serves a plan, and a plan that follows what the fleet sees.

Every `replan.interval` the gateway's observations of the last `replan.window` are compared with what the running plan
was made for (`replan`); when lengths have drifted a new plan is made on a thread, and the fleet brought to it without
a moment in which nobody serves. A plan that cannot be made leaves the running one, with a message.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from kvantile_optimizer.errors import KvantileError, WorkError
from kvantile_optimizer.local import fleet, replan
from kvantile_optimizer.local.flags import FleetSettings
from kvantile_optimizer.observation import Observations
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.spec import Replan, ServingPlan, duration_seconds
from kvantile_optimizer.workload import Workload

Planner = Callable[[Sequence[Workload], Plan], Plan]
"""(workloads, running plan) to a new plan; raises KvantileError."""
OBSERVE_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Loop:
    """What runs: the spec, what its plan was made for, the plan, and how to make another."""

    spec: ServingPlan
    workloads: Sequence[Workload]
    plan: Plan
    planner: Planner


def check_port(host: str, port: int) -> None:
    """Raises WorkError, naming the port, if nobody could listen there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise WorkError(f"port {port} on {host} {reason}; choose another with --port") from error


async def serve(loop: Loop, settings: FleetSettings, say: fleet.Say, ready: Callable[[str], None]) -> None:
    """Serves until cancelled; `ready` is told the gateway's URL. Raises WorkError if the fleet cannot start."""
    async with fleet.running(loop.plan, settings, say) as running, httpx.AsyncClient(trust_env=False) as http:
        ready(running.gateway_url)
        follower = _Follower(loop, running, http, say)
        interval_s = duration_seconds(loop.spec.spec.replan.interval) / settings.speed
        while True:
            await asyncio.sleep(interval_s)
            await follower.look()


class _Follower:
    """Keeps the plan up to what the gateway sees."""

    def __init__(self, loop: Loop, running: fleet.Fleet, http: httpx.AsyncClient, say: fleet.Say) -> None:
        self._loop, self._fleet, self._http, self._say = loop, running, http, say
        self._rules: Replan = loop.spec.spec.replan
        self._plan, self._workloads = loop.plan, loop.workloads
        self._readings: deque[Observations] = deque([Observations()])

    async def look(self) -> None:
        """Compares, and plans anew where the lengths have drifted."""
        observed = await self._observed()
        if observed is None:
            return
        found = replan.seen(self._workloads, observed, observed_traffic=self._rules.observed_traffic)
        if found.drifted:
            self._say(f"the answers of {', '.join(found.drifted)} have changed in length; planning anew")
            await self._follow(found.workloads)

    async def _follow(self, workloads: Sequence[Workload]) -> None:
        try:
            candidate = await asyncio.to_thread(self._loop.planner, workloads, self._plan)
        except KvantileError as error:
            self._say(f"no new plan could be made, the running one stays: {error}")
            return
        if not replan.adopts(self._plan, candidate):
            self._say("the running plan is still the one to run")
            self._workloads = workloads
            return
        number = self._plan.plan.generation + 1
        named = candidate.model_copy(update={"plan": candidate.plan.model_copy(update={"generation": number})})
        try:
            await self._fleet.apply(named)
        except WorkError as error:
            self._say(f"the fleet could not be brought to the new plan, the running one stays: {error}")
            return
        self._plan, self._workloads = named, workloads
        self._say(f"serving plan {number}: {named.gpu_count} GPUs, {named.costs.gpu:.2f} $/h")

    async def _observed(self) -> Observations | None:
        """What was seen in the window, or since the last plan if that is shorter; None while nobody can say."""
        try:
            answer = await self._http.get(f"{self._fleet.gateway_url}/observations", timeout=OBSERVE_DEADLINE_S)
            now = Observations.model_validate_json(answer.raise_for_status().content)
        except (httpx.HTTPError, ValueError, WorkError) as error:
            self._say(f"the gateway did not say what it saw: {error}")
            return None
        if now.since_seconds < self._readings[-1].since_seconds:
            # The gateway was started again and counts from zero.
            self._readings = deque([Observations()])
        window_s = duration_seconds(self._rules.window)
        while len(self._readings) > 1 and now.since_seconds - self._readings[1].since_seconds >= window_s:
            self._readings.popleft()
        self._readings.append(now)
        return now.minus(self._readings[0])
