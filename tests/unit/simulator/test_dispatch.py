"""The routing rule, compiled, against itself as the gateway calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from kvantile_optimizer import routing
from kvantile_optimizer.simulator.state import REPLICA
from kvantile_router.routing import name_hash, pick_replica

compiled: Any = numba.njit(lambda *given: routing.pick(*given))
scored: Any = numba.njit(
    lambda key, name, weight: (routing.score(key, name), routing.weighted_score(key, name, weight))
)


@dataclass(frozen=True, slots=True)
class Books:
    """A replica as the router sees it."""

    name_hash: int
    tokens: int
    requests: int


def records(replicas: list[Books]) -> Any:
    machines: Any = np.zeros(len(replicas), REPLICA)
    for field in Books.__slots__:
        machines[field] = [getattr(item, field) for item in replicas]
    return machines


def test_compiled_and_called_with_objects_it_takes_the_same_replica() -> None:
    rng = np.random.default_rng(0)
    for _ in range(2000):
        # Few values, so that equals are common.
        replicas = [
            Books(int(rng.integers(2**32)), int(rng.integers(4)) * 100, int(rng.integers(3)))
            for _ in range(rng.integers(1, 9))
        ]
        key = int(rng.integers(2**32)) if rng.random() < 0.5 else None
        chance, kv_tokens = float(rng.random()), int(rng.choice([250, 10_000]))
        chosen = pick_replica(key, replicas, 60, kv_tokens, 2, lambda drawn=chance: drawn)  # type: ignore[misc]
        known = routing.NO_KEY if key is None else key
        place = compiled(records(replicas), 0, len(replicas), known, 60, kv_tokens, 2, chance)
        assert (None if place == routing.NONE else replicas[place]) is chosen


def test_scores_are_the_same_compiled_and_spread_over_all_words() -> None:
    names = [name_hash(f"http://replica-{i}") for i in range(4)]
    rng = np.random.default_rng(1)
    for key in map(int, rng.integers(2**32, size=1000)):
        for name in names:
            expected = (routing.score(key, name), routing.weighted_score(key, name, 0.3))
            assert scored(key, name, 0.3) == expected
            assert 0 <= expected[0] < 2**32
    wins = np.bincount([max(range(4), key=lambda n, k=k: routing.score(k, names[n])) for k in range(8000)])  # type: ignore[misc]
    assert wins.min() > 2000 - 5 * np.sqrt(2000)
