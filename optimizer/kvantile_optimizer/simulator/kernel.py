"""One replica's steps, after vLLM's V1 scheduler: the rules of the emulator's scheduler, compiled, with a shortcut.

Between two events (an arrival that may be admitted, a finish, an empty pool, a deadline that passes) all steps decode
the same sequences, so n of them are done at once: they take n alpha + n beta B + gamma (n C + B n (n - 1) / 2) seconds
for B sequences that attend to C tokens in the first. `steps_alike` says how many there are; 0 sends the replica through
one step of its own, which decides as the emulator does. A shorter answer than could be had costs time and changes
nothing. Steps begin and end separately: what finishes is seen when its step ends, and an arrival cuts the equal steps
that are under way to those that begin before it.
"""

from __future__ import annotations

import math

from kvantile_optimizer import admission
from kvantile_optimizer.admission import NONE
from kvantile_optimizer.simulator import gates, heaps, prefix_cache
from kvantile_optimizer.simulator.compiled import compiled
from kvantile_optimizer.simulator.state import (
    ALIKE,
    BETWEEN,
    FCFS,
    KV_BINS,
    NOBODY,
    SLACK,
    STEP,
    Cache,
    Floats,
    Ints,
    ReplicaState,
    RequestState,
    Table,
)


@compiled
def submit(replica: ReplicaState, requests: Table[RequestState], index: int) -> None:
    """Puts a request into the queue of a replica that is advanced to its arrival."""
    request = requests[index]
    heaps.push(replica, requests, index)
    replica.tokens += request.load
    replica.requests += 1
    if replica.phase == ALIKE:
        cut(replica, request.arrival)
    elif replica.phase == BETWEEN:
        replica.clock = max(replica.clock, request.arrival)
        replica.wake = replica.clock


@compiled
def cut(replica: ReplicaState, arrival: float) -> None:
    """Ends the equal steps with the one under way at `arrival`, unless that one could not be admitted anyway."""
    if replica.deaf:
        return
    replica.steps = min(replica.steps, steps_until(replica, arrival))
    replica.end = replica.wake = replica.clock + seconds_alike(replica, replica.steps)


@compiled
def advance(
    replica: ReplicaState,
    requests: Table[RequestState],
    running: Ints,
    rooms: Ints,
    history: Ints,
    cache: Cache | None,
    kv_seconds: Floats,
    until: float,
    shortcut: bool,
) -> None:
    """Ends the steps that end by `until` and begins those that begin before it.

    `running` (max_num_seqs,) are the indices of what runs, `rooms` (block_size,) is scratch, `history` (H,) are past
    output lengths for the gate that asks, `cache` is the prefix cache if there is one, `kv_seconds`
    (KV_BINS,) counts seconds by KV use. Without `shortcut` every step is taken for itself.
    """
    while True:
        if replica.phase != BETWEEN:
            if replica.end > until:
                return
            finish_step(replica, requests, running, cache, kv_seconds)
        replica.wake = replica.clock if replica.running + replica.waiting else math.inf
        if replica.wake >= until:
            return
        begin(replica, requests, running, rooms, history, cache, shortcut)


@compiled
def begin(
    replica: ReplicaState,
    requests: Table[RequestState],
    running: Ints,
    rooms: Ints,
    history: Ints,
    cache: Cache | None,
    shortcut: bool,
) -> None:
    """Begins the next step, or the equal ones to come, of a replica that is between two."""
    steps = steps_alike(replica, requests, running, rooms, cache) if shortcut else 0
    if steps:
        replica.phase, replica.steps = ALIKE, steps
        replica.end = replica.clock + seconds_alike(replica, steps)
    else:
        replica.phase = STEP
        replica.end = replica.clock + begin_step(replica, requests, running, history, cache)
    replica.wake = replica.end


