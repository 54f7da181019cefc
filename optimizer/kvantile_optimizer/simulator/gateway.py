"""Replays requests through the gateway's rules: its choice of groups and replicas, and its lobby.

The same rules as `kvantile_router.placement` and `lobby`, over records: groups by hashed keys and the books of their
fractions, replicas by prefix and load, and where every replica is full a bounded queue in slack order. Whoever waits
longer than its class is patient, or finds its class's places taken, is refused. Unlike `dispatch` this looks at every
end of a step, in the order of time, because a release may let somebody out of the lobby: what ends at a moment comes
before what arrives, and that before the steps that begin.

Answers that end in one step are released together; what the gateway and the network take is left out.
"""

from __future__ import annotations

import math

from kvantile_optimizer import admission, routing
from kvantile_optimizer.simulator import heaps, kernel, prefix_cache
from kvantile_optimizer.simulator.compiled import compiled, entry
from kvantile_optimizer.simulator.state import (
    BETWEEN,
    NOBODY,
    STEP,
    Caches,
    Floats,
    Gateway,
    Ints,
    ReplicaState,
    RequestState,
    Table,
)


@entry
def replay(
    requests: Table[RequestState],
    replicas: Table[ReplicaState],
    gateway: Gateway,
    running: Ints,
    rooms: Ints,
    history: Ints,
    caches: Caches | None,
    kv_seconds: Floats,
    shortcut: bool,
) -> None:
    """Runs `requests`, in order of arrival, to their ends or refusals; what came of them is in their records.

    `running` (R, most) and `kv_seconds` (R, KV_BINS) have a row for each replica, `rooms` (block_size,) and `history`
    (H,) serve all; `caches` are those of prefixes. Afterwards `requests[i].arrival` is when the engine got it, and
    `gateway.visits[i].arrival` when the gateway did.
    """
    arriving = 0
    while True:
        ending, beginning = NOBODY, NOBODY
        ends, begins, arrives, leaves = math.inf, math.inf, math.inf, math.inf
        for r in range(len(replicas)):
            replica = replicas[r]
            if replica.phase != BETWEEN:
                if replica.end < ends:
                    ending, ends = r, replica.end
            elif replica.running + replica.waiting > 0 and replica.clock < begins:
                beginning, begins = r, replica.clock
        if arriving < len(requests):
            arrives = gateway.visits[arriving].arrival
        leaving = most_impatient(gateway)
        if leaving != NOBODY:
            leaves = patient_until(gateway, leaving)
        moment = min(ends, begins, arrives, leaves)
        if moment == math.inf:
            break
        if ends == moment:
            before = replicas[ending].requests
            learn_leads(replicas[ending], requests, running[ending], gateway)
            cache = prefix_cache.of_replica(caches, ending)
            kernel.finish_step(replicas[ending], requests, running[ending], cache, kv_seconds[ending])
            if replicas[ending].requests < before:
                serve(replicas, requests, gateway, moment)
        elif leaves == moment:
            leave(gateway, leaving)
        elif arrives == moment:
            receive(replicas, requests, gateway, arriving)
            arriving += 1
        else:
            cache = prefix_cache.of_replica(caches, beginning)
            kernel.begin(replicas[beginning], requests, running[beginning], rooms, history, cache, shortcut)


@compiled
def learn_leads(replica: ReplicaState, requests: Table[RequestState], running: Ints, gateway: Gateway) -> None:
    """Takes note of the first tokens that the step in progress yields."""
    if replica.phase != STEP:
        return
    for position in range(replica.running):
        request = requests[running[position]]
        first = request.generated == 0 and request.scheduled > 0
        if first and request.computed + request.scheduled == request.prompt:
            place = gateway.places[request.group]
            place.lead = routing.lead_after(place.lead, replica.end - request.arrival)


