"""Sends requests to a real engine at their moments, and notes when each answer began and ended.

The model is random, and its answers still are as long as they should be, without the engine knowing it beforehand:
`max_tokens` is the model's own limit, no end is allowed before `min_tokens`, and from there on nothing but the end is.
With the answer's length as `max_tokens` every reservation, which is cut to it, would know the future.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from tests.support.tiny_model import BYTES, END
from tests.support.vllm_server import MODEL

from kvantile_optimizer.errors import WorkError

FORCED = 100.0
"""Added to the logit of the end: above what a random model says of any token."""
LONGEST_WAIT_S = 300.0
"""For one answer: a hang must end."""
REFUSED = 429
"""A gateway's answer to what would come too late: a miss like another."""
CLASS_HEADER = "x-kvantile-class"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and what it is to meet. Lengths in tokens."""

    arrival_s: float
    class_name: str
    prompt: int
    answer: int
    ttft_s: float = float("inf")
    tpot_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of it; times are NaN where nothing came."""

    ask: Ask
    ttft_s: float
    last_s: float
    """Since the run began."""
    tpot_s: float
    tokens: int

    @property
    def met(self) -> bool:
        """Whether both targets were met, by a whole answer."""
        return self.tokens == self.ask.answer and self.ttft_s <= self.ask.ttft_s and self.tpot_s <= self.ask.tpot_s


Hints = Mapping[str, Mapping[str, Any]]
"""By class, what its requests bring along beside their body (`vllm_xargs`)."""


def play(url: str, asks: Sequence[Ask], longest: int, hints: Hints, seed: int) -> list[Answer]:
    """Sends each request at its moment and waits for all answers. Raises WorkError when one is refused.

    `longest` is the model's limit on prompt and answer together.
    """
    return asyncio.run(answers(url, asks, longest, hints, seed))


async def answers(url: str, asks: Sequence[Ask], longest: int, hints: Hints, seed: int) -> list[Answer]:
    """As `play`, for those who have a loop."""
    rng = random.Random(seed)
    bodies = [_body(ask, longest, hints, rng) for ask in asks]
    # The server closes connections that idle, at times just as the next request takes one.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=LONGEST_WAIT_S, limits=limits, trust_env=False) as http:
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            sent = []
            for ask, body in zip(asks, bodies, strict=True):
                await asyncio.sleep(began_s + ask.arrival_s - time.monotonic())
                sent.append(tasks.create_task(_ask(http, ask, body, began_s)))
    return [task.result() for task in sent]


def _body(ask: Ask, longest: int, hints: Hints, rng: random.Random) -> bytes:
    body: dict[str, Any] = {
        "model": MODEL,
        # Tokens of their own, so that no prompt begins like another.
        "prompt": [rng.randrange(BYTES) for _ in range(ask.prompt)],
        "max_tokens": longest - ask.prompt,
        "min_tokens": ask.answer - 1,
        "logit_bias": {str(END): FORCED},
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if hint := hints.get(ask.class_name):
        body["vllm_xargs"] = dict(hint)
    return json.dumps(body).encode()


async def _ask(http: httpx.AsyncClient, ask: Ask, body: bytes, began_s: float) -> Answer:
    headers = {"content-type": "application/json", CLASS_HEADER: ask.class_name}
    sent_s = time.monotonic()
    first_s: float | None = None
    last_s = float("nan")
    tokens = 0
    async with http.stream("POST", "/v1/completions", content=body, headers=headers) as answer:
        if answer.status_code == REFUSED:
            return Answer(ask, float("nan"), time.monotonic() - began_s, float("nan"), 0)
        if not answer.is_success:
            said = (await answer.aread())[:300].decode(errors="replace")
            raise WorkError(f"{answer.status_code} for a request of {ask.prompt} and {ask.answer} tokens: {said}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            # Only the last event has no choices; the others are not worth parsing, which would slow the engine's core.
            if '"choices":[]' in line:
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                continue
            last_s = time.monotonic()
            first_s = first_s or last_s
    first_s = first_s or float("nan")
    tpot_s = (last_s - first_s) / (tokens - 1) if tokens > 1 else 0.0
    return Answer(ask, first_s - sent_s, last_s - began_s, tpot_s, tokens)
