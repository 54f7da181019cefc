"""Puts the probes of `probing` to a running OpenAI-compatible server and notes when each token came.

Prompts are token ids drawn at random, so that no prefix cache knows them; answers are as long as asked for, whatever
the model would say. Everything is bounded: one time limit for all, one number of requests, and no retries. What goes
wrong is told with what to do about it.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from kvantile_optimizer.errors import InputError, WorkError
from kvantile_optimizer.probing import Limits, Observation, Probe, Stream, observed, probes

TOKEN_IDS = (20, 250)
"""Below the vocabulary of every model, above the special ones of most."""
LONGEST_QUESTION_S = 10.0
"""For what a server answers from memory."""
MOST_ROUNDS = 3
"""Beyond these repetition tells nothing new."""
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_RUNNING = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Server:
    """What a server says of itself."""

    model: str
    max_model_len: int | None
    kv_tokens: int | None
    block_size: int | None
    busy: bool


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may be asked: seconds and requests in all."""

    seconds: float
    requests: int


Progress = Callable[[int], None]
"""Told how many requests have been answered."""


async def look(url: str, model: str | None) -> Server:
    """Asks what is served at `url` and how large its KV cache is.

    Raises WorkError where nothing answers as expected, InputError for a `model` that is not served.
    """
    async with _client() as http:
        cards = await _models(http, url)
        names = [str(card.get("id")) for card in cards]
        if model is not None and model not in names:
            raise InputError(f"--served-model: found {model}, allowed {', '.join(names)}")
        card = cards[names.index(model) if model is not None else 0]
        metrics = await _metrics(http, url)
    labels = dict(_LABEL.findall(found[1])) if (found := _CACHE_CONFIG.search(metrics)) else {}
    blocks, size = _count(labels.get("num_gpu_blocks")), _count(labels.get("block_size"))
    return Server(
        model=str(card["id"]),
        max_model_len=_count(card.get("max_model_len")),
        kv_tokens=blocks * size if blocks and size else None,
        block_size=size,
        busy=any(float(value) > 0 for value in _RUNNING.findall(metrics)),
    )


def rounds_within(round_: Sequence[Probe], requests: int) -> int:
    """How many rounds of probes so many requests are enough for. Raises WorkError where it is none."""
    per_round = sum(probe.count for probe in round_)
    if per_round > requests:
        raise WorkError(f"one round takes {per_round} requests; allow more than --requests {requests}")
    return min(MOST_ROUNDS, requests // per_round)


async def measure(
    url: str, model: str, limits: Limits, bounds: Bounds, seed: int, progress: Progress
) -> list[list[Observation]]:
    """Rounds of observations, as many as `bounds` allow and one at least.

    Raises WorkError when the bounds end before the first round does, and for answers that tell nothing.
    """
    round_ = probes(limits)
    rounds: list[list[Observation]] = []
    rng = np.random.default_rng(seed)
    done = 0
    try:
        async with _client() as http, asyncio.timeout(bounds.seconds):
            await _ask(http, url, model, _prompt(rng, 16), 2)  # what only the first request pays for
            for _ in range(rounds_within(round_, bounds.requests)):
                current: list[Observation] = []
                for probe in round_:
                    streams = await _all(http, url, model, probe, rng)
                    if (row := observed(probe, streams, limits)) is not None:
                        current.append(row)
                    done += probe.count
                    progress(done)
                rounds.append(current)
    except TimeoutError:
        if not rounds:
            raise WorkError(
                f"{done} of {sum(probe.count for probe in round_)} requests were answered in {bounds.seconds:g} s; "
                "allow more --time-limit"
            ) from None
    if not any(row.weights[1] for row in rounds[0]):
        raise WorkError("no two requests decoded side by side; is the server busy with others?")
    return rounds


def _client() -> httpx.AsyncClient:
    # Proxies of the environment would be measured with the engine.
    return httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(None, connect=LONGEST_QUESTION_S))