@compiled
def receive(replicas: Table[ReplicaState], requests: Table[RequestState], gateway: Gateway, index: int) -> None:
    """Gives a request that arrives a place, in the lobby if there is none, or refuses it."""
    visit = gateway.visits[index]
    row = gateway.rows[visit.class_index]
    standing = 0
    for line in range(len(gateway.lines)):
        standing += gateway.lines[line].waiting
    if standing == 0 and placed(replicas, requests, gateway, index):
        send(replicas, requests, gateway, index, visit.arrival)
        return
    if row.waiting >= row.length:
        return
    stand(replicas, requests, gateway, index)
    serve(replicas, requests, gateway, visit.arrival)


@compiled
def stand(replicas: Table[ReplicaState], requests: Table[RequestState], gateway: Gateway, index: int) -> None:
    """Puts a request into its line, to be served before less is left of its target than first tokens take."""
    visit, request = gateway.visits[index], requests[index]
    row = gateway.rows[visit.class_index]
    lead, prefill = math.inf, math.inf
    for group in range(len(gateway.places)):
        if gateway.routes[visit.class_index][group].fraction > 0:
            place = gateway.places[group]
            replica = replicas[place.begin]
            lead = min(lead, place.lead)
            prefill = min(prefill, replica.alpha + replica.delta * request.prompt)
    request.arrival, request.latest_start = visit.arrival, visit.due - max(lead, prefill)
    heaps.push(gateway.lines[visit.line], requests, index)
    visit.waiting, visit.behind = 1, NOBODY
    row.waiting += 1
    if row.head == NOBODY:
        row.head = index
    else:
        gateway.visits[row.tail].behind = index
    row.tail = index


@compiled
def most_impatient(gateway: Gateway) -> int:
    """The class whose first in the lobby leaves first; NOBODY when nobody waits. Forgets those that have gone."""
    found = NOBODY
    for index in range(len(gateway.rows)):
        row = gateway.rows[index]
        while row.head != NOBODY and gateway.visits[row.head].waiting == 0:
            row.head = gateway.visits[row.head].behind
        if row.head != NOBODY and (found == NOBODY or patient_until(gateway, index) < patient_until(gateway, found)):
            found = index
    return found


@compiled
def patient_until(gateway: Gateway, class_index: int) -> float:
    """When the class's first in the lobby leaves."""
    row = gateway.rows[class_index]
    return gateway.visits[row.head].arrival + row.patience_s


@compiled
def leave(gateway: Gateway, class_index: int) -> None:
    """Refuses the class's first in the lobby. It stays in its heap, marked, until it comes up."""
    index = gateway.rows[class_index].head
    gone(gateway, index)
    forget_empty(gateway, gateway.visits[index].line)


@compiled
def gone(gateway: Gateway, index: int) -> None:
    """Counts a request out of the lobby."""
    visit = gateway.visits[index]
    visit.waiting = 0
    gateway.rows[visit.class_index].waiting -= 1
    gateway.lines[visit.line].waiting -= 1


@compiled
def forget_empty(gateway: Gateway, line: int) -> None:
    """An empty line is gone, and with it the credit of its late."""
    queue = gateway.lines[line]
    if queue.waiting == 0:
        queue.credit = 0
        queue.on_time_root = queue.late_root = NOBODY


@compiled
def foremost(requests: Table[RequestState], gateway: Gateway, moment: float) -> int:
    """The line, of those that are not stuck, whose next came first; NOBODY when there is none."""
    found, earliest = NOBODY, NOBODY
    for line in range(len(gateway.lines)):
        queue = gateway.lines[line]
        if gateway.stuck[line] or queue.waiting == 0:
            continue
        queue.clock = moment
        drop_gone(queue, requests, gateway)
        index = heaps.peek(queue, requests)
        if earliest == NOBODY or index < earliest:
            found, earliest = line, index
    return found


@compiled
def drop_gone(queue: ReplicaState, requests: Table[RequestState], gateway: Gateway) -> None:
    """Takes those that have gone from the heads of a line."""
    while True:
        heaps.settle(queue, requests)
        if queue.on_time_root != NOBODY and gateway.visits[queue.on_time_root].waiting == 0:
            queue.on_time_root = heaps.without_root(requests, queue.on_time_root)
        elif queue.late_root != NOBODY and gateway.visits[queue.late_root].waiting == 0:
            queue.late_root = heaps.without_root(requests, queue.late_root)
        else:
            break


@compiled
def serve(replicas: Table[ReplicaState], requests: Table[RequestState], gateway: Gateway, moment: float) -> None:
    """Gives places to whoever can have one now; who does not fit keeps the groups that it waits for."""
    gateway.stuck[:] = False
    for group in range(len(gateway.places)):
        gateway.places[group].withheld = 0
    while True:
        line = foremost(requests, gateway, moment)
        if line == NOBODY:
            break
        queue = gateway.lines[line]
        index = heaps.peek(queue, requests)
        if not placed(replicas, requests, gateway, index):
            gateway.stuck[line] = True
            for group in range(len(gateway.places)):
                if gateway.line_groups[line][group]:
                    gateway.places[group].withheld = 1
            continue
        heaps.pop(queue, requests)
        queue.waiting += 1  # `gone` counts it out
        gone(gateway, index)
        forget_empty(gateway, line)
        send(replicas, requests, gateway, index, moment)
    for group in range(len(gateway.places)):
        gateway.places[group].withheld = 0


@compiled
def placed(replicas: Table[ReplicaState], requests: Table[RequestState], gateway: Gateway, index: int) -> bool:
    """Chooses a group and a replica with room for a request and books it; whether there are any."""
    visit, request = gateway.visits[index], requests[index]
    groups, routes = len(gateway.places), gateway.routes[visit.class_index]
    for group in range(groups):
        gateway.places[group].tried = gateway.places[group].withheld
    while True:
        best, rank, highest = NOBODY, 3, 0.0
        for group in range(groups):
            route, place = routes[group], gateway.places[group]
            if place.tried or route.fraction <= 0 or not gateway.allowed[index][group]:
                continue
            own_rank = routing.precedence(route.credit, route.fraction)
            own = routing.weighted_score(visit.group_key, place.name_hash, route.fraction)
            if own_rank < rank or (own_rank == rank and own > highest):
                best, rank, highest = group, own_rank, own
        if best == NOBODY:
            return False
        place, route = gateway.places[best], routes[best]
        place.tried = 1
        request.load = request.prompt + math.ceil(route.share * min(route.reserve, request.limit))
        chosen = routing.pick(
            replicas,
            place.begin,
            place.end,
            visit.key,
            request.load,
            place.kv_tokens,
            place.max_num_seqs,
            request.chance,
        )
        if chosen != NOBODY:
            request.group, request.replica = best, chosen
            for group in range(groups):
                if routes[group].fraction > 0:
                    routes[group].credit = routing.credit_after(
                        routes[group].credit, routes[group].fraction, group == best
                    )
            return True


@compiled
def send(
    replicas: Table[ReplicaState], requests: Table[RequestState], gateway: Gateway, index: int, moment: float
) -> None:
    """Hands a placed request to its replica, with what its route reserves there."""
    visit, request = gateway.visits[index], requests[index]
    route, replica = gateway.routes[visit.class_index][request.group], replicas[request.replica]
    request.form, request.pooling = route.form, route.pooling
    request.reserve = admission.cut_reserve(
        route.reserve, request.prompt, request.limit, replica.total_blocks, replica.block_size
    )
    request.shared = min(request.cached, request.prompt - 1, route.resident) // replica.block_size
    request.arrival, request.latest_start = moment, math.inf
    if route.ordered:
        request.latest_start = visit.due - (replica.alpha + replica.delta * request.prompt)
    kernel.submit(replica, requests, index)
