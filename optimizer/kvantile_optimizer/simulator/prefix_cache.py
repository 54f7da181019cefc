"""The prefix cache of one replica in compiled form: the emulator's `BlockPool`, with the same answers.

A full block of a prompt has a key, made of the id that the trace gives for the stretch of the prompt that the block
ends in and of its place there; ids are taken to stand for all that comes before as well, as vLLM's hashes do. A block
that somebody refers to is not evicted. Once nobody does it is free, and holds what it holds until memory is wanted:
then the least recently used one goes first, of one sequence the tail before the head. Blank blocks go before cached.

Slots lie in one row per replica: a hash table with chains, a list by age and a list of unused ones, all linked by slot
numbers. There are as many as blocks, so a row is small whatever the trace holds.
"""

from __future__ import annotations

from kvantile_optimizer.simulator.compiled import compiled
from kvantile_optimizer.simulator.state import NOBODY, Ints, ReplicaState, RequestState, SlotState, Table


@compiled
def key_of(replica: ReplicaState, hashes: Ints, request: RequestState, block: int) -> int:
    """The key of one of the request's hashed blocks; `hashes` are the ids of all prompts."""
    last = (block + 1) * replica.block_size - 1
    stretch = last // replica.hash_tokens
    identity: int = hashes[request.hash_begin + stretch]
    return identity * replica.hash_tokens + last - stretch * replica.hash_tokens


@compiled
def find(slots: Table[SlotState], key: int) -> int:
    """The slot of a key, NOBODY where it is not cached. Keys are dense numbers: their low bits spread well."""
    slot = slots[key % len(slots)].bucket
    while slot != NOBODY and slots[slot].key != key:
        slot = slots[slot].next
    return slot


@compiled
def leading_hits(
    replica: ReplicaState, slots: Table[SlotState], hashes: Ints, request: RequestState
) -> tuple[int, int]:
    """How many leading blocks are there, resident ones included, and how many of them are free now.

    The last token that is known is always computed.
    """
    hits, free = request.shared, 0
    most = min(request.hashed, (request.prompt + request.generated - 1) // replica.block_size)
    while hits < most:
        slot = find(slots, key_of(replica, hashes, request, hits))
        if slot == NOBODY:
            break
        free += slots[slot].users == 0
        hits += 1
    return hits, free


@compiled
def refer(replica: ReplicaState, slots: Table[SlotState], hashes: Ints, request: RequestState, hits: int) -> None:
    """Refers to the blocks that `leading_hits` found."""
    for block in range(request.shared, hits):
        slot = find(slots, key_of(replica, hashes, request, block))
        if slots[slot].users == 0:
            unlink(replica, slots, slot)
            replica.free -= 1
        slots[slot].users += 1
    request.held = hits - request.shared


@compiled
def publish(replica: ReplicaState, slots: Table[SlotState], hashes: Ints, request: RequestState) -> None:
    """Makes the computed full blocks of its prompt known, up to the first that somebody else has made known."""
    full = min(request.computed // replica.block_size, request.hashed)
    while request.shared + request.held < full:
        key = key_of(replica, hashes, request, request.shared + request.held)
        if find(slots, key) != NOBODY:
            break
        slot = replica.unused
        replica.unused = slots[slot].next
        slots[slot].key, slots[slot].users = key, 1
        bucket = key % len(slots)
        slots[slot].next, slots[bucket].bucket = slots[bucket].bucket, slot
        request.held += 1


@compiled
def let_go(replica: ReplicaState, slots: Table[SlotState], hashes: Ints, request: RequestState) -> None:
    """Ends all references of a request; blocks that nobody refers to any more are free, and the youngest cached."""
    for block in range(request.shared + request.held - 1, request.shared - 1, -1):
        slot = find(slots, key_of(replica, hashes, request, block))
        slots[slot].users -= 1
        if slots[slot].users == 0:
            slots[slot].older, slots[slot].newer = replica.newest, NOBODY
            if replica.newest == NOBODY:
                replica.oldest = slot
            else:
                slots[replica.newest].newer = slot
            replica.newest = slot
            replica.cached += 1
            replica.free += 1
    request.held = 0


@compiled
def evict(replica: ReplicaState, slots: Table[SlotState]) -> None:
    """Forgets the oldest cached blocks whose memory has been taken."""
    while replica.cached > replica.free:
        slot = replica.oldest
        unlink(replica, slots, slot)
        bucket = slots[slot].key % len(slots)
        before = slots[bucket].bucket
        if before == slot:
            slots[bucket].bucket = slots[slot].next
        else:
            while slots[before].next != slot:
                before = slots[before].next
            slots[before].next = slots[slot].next
        slots[slot].next = replica.unused
        replica.unused = slot


@compiled
def unlink(replica: ReplicaState, slots: Table[SlotState], slot: int) -> None:
    """Takes a cached block out of the list by age."""
    older, newer = slots[slot].older, slots[slot].newer
    if older == NOBODY:
        replica.oldest = newer
    else:
        slots[older].newer = newer
    if newer == NOBODY:
        replica.newest = older
    else:
        slots[newer].older = older
    replica.cached -= 1