async def _models(http: httpx.AsyncClient, url: str) -> list[dict[str, Any]]:
    try:
        answer = await http.get(f"{url}/v1/models", timeout=LONGEST_QUESTION_S)
        answer.raise_for_status()
        cards = answer.json()["data"]
        if cards and all(isinstance(card, dict) and "id" in card for card in cards):
            return list(cards)
    except httpx.HTTPStatusError as error:
        raise WorkError(f"{url}/v1/models answered {error.response.status_code}; give the server's base URL") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise WorkError(f"{url} cannot be reached ({type(error).__name__}); is the server running?") from error
    except (ValueError, KeyError, TypeError):
        pass
    raise WorkError(f"{url}/v1/models lists no model; give the base URL of an OpenAI-compatible server")


async def _metrics(http: httpx.AsyncClient, url: str) -> str:
    """vLLM's metrics; nothing where a server has none."""
    try:
        answer = await http.get(f"{url}/metrics", timeout=LONGEST_QUESTION_S)
    except httpx.HTTPError:
        return ""
    return answer.text if answer.is_success else ""


async def _all(http: httpx.AsyncClient, url: str, model: str, probe: Probe, rng: np.random.Generator) -> list[Stream]:
    """The answers to a probe's requests, sent at once."""
    prompts = [_prompt(rng, probe.prompt) for _ in range(probe.count)]
    try:
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(_ask(http, url, model, prompt, probe.output), name=f"probe {number}")
                for number, prompt in enumerate(prompts)
            ]
    except ExceptionGroup as several:
        raise several.exceptions[0] from several  # the others failed for the same reason, or because of it
    return [task.result() for task in asked]


def _prompt(rng: np.random.Generator, tokens: int) -> list[int]:
    return [int(token) for token in rng.integers(*TOKEN_IDS, tokens)]


async def _ask(http: httpx.AsyncClient, url: str, model: str, prompt: list[int], output: int) -> Stream:
    """One streamed answer. Raises WorkError for one that fails or does not stream."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    at_s: list[float] = []
    told: list[int] = []
    total = 0
    sent_s = time.monotonic()
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if not answer.is_success:
                said = (await answer.aread())[:300].decode(errors="replace")
                raise WorkError(f"{url}/v1/completions answered {answer.status_code} for model {model}: {said}")
            kind = answer.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise WorkError(f"{url} answered with {kind or 'no content type'} where a stream was asked for")
            async for line in answer.aiter_lines():
                event = _event(line)
                if event is None:
                    continue
                total = max(total, _completion_tokens(event))
                if event.get("choices"):
                    at_s.append(time.monotonic())
                    told.append(_completion_tokens(event))
    except httpx.HTTPError as error:
        raise WorkError(f"{url} broke off an answer ({type(error).__name__}); look at the server's log") from error
    if not at_s:
        raise WorkError(f"{url} sent a stream without a token")
    return Stream(sent_s, np.array(at_s), _tokens(told, total or len(at_s)))


def _event(line: str) -> dict[str, Any] | None:
    """The JSON of a line of an event stream; None for lines that carry none."""
    if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
        return None
    try:
        event = json.loads(data)
    except ValueError as error:
        raise WorkError(f"a stream carried what is not JSON: {data[:80]}") from error
    if not isinstance(event, dict) or event.get("error"):
        raise WorkError(f"a stream ended with an error: {data[:300]}")
    return event


def _completion_tokens(event: dict[str, Any]) -> int:
    usage = event.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else 0


def _tokens(told: list[int], total: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Tokens up to each piece: as the server counted them, else evenly spread over the pieces after the first."""
    if all(told):
        return np.array(told, np.float64)
    return np.linspace(min(1.0, total), total, len(told)) if len(told) > 1 else np.array([float(total)])


def _count(value: object) -> int | None:
    try:
        number = int(str(value))
    except ValueError:
        return None
    return number if number > 0 else None
