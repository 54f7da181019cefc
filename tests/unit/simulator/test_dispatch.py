"""The simulator's choice among replicas against the router's, for requests without a prefix key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvantile_optimizer.simulator import dispatch
from kvantile_optimizer.simulator.state import REPLICA
from kvantile_router.routing import pick_replica


@dataclass(frozen=True, slots=True)
class Books:
    """A replica as the router sees it."""

    url_hash: int
    tokens: int
    requests: int


def simulated(replicas: list[Books], chance: float) -> int:
    machines: Any = np.zeros(len(replicas), REPLICA).view(np.recarray)
    machines["load"], machines["in_flight"] = zip(*((item.tokens, item.requests) for item in replicas), strict=True)
    plain: Any = dispatch.least_loaded
    return int(plain.py_func(machines, 0, len(replicas), chance))


def test_the_simulator_takes_the_replica_that_the_router_takes_and_draws_among_the_same_equals() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        # Few values, so that equals are common.
        replicas = [Books(r, int(rng.integers(3)) * 100, int(rng.integers(1, 3))) for r in range(rng.integers(1, 6))]
        by_router = {pick_replica(None, replicas, 10, 10_000, 64, rng.random) for _ in range(60)}
        ours = {simulated(replicas, chance) for chance in np.linspace(0, 0.999, 20)}
        assert ours == {item.url_hash for item in by_router if item}
