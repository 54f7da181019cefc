"""The fleet of a plan on this machine: one process per replica and the gateway before them.

A fleet is brought to a plan by `apply`, at the start and at every later plan alike. New replicas come up first, then
the gateway is told their addresses and the plan, and only when it routes by that plan do the replicas leave that the
plan no longer has: taken from the gateway's list, then drained. The gateway learns of both through files that are
replaced whole; a replica that died leaves the list until it listens again.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import httpx

from kvantile_optimizer.errors import KvantileError, WorkError
from kvantile_optimizer.local import atomic, flags
from kvantile_optimizer.local.flags import FleetSettings, Replica
from kvantile_optimizer.local.supervise import Command, Server
from kvantile_optimizer.plan import Plan

READY_DEADLINE_S = 30.0
POLL_S = 0.1
REQUEST_DEADLINE_S = 5.0

Say = Callable[[str], None]


@asynccontextmanager
async def running(plan: Plan, settings: FleetSettings, say: Say) -> AsyncIterator[Fleet]:
    """A fleet that serves `plan`; drained and gone afterwards. `say` takes a line of news at a time.

    Raises WorkError if a process cannot be started, during the body too.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="kvantile-") as folder:
            async with asyncio.TaskGroup() as tasks, httpx.AsyncClient(trust_env=False) as http:
                fleet = Fleet(Path(folder), settings, tasks, http, say)
                try:
                    await fleet.apply(plan)
                    yield fleet
                finally:
                    await fleet.stop()
    except BaseExceptionGroup as failures:
        raise _first(failures) from None


