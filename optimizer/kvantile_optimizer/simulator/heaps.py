"""The waiting queue in compiled form: the three heaps of `waiting.WaitingQueue`, with the same answers.

A request waits in one heap at a time, so pairing heaps whose links lie in the request records need no memory of their
own, however many replicas there are. Tickets break ties, as they do there.
"""

from __future__ import annotations

import math

from kvantile_optimizer import admission
from kvantile_optimizer.simulator.compiled import compiled
from kvantile_optimizer.simulator.state import DEADLINE, FCFS, NOBODY, ReplicaState, RequestState, Table


@compiled
def merged(requests: Table[RequestState], left: int, right: int) -> int:
    """The root of two heaps made one."""
    if left == NOBODY:
        return right
    if right == NOBODY:
        return left
    a, b = requests[left], requests[right]
    if b.key < a.key or (b.key == a.key and b.tie < a.tie):
        left, right = right, left
        a, b = b, a
    b.sibling = a.child
    a.child = right
    return left


@compiled
def inserted(requests: Table[RequestState], root: int, index: int, key: float, tie: int) -> int:
    """The root after adding a request."""
    request = requests[index]
    request.key, request.tie = key, tie
    request.child = request.sibling = NOBODY
    return merged(requests, root, index)


@compiled
def without_root(requests: Table[RequestState], root: int) -> int:
    """The root after removing the first: its children merged in pairs, then the pairs from the last."""
    child, pairs = requests[root].child, NOBODY
    while child != NOBODY:
        partner = requests[child].sibling
        following = NOBODY
        if partner != NOBODY:
            following = requests[partner].sibling
            requests[partner].sibling = NOBODY
        requests[child].sibling = NOBODY
        pair = merged(requests, child, partner)
        requests[pair].sibling = pairs
        pairs, child = pair, following
    found = NOBODY
    while pairs != NOBODY:
        following = requests[pairs].sibling
        requests[pairs].sibling = NOBODY
        found = merged(requests, found, pairs)
        pairs = following
    return found


@compiled
def push(replica: ReplicaState, requests: Table[RequestState], index: int) -> None:
    """A request that arrives."""
    request = requests[index]
    request.ticket = replica.ticket
    replica.ticket += 1
    if replica.order == FCFS or request.latest_start == math.inf:
        replica.late_root = inserted(requests, replica.late_root, index, request.arrival, request.ticket)
    else:
        replica.on_time_root = inserted(requests, replica.on_time_root, index, request.latest_start, request.ticket)
    replica.waiting += 1


@compiled
def push_preempted(replica: ReplicaState, requests: Table[RequestState], index: int) -> None:
    """A request that comes back."""
    arrival = requests[index].arrival
    replica.preempted_root = inserted(requests, replica.preempted_root, index, arrival, -replica.ticket)
    replica.ticket += 1
    replica.waiting += 1


@compiled
def settle(replica: ReplicaState, requests: Table[RequestState]) -> None:
    """Moves to the late what can no longer be on time."""
    if replica.order == DEADLINE:
        return
    while replica.on_time_root != NOBODY and requests[replica.on_time_root].latest_start < replica.clock:
        index = replica.on_time_root
        replica.on_time_root = without_root(requests, index)
        request = requests[index]
        replica.late_root = inserted(requests, replica.late_root, index, request.arrival, request.ticket)


@compiled
def late_is_next(replica: ReplicaState) -> tuple[bool, int]:
    """Whether the late have their turn among those never admitted, and their credit after it."""
    return admission.late_turn(
        replica.credit, replica.on_time_root != NOBODY, replica.late_root != NOBODY, replica.late_share
    )


@compiled
def peek(replica: ReplicaState, requests: Table[RequestState]) -> int:
    """The request whose turn it is, left in the queue; NOBODY when nothing waits."""
    settle(replica, requests)
    if replica.preempted_root != NOBODY:
        return replica.preempted_root
    late, _ = late_is_next(replica)
    return replica.late_root if late else replica.on_time_root


@compiled
def pop(replica: ReplicaState, requests: Table[RequestState]) -> None:
    """Takes out what `peek` showed."""
    replica.waiting -= 1
    if replica.preempted_root != NOBODY:
        replica.preempted_root = without_root(requests, replica.preempted_root)
        return
    late, replica.credit = late_is_next(replica)
    if late:
        replica.late_root = without_root(requests, replica.late_root)
    else:
        replica.on_time_root = without_root(requests, replica.on_time_root)