@compiled
def seconds_alike(replica: ReplicaState, steps: int) -> float:
    """How long the first `steps` of the equal steps take."""
    count = replica.running
    tokens = steps * replica.context + count * (steps * (steps - 1) // 2)
    return steps * replica.alpha + replica.beta * (steps * count) + replica.gamma * tokens


@compiled
def steps_until(replica: ReplicaState, moment: float) -> int:
    """The fewest equal steps, at least one, that end at `moment` or later."""
    seconds, count = moment - replica.clock, replica.running
    linear = replica.alpha + replica.beta * count + replica.gamma * (replica.context - 0.5 * count)
    square = 0.5 * replica.gamma * count
    # The root in the form that loses no digits where the square term is small.
    root = 2.0 * seconds / (linear + math.sqrt(max(0.0, linear * linear + 4.0 * square * max(0.0, seconds))))
    steps = max(1, math.ceil(min(root, 1e15)))
    while steps > 1 and replica.clock + seconds_alike(replica, steps - 1) >= moment:
        steps -= 1
    while replica.clock + seconds_alike(replica, steps) < moment:
        steps += 1
    return steps


@compiled
def steps_alike(
    replica: ReplicaState,
    requests: Table[RequestState],
    running: Ints,
    rooms: Ints,
    cache: Cache | None,
) -> int:
    """How many steps from now on decode what runs and nothing else; 0 when the next one may be different.

    Leaves in `rooms` how many sequences have so many tokens of room in their last block: those with r take a block in
    the equal steps r + 1, r + 1 + block_size, ...
    """
    count, size = replica.running, replica.block_size
    if count == 0 or count > replica.max_batched:
        return 0
    rooms[:] = 0
    context, steps = 0, requests[running[0]].output
    for position in range(count):
        request = requests[running[position]]
        known = request.prompt + request.generated
        if request.generated == 0 or request.computed + 1 != known:
            return 0
        context += known
        steps = min(steps, request.output - request.generated)
        rooms[request.blocks * size - request.computed] += 1
    replica.context = context
    steps = steps_that_fit(replica, rooms, steps)
    replica.deaf = count >= replica.max_num_seqs or count == replica.max_batched
    if steps == 0 or replica.waiting == 0 or replica.deaf:
        return steps
    replica.deaf = replica.order == FCFS
    return steps_blocked(replica, requests, running, rooms, cache, steps)


@compiled
def steps_that_fit(replica: ReplicaState, rooms: Ints, most: int) -> int:
    """How many of `most` equal steps find all the blocks they need."""
    count, size = replica.running, replica.block_size
    if count * (most // size + 1) <= replica.free:
        return most
    rounds = replica.free // count
    left, steps = replica.free - rounds * count, rounds * size
    while steps < most and rooms[steps % size] <= left:
        left -= rooms[steps % size]
        steps += 1
    return min(steps, most)


@compiled
def steps_blocked(
    replica: ReplicaState,
    requests: Table[RequestState],
    running: Ints,
    rooms: Ints,
    cache: Cache | None,
    most: int,
) -> int:
    """In how many of `most` equal steps the first that waits is not admitted, for want of memory."""
    if replica.gate != gates.RESERVATION:
        return 0
    first = heaps.peek(replica, requests)
    candidate = requests[first]
    if replica.order == SLACK and replica.on_time_root != NOBODY:
        most = min(most, steps_until(replica, requests[replica.on_time_root].latest_start))
    firm, soft, falling = 0, 0, 0
    for position in range(replica.running):
        request = requests[running[position]]
        blocks = admission.blocks_for(request.computed + 1, replica.block_size)
        firm += firm_of(request, blocks, replica.block_size)
        mine = soft_of(request)
        if mine > 0:
            soft += mine
            falling += request.pooling
            most = min(most, request.reserve - request.generated)
    if soft > 0 and firm > 0:
        return 0
    # What the prefix cache has of it now can only be evicted meanwhile, so this never says too many.
    hits, free_hits = hits_of(replica, cache, candidate, first)
    free = replica.free - free_hits
    # Without a pool the free blocks less the promised ones only fall, so the first step answers for all.
    for step in range(most if soft > 0 else 1):
        free -= rooms[step % replica.block_size]
        if fits(replica, candidate, hits, free, firm, soft - step * falling):
            return step
    return most


@compiled
def firm_of(request: RequestState, blocks: int, block_size: int) -> int:
    """Blocks that a running request has coming beyond `blocks`."""
    return admission.running_firm_blocks(
        request.form, request.prompt, request.generated, request.reserve, blocks, block_size
    )


@compiled
def soft_of(request: RequestState) -> int:
    """The milli-tokens that a request pools."""
    return admission.soft_millitokens(request.form, request.generated, request.reserve, request.pooling)


@compiled
def hits_of(replica: ReplicaState, cache: Cache | None, request: RequestState, index: int) -> tuple[int, int]:
    """How many of its leading blocks are on the replica already, and how many of these are free."""
    if cache is None:
        return request.shared, 0
    return prefix_cache.leading_hits(replica, cache, request, index)


@compiled
def fits(replica: ReplicaState, candidate: RequestState, hits: int, free: int, firm: int, soft: int) -> bool:
    """Whether the shared rule admits `candidate` beside what runs, whose sums `firm` and `soft` are.

    `hits` of its blocks are there, and `free` ones besides.
    """
    size = replica.block_size
    form = candidate.form if replica.running else NONE
    own = admission.firm_blocks(form, candidate.prompt, candidate.generated, candidate.reserve, hits, size)
    return admission.admits(free, own, soft_of(candidate), firm, soft, replica.running, replica.watermark_blocks, size)


@compiled
def begin_step(
    replica: ReplicaState,
    requests: Table[RequestState],
    running: Ints,
    history: Ints,
    cache: Cache | None,
) -> float:
    """Decides the step that begins now, takes its blocks, and says how long it takes."""
    budget, size, position = replica.max_batched, replica.block_size, 0
    preemptions, decoding, context, prefill = replica.preemptions, 0, 0, 0
    while position < replica.running and budget > 0:
        request = requests[running[position]]
        missing = request.prompt + request.generated - request.computed
        tokens = min(missing, budget)
        needed = admission.blocks_for(request.computed + tokens, size) - request.blocks
        while replica.free < needed and replica.running > position:
            preempt_last(replica, requests, running, cache)
        if replica.running == position:
            break
        take(replica, cache, needed)
        request.blocks += needed
        request.scheduled = tokens
        if cache is not None:
            cache.chains[running[position]].prefilling = missing > 1 or request.generated == 0
        if missing == 1 and request.generated > 0:
            decoding += 1
            context += request.computed + 1
        else:
            prefill += tokens
        budget -= tokens
        position += 1
    for left in range(position, replica.running):
        requests[running[left]].scheduled = 0
    if replica.preemptions == preemptions:
        prefill += admit(replica, requests, running, history, cache, budget)
    return replica.alpha + replica.beta * decoding + replica.gamma * context + replica.delta * prefill


@compiled
def take(replica: ReplicaState, cache: Cache | None, blocks: int) -> None:
    """Takes free blocks, blank ones first; of cached ones the oldest are forgotten."""
    replica.free -= blocks
    if cache is not None:
        prefix_cache.evict(replica, cache)


@compiled
def give_back(replica: ReplicaState, cache: Cache | None, request: RequestState, index: int) -> None:
    """Frees what a request holds; what others refer to stays."""
    replica.free += request.blocks - request.shared
    if cache is not None:
        replica.free -= cache.chains[index].held
        prefix_cache.let_go(replica, cache, request, index)
    request.blocks = 0


@compiled
def preempt_last(replica: ReplicaState, requests: Table[RequestState], running: Ints, cache: Cache | None) -> None:
    """Sends the last that runs back to the queue; all its tokens will be computed again."""
    replica.running -= 1
    index = running[replica.running]
    request = requests[index]
    give_back(replica, cache, request, index)
    replica.recomputed_tokens += request.computed
    request.computed = 0
    request.preemptions += 1
    replica.preemptions += 1
    gates.raise_ratio(replica, requests, running)
    heaps.push_preempted(replica, requests, index)


@compiled
def admit(
    replica: ReplicaState,
    requests: Table[RequestState],
    running: Ints,
    history: Ints,
    cache: Cache | None,
    budget: int,
) -> int:
    """Starts what waits while it fits; the tokens computed of it in this step."""
    tokens = 0
    if replica.waiting == 0 or budget <= 0 or replica.running >= replica.max_num_seqs:
        return tokens
    firm, soft = committed(replica, requests, running)
    while budget > 0 and replica.running < replica.max_num_seqs:
        index = heaps.peek(replica, requests)
        if index == NOBODY:
            break
        request = requests[index]
        hits, free_hits = hits_of(replica, cache, request, index)
        if not fits(replica, request, hits, replica.free - free_hits, firm, soft):
            break
        if not gates.passes(replica, requests, running, history, request):
            break
        heaps.pop(replica, requests)
        chunk = start(replica, cache, request, index, hits, budget)
        running[replica.running] = index
        replica.running += 1
        firm += firm_of(request, request.blocks, replica.block_size)
        soft += soft_of(request)
        budget -= chunk
        tokens += chunk
    return tokens


@compiled
def committed(replica: ReplicaState, requests: Table[RequestState], running: Ints) -> tuple[int, int]:
    """Firm blocks and soft milli-tokens of what runs."""
    firm, soft = 0, 0
    for position in range(replica.running):
        request = requests[running[position]]
        firm += firm_of(request, request.blocks, replica.block_size)
        soft += soft_of(request)
    return firm, soft


@compiled
def start(replica: ReplicaState, cache: Cache | None, request: RequestState, index: int, hits: int, budget: int) -> int:
    """Takes the blocks of an admitted request's first chunk; the tokens of it. `hits` blocks are there already.

    Where the trace has no ids, what it says was seen before needs blocks and no time.
    """
    size = replica.block_size
    known = request.prompt + request.generated
    request.computed = min(request.cached, known - 1) // size * size
    if cache is not None:
        prefix_cache.refer(replica, cache, request, index, hits)
        request.computed = hits * size
    chunk = min(known - request.computed, budget)
    request.blocks = admission.blocks_for(request.computed + chunk, size)
    request.scheduled = chunk
    if cache is not None:
        cache.chains[index].prefilling = 1
        if math.isnan(request.admitted):
            cache.chains[index].hit = request.computed
    take(replica, cache, request.blocks - hits)
    if math.isnan(request.admitted):
        request.admitted = replica.clock
    return chunk


@compiled
def finish_step(
    replica: ReplicaState,
    requests: Table[RequestState],
    running: Ints,
    cache: Cache | None,
    kv_seconds: Floats,
) -> None:
    """Hands out the tokens of the step or steps in progress at their end; what is complete leaves."""
    used, began = replica.total_blocks - replica.free, replica.clock
    replica.clock = replica.end
    if replica.phase == ALIKE:
        finish_alike(replica, requests, running, cache)
        used = (used + replica.total_blocks - replica.free) // 2
    else:
        finish_one(replica, requests, running, cache)
    replica.phase = BETWEEN
    seconds = replica.clock - began
    replica.busy_s += seconds
    replica.kv_block_s += seconds * used
    kv_seconds[min(KV_BINS - 1, used * KV_BINS // replica.total_blocks)] += seconds
    leave(replica, requests, running, cache)


@compiled
def finish_alike(replica: ReplicaState, requests: Table[RequestState], running: Ints, cache: Cache | None) -> None:
    """The tokens and blocks of several decode-only steps."""
    steps, size, taken = replica.steps, replica.block_size, 0
    for position in range(replica.running):
        request = requests[running[position]]
        request.generated += steps
        request.computed += steps
        needed = admission.blocks_for(request.computed, size) - request.blocks
        request.blocks += needed
        taken += needed
    take(replica, cache, taken)
    replica.computed_tokens += steps * replica.running
    for _ in range(steps if replica.gate == gates.NEW_TOKEN_RATIO else 0):
        gates.lower_ratio(replica)


@compiled
def finish_one(replica: ReplicaState, requests: Table[RequestState], running: Ints, cache: Cache | None) -> None:
    """The tokens of one step, its prefills among them."""
    for position in range(replica.running):
        request = requests[running[position]]
        if request.scheduled == 0:
            continue
        request.computed += request.scheduled
        replica.computed_tokens += request.scheduled
        if cache is not None:
            index = running[position]
            if cache.chains[index].prefilling:
                prefix_cache.publish(replica, cache, request, index)
        if request.computed == request.prompt + request.generated:
            request.generated += 1
            if request.generated == 1:
                request.first = replica.clock
    gates.lower_ratio(replica)


@compiled
def leave(replica: ReplicaState, requests: Table[RequestState], running: Ints, cache: Cache | None) -> None:
    """Frees what is complete and closes the ranks, in order."""
    kept = 0
    for position in range(replica.running):
        index = running[position]
        request = requests[index]
        if request.generated < request.output:
            running[kept] = index
            kept += 1
            continue
        request.last = replica.clock
        give_back(replica, cache, request, index)
        replica.tokens -= request.load
        replica.requests -= 1
    replica.running = kept
