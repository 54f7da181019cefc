"""Admission rules of other engines, beside the shared one, so that plans can be compared with them.

A gate is asked after the prompt was found to fit, and an empty engine is never asked. `NEW_TOKEN_RATIO` is SGLang's:
running requests are expected to take a share of the tokens they may still generate, which falls with every step and
rises when the pool runs dry. `PAST_FUTURE` is LightLLM's (Gong et al., ASPLOS 2025): each running request's length is
foretold from past ones, given how long it is already, and the highest use of memory to come must fit.
"""

from __future__ import annotations

import numpy as np

from kvantile_optimizer.simulator.compiled import compiled
from kvantile_optimizer.simulator.state import Ints, ReplicaState, RequestState, Table

RESERVATION, NEW_TOKEN_RATIO, PAST_FUTURE = 0, 1, 2
FIRST_RATIO, LEAST_RATIO, FALL_STEPS = 0.7, 0.098, 600
"""SGLang's defaults."""
LONGEST_CLAIM = 4096
"""Tokens of one request beyond which SGLang does not look ahead."""
RETRACT_STEPS = 20
"""Steps that SGLang wants to run after it had to retract a request."""


@compiled
def passes(
    replica: ReplicaState, requests: Table[RequestState], running: Ints, history: Ints, candidate: RequestState
) -> bool:
    """Whether the replica's gate lets `candidate` in; `history` (H,) are past output lengths, ascending."""
    if replica.gate == RESERVATION or replica.running == 0:
        return True
    if replica.gate == NEW_TOKEN_RATIO:
        return within_ratio(replica, requests, running, candidate)
    return peak_tokens(replica, requests, running, history, candidate) <= replica.total_blocks * replica.block_size


@compiled
def claim(request: RequestState) -> int:
    """Tokens that a request may still generate, as far as SGLang looks."""
    return min(request.limit - request.generated, LONGEST_CLAIM)


@compiled
def within_ratio(replica: ReplicaState, requests: Table[RequestState], running: Ints, candidate: RequestState) -> bool:
    """Whether free memory less what runs is expected to take leaves all that `candidate` may want."""
    expected = 0.0
    for position in range(replica.running):
        request = requests[running[position]]
        missing = request.prompt + request.generated - request.computed
        # What was admitted in this step is counted whole.
        expected += missing + claim(request) * (replica.ratio if request.generated else 1.0)
    wanted = candidate.prompt + candidate.generated + claim(candidate)
    return wanted < replica.free * replica.block_size - expected


@compiled
def lower_ratio(replica: ReplicaState) -> None:
    """The fall of one step."""
    replica.ratio = max(LEAST_RATIO, replica.ratio - (FIRST_RATIO - LEAST_RATIO) / FALL_STEPS)


@compiled
def raise_ratio(replica: ReplicaState, requests: Table[RequestState], running: Ints) -> None:
    """After a preemption: the share that what still runs has used of what it may."""
    generated, allowed = 0, 0
    for position in range(replica.running):
        request = requests[running[position]]
        generated += request.generated + RETRACT_STEPS
        allowed += min(request.limit, LONGEST_CLAIM)
    replica.ratio = min(1.0, generated / max(1, allowed))


@compiled
def foretold(request: RequestState, history: Ints) -> int:
    """Output tokens at the request's own chance, among past lengths above what it has generated."""
    low, high = 0, len(history)
    while low < high:
        middle = (low + high) // 2
        if history[middle] <= request.generated:
            low = middle + 1
        else:
            high = middle
    place = low + int(request.chance * (len(history) - low))
    return history[place] if place < len(history) else request.generated + 1


@compiled
def peak_tokens(
    replica: ReplicaState, requests: Table[RequestState], running: Ints, history: Ints, candidate: RequestState
) -> int:
    """The most tokens in use from now on if `candidate` joins and all lengths are as foretold."""
    count = replica.running + 1
    known, left = np.empty(count, np.int64), np.empty(count, np.int64)
    for position in range(count):
        request = candidate if position == replica.running else requests[running[position]]
        known[position] = request.prompt + request.generated
        left[position] = foretold(request, history) - request.generated
    peak = 0
    # Use is highest when somebody ends. Pairs, not a sort: compiling numpy's takes a third of all compiling.
    for mine in range(count):
        together = 0
        for other in range(count):
            if left[other] >= left[mine]:
                together += known[other] + left[mine]
        peak = max(peak, together)
    return peak