class Fleet:
    """The processes, and the files by which the gateway knows of them. Made by `running`."""

    def __init__(
        self, folder: Path, settings: FleetSettings, tasks: asyncio.TaskGroup, http: httpx.AsyncClient, say: Say
    ) -> None:
        self.settings = settings
        self.restarts = 0
        self._folder, self._tasks, self._http, self._say = folder, tasks, http, say
        self._plan_file, self._replicas_file = folder / "plan.json", folder / "replicas.json"
        self._replicas: list[tuple[Replica, Server]] = []
        self._gateway: Server | None = None
        self._plan: Plan | None = None
        self._running: dict[Server, asyncio.Task[None]] = {}
        self._devices: dict[Server, tuple[str, ...]] = {}
        self._numbers = count(1)

    @property
    def gateway_url(self) -> str:
        """Where the gateway listens, without a path. Raises WorkError while it does not."""
        if self._gateway is None or self._gateway.url is None:
            raise WorkError("the gateway is not listening; see the messages above")
        return self._gateway.url

    @property
    def replica_urls(self) -> list[tuple[str, str]]:
        """(group, URL) of every replica that listens."""
        return [(replica.group, server.url) for replica, server in self._replicas if server.url is not None]

    @property
    def replica_pids(self) -> list[int]:
        """Process ids of the replicas that run."""
        return [server.pid for _, server in self._replicas if server.pid is not None]

    @property
    def gateway_pid(self) -> int | None:
        """The gateway's process id while it runs."""
        return self._gateway.pid if self._gateway else None

    async def apply(self, plan: Plan) -> None:
        """Brings the fleet to `plan`, without a moment in which nobody serves.

        Raises WorkError, with the running plan still served, when the new replicas do not start or find no GPUs.
        """
        missing, leaving = difference([replica for replica, _ in self._replicas], flags.replicas(plan, self.settings))
        self._replicas += await self._started(missing)
        self._publish_replicas()
        if self._plan is None:
            await self._start_gateway(plan)
        else:
            # Replicas of a group that its plan lacks are nothing to the gateway: it must know them, and find them
            # ready, before routes lead there.
            await self._route_by(widened(self._plan, plan))
        await self._route_by(plan)
        await self._retire(leaving)

    async def _started(self, missing: list[Replica]) -> list[tuple[Replica, Server]]:
        deadline_s = self.settings.start_deadline_s
        added = [(replica, self._start_replica(replica, devices)) for replica, devices in self._placed(missing)]
        try:
            async with asyncio.timeout(None if self._plan is None else deadline_s):
                await asyncio.gather(*(server.listening.wait() for _, server in added))
        except TimeoutError:
            await self._end([server for _, server in added])
            tails = "\n".join(server.tail() for _, server in added if server.url is None)
            raise WorkError(f"new replicas did not start within {deadline_s:.0f} s:\n{tails}") from None
        return added

    def _placed(self, missing: list[Replica]) -> list[tuple[Replica, tuple[str, ...]]]:
        """Which GPUs each new replica gets. Replicas that leave keep theirs until the new ones serve."""
        if self.settings.vllm is None:
            return [(replica, ()) for replica in missing]
        taken = {device for server in self._running for device in self._devices.get(server, ())}
        return list(zip(missing, shared_out(missing, self.settings.vllm.devices, taken), strict=True))

    def _start_replica(self, replica: Replica, devices: tuple[str, ...]) -> Server:
        server = self._start(flags.command(replica, next(self._numbers), self.settings, devices))
        self._devices[server] = devices
        return server

    async def _start_gateway(self, plan: Plan) -> None:
        atomic.write(self._plan_file, json.dumps(plan.to_json()))
        command = flags.gateway(self._plan_file, self._replicas_file, self.settings)
        self._gateway = self._start(command, port=self.settings.port)
        await self._gateway.listening.wait()

    async def stop(self) -> None:
        """Drains the gateway, then the replicas it was still streaming from."""
        if self._gateway is not None:
            await self._end([self._gateway])
        await self._end(list(self._running))

    def _start(self, command: Command, port: int = 0) -> Server:
        # What the first plan needs must start, or there is nothing; later there is something to keep serving.
        must_start = self._plan is None
        server = Server(command, self._folder, self._changed, port, self.settings.grace_s, must_start=must_start)
        self._running[server] = self._tasks.create_task(server.run(), name=server.name)
        return server

    async def _end(self, servers: list[Server]) -> None:
        for server in servers:
            server.stop()
        await asyncio.gather(*(self._running.pop(server) for server in servers if server in self._running))

    async def _retire(self, leaving: list[Replica]) -> None:
        servers: list[Server] = []
        for replica in leaving:
            entry = next(entry for entry in reversed(self._replicas) if entry[0] == replica)
            self._replicas.remove(entry)
            servers.append(entry[1])
        if servers:
            gone = {server.url for server in servers}
            self._publish_replicas()
            await self._wait_until(lambda seen: not gone & _urls(seen), "the gateway keeps replicas that left")
            await self._end(servers)

    def _changed(self, server: Server, news: str) -> None:
        if news:
            self._say(news)
        if server is self._gateway or not server.listening.is_set():
            return
        self.restarts += server.url is None
        if self._gateway is not None:
            self._publish_replicas()

    def _publish_replicas(self) -> None:
        listed = [{"group": group, "url": url} for group, url in self.replica_urls]
        atomic.write(self._replicas_file, json.dumps({"replicas": listed}))

    async def _route_by(self, plan: Plan) -> None:
        atomic.write(self._plan_file, json.dumps(plan.to_json()))
        self._plan = plan
        names, generation = {group.name for group in plan.groups}, plan.plan.generation

        def routes(seen: Mapping[str, Any]) -> bool:
            wanted = {url for group, url in self.replica_urls if group in names}
            same = _generation(seen) == generation and names == {group["name"] for group in seen["groups"]}
            return same and wanted <= _urls(seen, ready=True)

        await self._wait_until(routes, "the gateway does not route by the new plan")

    async def _wait_until(self, holds: Callable[[dict[str, Any]], bool], failure: str) -> None:
        try:
            async with asyncio.timeout(READY_DEADLINE_S):
                while not holds(await self._routing()):  # noqa: ASYNC110 - another process has no events for us
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise WorkError(f"{failure} after {READY_DEADLINE_S:.0f} s") from None

    async def _routing(self) -> dict[str, Any]:
        """What the gateway says it routes by; empty while it cannot be asked."""
        try:
            answer = await self._http.get(f"{self.gateway_url}/plan", timeout=REQUEST_DEADLINE_S)
            found = answer.raise_for_status().json()
        except (httpx.HTTPError, WorkError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def difference(have: list[Replica], want: list[Replica]) -> tuple[list[Replica], list[Replica]]:
    """(replicas to start, replicas to stop): a replica stays if one of the same group and flags is wanted."""
    leaving = list(have)
    missing: list[Replica] = []
    for replica in want:
        if replica in leaving:
            leaving.remove(replica)
        else:
            missing.append(replica)
    return missing, leaving


def shared_out(replicas: Sequence[Replica], devices: Sequence[str], taken: set[str]) -> list[tuple[str, ...]]:
    """Each replica's GPUs: the first that are free. Nothing for anyone on a machine without. Raises WorkError."""
    if not devices:
        return [() for _ in replicas]
    free = [device for device in devices if device not in taken]
    wanted = sum(replica.gpus for replica in replicas)
    if wanted > len(free):
        raise WorkError(
            f"{wanted} GPUs are needed, and {len(free)} of this machine's {len(devices)} are free; "
            "maxGPUs of the pools bounds what a plan takes"
        )
    remaining = iter(free)
    return [tuple(islice(remaining, replica.gpus)) for replica in replicas]


def widened(running: Plan, coming: Plan) -> Plan:
    """The running plan with the coming one's groups as well, to which no route leads yet."""
    groups = {group.name: group for group in (*running.groups, *coming.groups)}
    return running.model_copy(update={"groups": list(groups.values())})


def _generation(seen: Mapping[str, Any]) -> int | None:
    """Which plan the gateway routes by."""
    generation = seen.get("plan", {}).get("generation")
    return generation if isinstance(generation, int) else None


def _urls(seen: Mapping[str, Any], *, ready: bool = False) -> set[str]:
    """The replicas that the gateway knows, or those that it finds ready."""
    return {item["url"] for item in seen.get("replicas", []) if item["ready"] or not ready}


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure to tell: ours if there is one, else the first."""
    ours, others = failures.split(KvantileError)
    leaf: BaseException = ours or others or failures
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf
