"""Sends requests at their moments and writes down when the answers came.

An open loop: nobody waits for an answer before sending the next request, as real users do not. Arrivals keep to the
clock on the wall, `speed` times compressed, and all times are noted in engine seconds. Every answer is streamed over
HTTP by the official `openai` client, without its retries, so that whatever the gateway does shows. Prompts are text of
about the recorded length, different from the first word on, so that neither the gateway's estimate nor a prefix cache
is flattered; how long each prompt and answer is exactly travels as the emulator's own arguments.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle, islice

import openai
from openai import AsyncOpenAI

from kvantile_optimizer.errors import WorkError
from kvantile_optimizer.local.records import Clock, Record, Request

Progress = Callable[[int], None]

CHARACTERS_PER_TOKEN = 4
LONGEST_WAIT_S = 300.0
"""On the wall, for one request: nothing the demo asks takes a tenth of it, but a hang must end."""
WORDS = ("rain", "over", "hill", "town", "lamp", "door", "fish", "road", "wind", "ship", "corn", "bell", "moon", "wood")
TENANTS = 64
"""Users the requests come from, so that requests without a shared prefix do not look as if they had one."""


WARM_UP = Request(0, "", 0.0, prompt_tokens=8, output_tokens=4)


@dataclass(frozen=True, slots=True)
class Target:
    """Where the requests go, and how many engine seconds are sent in a second on the wall."""

    gateway_url: str
    model: str
    speed: float


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[Player]:
    """A player that has sent one request already: the client loads most of itself on first use.

    Raises WorkError if that request fails.
    """
    # A proxy of the environment must not stand between this machine and itself.
    async with openai.DefaultAsyncHttpxClient(trust_env=False, timeout=LONGEST_WAIT_S) as http:
        client = AsyncOpenAI(
            api_key="none", base_url=f"{target.gateway_url}/v1", max_retries=0, http_client=http, timeout=LONGEST_WAIT_S
        )
        record = await Player(client, target).answer(WARM_UP, Clock(target.speed))
        if record.error:
            raise WorkError(f"the gateway at {target.gateway_url} failed a first small request: {record.error}")
        # A collection that walks all that planning has loaded stops the loop for a tenth of a second, which at ten
        # times the speed is a whole one.
        gc.collect()
        gc.freeze()
        try:
            yield Player(client, target)
        finally:
            gc.unfreeze()


class Player:
    """Replays requests. Made by `connected`."""

    def __init__(self, client: AsyncOpenAI, target: Target) -> None:
        self._client, self._target = client, target

    async def play(self, requests: Sequence[Request], clock: Clock, done: Progress) -> list[Record]:
        """Sends `requests` (in order of arrival) by `clock` and waits for every answer.

        `done` is told how many have ended. A request that fails is a record with an error, never an exception.
        """
        records: list[Record] = []

        async def one(request: Request) -> None:
            records.append(await self.answer(request, clock))
            done(len(records))

        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                await asyncio.sleep((request.arrival_s - clock()) / clock.speed)
                tasks.create_task(one(request), name=f"request {request.index}")
        return sorted(records, key=lambda record: record.request.index)

    async def answer(self, request: Request, clock: Clock) -> Record:
        """Sends one request now and follows its answer to the end."""
        sent_s = clock()
        first_s = last_s = None
        tokens, error = 0, ""
        try:
            stream = await self._client.chat.completions.create(
                model=self._target.model,
                messages=[{"role": "user", "content": prompt_text(request)}],
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"vllm_xargs": replay_arguments(request)},
                extra_headers=headers(request),
            )
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    last_s = clock()
                    first_s = last_s if first_s is None else first_s
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
        except openai.APIStatusError as refusal:
            error = str(refusal.status_code)
        except openai.APIError as failure:
            error = type(failure).__name__
        if not error and tokens == 0:
            error = "cut"
        return Record(request, sent_s, first_s, last_s, tokens, error)


def headers(request: Request) -> dict[str, str]:
    """Class (none, and the gateway decides) and tenant of a request."""
    tenant = {"x-kvantile-tenant": f"user-{request.index % TENANTS}"}
    return tenant | ({"x-kvantile-class": request.class_name} if request.class_name else {})


def replay_arguments(request: Request) -> dict[str, int]:
    """What the emulator is told of a recorded request."""
    return {"emulator_output_tokens": request.output_tokens, "emulator_prompt_tokens": request.prompt_tokens}


def prompt_text(request: Request) -> str:
    """Words of about the prompt's length, no two requests' alike from the beginning."""
    start = f"{request.index:07d}"
    words = islice(cycle(WORDS), request.index % len(WORDS), request.index % len(WORDS) + request.prompt_tokens)
    return f"{start} {' '.join(words)}"[: max(len(start), CHARACTERS_PER_TOKEN * request.prompt_tokens)]
