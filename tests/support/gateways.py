"""A gateway in a process of its own in front of stand-ins, and a client that talks to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvantile_optimizer.plan import Plan
from tests.support.replica import MODEL, StandIn
from tests.support.servers import Served, served

PATIENCE_S = 15.0


async def eventually(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Asks again until `condition` holds: for what another process does in its own time."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await condition():  # noqa: ASYNC110 - no event crosses from another process
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"it never happened that {what}") from None


def chat(prompt: str = "hi", *, system: str | None = None, **given: Any) -> dict[str, Any]:
    """The body of a chat request."""
    leading = [{"role": "system", "content": system}] if system is not None else []
    return {"model": MODEL, "messages": [*leading, {"role": "user", "content": prompt}]} | given


@dataclass(eq=False)
class Gateway:
    """A gateway under test."""

    served: Served
    client: httpx.AsyncClient
    plan_path: Path

    async def post(self, body: object, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        """Sends a body (bytes as they are) and reads the whole answer; underscores in header names become dashes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, content=content, headers={"content-type": "application/json"} | named)

    async def state(self) -> dict[str, Any]:
        """What /plan says."""
        state: dict[str, Any] = (await self.client.get("/plan")).json()
        return state

    async def metric(self, line: str) -> float:
        """The value of the metric whose line begins so; 0 when there is none."""
        text = (await self.client.get("/metrics")).text
        return sum(float(found.rsplit(" ", 1)[1]) for found in text.splitlines() if found.startswith(line))

    async def ready_replicas(self) -> int:
        return sum(replica["ready"] for replica in (await self.state())["replicas"])

    async def until_idle(self) -> None:
        """Waits until every counter of requests in flight is back at 0."""

        async def idle() -> bool:
            state = await self.state()
            counted = await self.metric("kvantile_router_in_flight_requests")
            return counted == 0 and state["inFlightRequests"] == 0 and state["reservedTokens"] == 0

        await eventually(idle, "all counters of requests in flight were 0")


def write_plan(path: Path, plan: Plan) -> Path:
    path.write_text(json.dumps(plan.to_json()))
    return path


@asynccontextmanager
async def gateway(
    folder: Path, plan: Plan, replicas: Sequence[StandIn] | dict[str, Sequence[StandIn]], *flags: str, ready: int = -1
) -> AsyncIterator[Gateway]:
    """A gateway in front of `replicas` (of the first group, or by group), once `ready` of them are (all by default)."""
    by_group = replicas if isinstance(replicas, dict) else {plan.groups[0].name: replicas}
    addresses = [f"{group}={item.url}" for group, members in by_group.items() for item in members]
    arguments = [part for address in addresses for part in ("--replica", address)]
    path = write_plan(folder / "plan.json", plan)
    async with (
        served("kvantile_router", "--plan", str(path), "--port", "0", *arguments, *flags) as server,
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        found = Gateway(server, client, path)

        async def is_ready() -> bool:
            return await found.ready_replicas() >= (len(addresses) if ready < 0 else ready)

        await eventually(is_ready, "the replicas were ready")
        yield found
