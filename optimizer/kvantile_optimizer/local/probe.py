"""Asks the replicas what they counted: preemptions from their metrics, memory over time from the emulator.

A replica that cannot be asked (it died a moment ago) counts as having said nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from kvantile_optimizer.local.records import Clock
from kvantile_optimizer.plots import FloatArray, KvSeries

PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
DEADLINE_S = 10.0
POINTS = 600


@dataclass(frozen=True, slots=True)
class Memory:
    """One replica's KV cache over time (N,): engine seconds, tokens in use, tokens in use or reserved."""

    time_s: FloatArray
    used_tokens: FloatArray
    committed_tokens: FloatArray


async def preemptions(http: httpx.AsyncClient, urls: Sequence[str]) -> int:
    """The sum over the replicas."""
    answers = await asyncio.gather(*(_text(http, "GET", f"{url}/metrics") for url in urls))
    return int(sum(float(count) for text in answers for count in PREEMPTIONS.findall(text)))


async def reset(http: httpx.AsyncClient, urls: Sequence[str]) -> None:
    """Empties the idle replicas' caches and counters; their history begins anew."""
    await asyncio.gather(*(_text(http, "POST", f"{url}/emulator/reset") for url in urls))


async def memory(http: httpx.AsyncClient, urls: Sequence[str], clock: Clock) -> list[Memory]:
    """Each replica's memory since its reset, by `clock`."""
    answers = await asyncio.gather(*(_json(http, f"{url}/emulator/trace") for url in urls))
    return [memory_of(answer, clock()) for answer in answers if answer]


def together(replicas: Sequence[Memory], capacity_tokens: float, end_s: float) -> KvSeries:
    """All replicas' memory on one grid from 0 to `end_s`, added up; a replica keeps its last value between samples."""
    grid_s = np.linspace(0.0, end_s, POINTS)
    used, committed = np.zeros(POINTS), np.zeros(POINTS)
    for replica in replicas:
        place = np.searchsorted(replica.time_s, grid_s, side="right") - 1
        seen = place >= 0
        used[seen] += replica.used_tokens[place[seen]]
        committed[seen] += replica.committed_tokens[place[seen]]
    return KvSeries(grid_s, used, committed, capacity_tokens)


def memory_of(answer: Mapping[str, Any], now_s: float) -> Memory:
    """An emulator's trace on the clock that shows `now_s` when the emulator's own shows `engineSecondsNow`."""
    columns = list(answer["columns"])
    samples = np.asarray(answer["samples"], dtype=np.float64).reshape(-1, len(columns))
    at, used, committed = (columns.index(name) for name in ("engineSeconds", "kvUsedTokens", "kvCommittedTokens"))
    return Memory(samples[:, at] + (now_s - answer["engineSecondsNow"]), samples[:, used], samples[:, committed])


async def _text(http: httpx.AsyncClient, method: str, url: str) -> str:
    try:
        answer = await http.request(method, url, timeout=DEADLINE_S)
    except httpx.HTTPError:
        return ""
    return answer.text if answer.is_success else ""


async def _json(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    try:
        found = (await http.get(url, timeout=DEADLINE_S)).raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
