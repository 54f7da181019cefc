"""Where a request goes: first a group, by the plan's fractions, then a replica of it, by prefix and load.

Both choices are rendezvous hashing (each candidate is scored with the key, the highest score wins), so a candidate
that comes or goes moves its own share of the keys and no others. Groups are weighted with the planned fractions: a
score is -w / ln(u) for a uniform u made of key and name, which wins with probability w / sum(w). Hashing alone sends
one hot prefix to one group, so `Shares` keeps the books: a group that is too far ahead of its fraction is passed over
and one too far behind goes first. Among replicas the first in the key's order that has room and is not above its fair
share takes the request (consistent hashing with bounded loads: Mirrokni, Thorup, Zadimoghaddam 2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import xxhash

LOAD_BOUND = 1.25
"""Times the mean load: lower moves prefixes off their replica for ordinary noise, higher lets a hot one queue while
others idle; 1.25 is where the cited paper's trade-off flattens."""
CREDIT_BOUND = 16.0
"""Requests that a group may be ahead of or behind its fraction: 0.16 points after 10,000 requests. A random walk meets
bounds this wide about once in a hundred requests, so hardly any prefix is torn from its group for it."""

_TWO_64 = float(2**64)


def score(key: bytes, name_hash: int) -> int:
    """A 64-bit score of a candidate for a key, the same in every process."""
    return xxhash.xxh64_intdigest(key, name_hash)


def name_hash(name: str) -> int:
    """What stands for a candidate's name in `score`."""
    return xxhash.xxh64_intdigest(name.encode())


def weighted_order(key: bytes, weights: Mapping[str, float]) -> list[str]:
    """Names with a weight above 0, the key's first choice first."""

    def weighted_score(name: str) -> float:
        uniform = (score(key, name_hash(name)) + 0.5) / _TWO_64
        return math.inf if uniform >= 1.0 else -weights[name] / math.log(uniform)

    return sorted((name for name in weights if weights[name] > 0), key=weighted_score, reverse=True)


@dataclass(slots=True)
class Shares:
    """How far each group is behind its fraction of one class, in requests; the fractions are made to sum to 1."""

    fractions: dict[str, float]
    credits: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = sum(self.fractions.values())
        self.fractions = {name: fraction / total for name, fraction in self.fractions.items() if fraction > 0}
        self.credits = dict.fromkeys(self.fractions, 0.0)
        self.counts = dict.fromkeys(self.fractions, 0)

    def order(self, key: bytes, available: Sequence[str]) -> list[str]:
        """The available groups: those owed too much, then by the key, then those too far ahead."""
        ranked = weighted_order(key, {name: self.fractions[name] for name in available})
        return sorted(ranked, key=self._precedence)

    def _precedence(self, name: str) -> int:
        credit = self.credits[name] + self.fractions[name]
        if credit > CREDIT_BOUND:
            return 0
        return 2 if credit - 1 < -CREDIT_BOUND else 1

    def record(self, chosen: str) -> None:
        """Books a request. What a group misses while it is away is forgotten beyond the bound: no flood on return."""
        self.counts[chosen] += 1
        for name, fraction in self.fractions.items():
            credit = self.credits[name] + fraction - (name == chosen)
            self.credits[name] = max(-CREDIT_BOUND, min(CREDIT_BOUND, credit))

    def realised(self) -> dict[str, float]:
        """The fraction that each group got so far; 0 before the first request."""
        total = sum(self.counts.values())
        return {name: count / total if total else 0.0 for name, count in self.counts.items()}


class Loaded(Protocol):
    """A replica as seen here: the hash of its URL and what it has in flight."""

    @property
    def url_hash(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def requests(self) -> int: ...


Replica = TypeVar("Replica", bound=Loaded)


def pick_replica(
    key: bytes | None,
    replicas: Sequence[Replica],
    tokens: int,
    kv_tokens: int,
    max_requests: int,
    random: Callable[[], float],
) -> Replica | None:
    """The replica for a request of `tokens`, None when none has room.

    `kv_tokens` and `max_requests` are one replica's capacity. Without a key there is nothing to stay close to: the
    least loaded is taken, ties by chance. The same holds when every replica with room is above its fair share.
    """
    with_room = [item for item in replicas if has_room(item, tokens, kv_tokens, max_requests)]
    if not with_room:
        return None
    if key is not None:
        bound = LOAD_BOUND * sum(item.tokens for item in replicas) / len(replicas)
        below = [item for item in with_room if item.tokens <= bound]
        if below:
            return max(below, key=lambda item: score(key, item.url_hash))
    return min(with_room, key=lambda item: (item.tokens, item.requests, random()))


def has_room(replica: Loaded, tokens: int, kv_tokens: int, max_requests: int) -> bool:
    """Whether `tokens` more fit. An empty replica takes whatever could ever run on it."""
    return replica.requests == 0 or (replica.requests < max_requests and replica.tokens + tokens <= kv_tokens)
