"""Sends each request, as it arrives, to the replica of its group that has the fewest tokens in flight.

That is the gateway's rule for requests without a shared prefix, and without its bounds: load counts prompts and
reservations, then requests, and ties go by chance. A replica is advanced only to the moments at which something happens
there, and its load falls when an answer has ended, as the gateway would see it.
"""

from __future__ import annotations

import math

from kvantile_optimizer import routing
from kvantile_optimizer.routing import NO_KEY
from kvantile_optimizer.simulator import kernel, prefix_cache
from kvantile_optimizer.simulator.compiled import entry
from kvantile_optimizer.simulator.state import Caches, Floats, Ints, ReplicaState, RequestState, Table

BOUNDLESS = 10**15
"""Tokens and requests: without a gateway's queue a full replica takes what comes."""


@entry
def replay(
    requests: Table[RequestState],
    replicas: Table[ReplicaState],
    first_replicas: Ints,
    running: Ints,
    rooms: Ints,
    history: Ints,
    caches: Caches | None,
    kv_seconds: Floats,
    shortcut: bool,
) -> None:
    """Runs `requests`, in order of arrival, to their ends; what came of them is in their records.

    `first_replicas` (G + 1,) are where each group's replicas begin, `running` (R, most) and `kv_seconds` (R, KV_BINS)
    have a row for each replica, `rooms` (block_size,) and `history` (H,) serve all; `caches` are those of prefixes.
    """
    # One call of `advance` for arrivals and the end alike: compiled twice, it would take as long again.
    for index in range(len(requests) + 1):
        moment, begin, end = math.inf, 0, len(replicas)
        if index < len(requests):
            group = requests[index].group
            moment, begin, end = requests[index].arrival, first_replicas[group], first_replicas[group + 1]
        for r in range(begin, end):
            if replicas[r].wake <= moment:
                kernel.advance(
                    replicas[r],
                    requests,
                    running[r],
                    rooms,
                    history,
                    prefix_cache.of_replica(caches, r),
                    kv_seconds[r],
                    moment,
                    shortcut,
                )
        if index < len(requests):
            chance = requests[index].chance
            requests[index].replica = routing.pick(replicas, begin, end, NO_KEY, 0, BOUNDLESS, BOUNDLESS, chance)
            kernel.submit(replicas[requests[index].replica], requests, index)
