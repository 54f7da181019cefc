"""The routing rule of `kvantile_optimizer.routing` as the gateway calls it: by names, keys of bytes, and objects.

Keys and names are hashed to 32 bits, the same in every process, and `Shares` keeps the books of a class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvantile_optimizer import routing
from kvantile_optimizer.routing import NO_KEY, NONE, Loaded, hashed


def name_hash(name: str) -> int:
    """What stands for a candidate's name in the rule."""
    return hashed(name.encode())


def weighted_order(key: int, weights: Mapping[str, float]) -> list[str]:
    """Names with a weight above 0, the key's first choice first."""
    scores = {
        name: routing.weighted_score(key, name_hash(name), weight) for name, weight in weights.items() if weight > 0
    }
    return sorted(scores, key=scores.__getitem__, reverse=True)


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

    def order(self, key: int, available: Sequence[str]) -> list[str]:
        """The available groups: those owed too much, then by the key, then those too far ahead."""
        ranked = weighted_order(key, {name: self.fractions.get(name, 0.0) for name in available})
        return sorted(ranked, key=lambda name: routing.precedence(self.credits[name], self.fractions[name]))

    def record(self, chosen: str) -> None:
        """Books a request."""
        self.counts[chosen] += 1
        for name, fraction in self.fractions.items():
            self.credits[name] = routing.credit_after(self.credits[name], fraction, name == chosen)

    def realised(self) -> dict[str, float]:
        """The fraction that each group got so far; 0 before the first request."""
        total = sum(self.counts.values())
        return {name: count / total if total else 0.0 for name, count in self.counts.items()}


Replica = TypeVar("Replica", bound=Loaded)


def pick_replica(
    key: int | None,
    replicas: Sequence[Replica],
    tokens: int,
    kv_tokens: int,
    max_requests: int,
    random: Callable[[], float],
) -> Replica | None:
    """The replica for a request of `tokens`, None when none has room; see `kvantile_optimizer.routing.pick`."""
    known = NO_KEY if key is None else key
    place = routing.pick(replicas, 0, len(replicas), known, tokens, kv_tokens, max_requests, random())
    return None if place == NONE else replicas[place]
