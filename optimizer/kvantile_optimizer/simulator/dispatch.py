"""Sends each request, as it arrives, to the replica of its group that has the fewest tokens in flight.

That is the gateway's own choice for requests without a shared prefix: load counts prompts and reservations, then
requests, and ties go by chance. A replica is advanced only to the moments at which something happens there, and its
load falls when an answer has ended, as the gateway would see it.
"""

from __future__ import annotations

import math

from kvantile_optimizer.simulator import kernel, prefix_cache
from kvantile_optimizer.simulator.compiled import compiled, entry
from kvantile_optimizer.simulator.state import Caches, Floats, Ints, ReplicaState, RequestState, Table


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
            requests[index].replica = least_loaded(replicas, begin, end, requests[index].chance)
            kernel.submit(replicas[requests[index].replica], requests, index)


@compiled
def least_loaded(replicas: Table[ReplicaState], begin: int, end: int, chance: float) -> int:
    """The replica in [begin, end) with the fewest tokens, then requests; of equal ones that at `chance`."""
    best, equal = begin, 1
    for r in range(begin + 1, end):
        ours, theirs = replicas[r], replicas[best]
        if ours.load < theirs.load or (ours.load == theirs.load and ours.in_flight < theirs.in_flight):
            best, equal = r, 1
        elif ours.load == theirs.load and ours.in_flight == theirs.in_flight:
            equal += 1
    if equal == 1:
        return best
    skip = int(chance * equal)
    for r in range(best, end):
        if replicas[r].load == replicas[best].load and replicas[r].in_flight == replicas[best].in_flight:
            if skip == 0:
                return r
            skip -= 1
    return best
