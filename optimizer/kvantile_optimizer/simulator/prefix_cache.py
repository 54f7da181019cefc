"""The prefix cache of one replica in compiled form: the emulator's `BlockPool`, with the same answers.

A full block of a prompt has a key, made of the id that the trace gives for the stretch of the prompt that the block
ends in and of its place there; ids are taken to stand for all that comes before as well, as vLLM's hashes do. A block
that somebody refers to is not evicted. Once nobody does it is free, and holds what it holds until memory is wanted:
then the least recently used one goes first, of one sequence the tail before the head. Blank blocks go before cached.

Slots lie in one row per replica: a hash table with chains, a list by age and a list of unused ones, all linked by slot
numbers. There are as many as blocks, so a row is small whatever the trace holds. All of this is in records of its own,
and the kernel is compiled once more for replays with caches: those without keep their speed.
"""

from __future__ import annotations

from kvantile_optimizer.simulator.compiled import compiled
from kvantile_optimizer.simulator.state import NOBODY, Cache, Caches, ChainState, ReplicaState, RequestState


@compiled
def of_replica(caches: Caches | None, r: int) -> Cache | None:
    """The cache of replica `r`, None where there are none."""
    if caches is None:
        return None
    return Cache(caches.slots[r], caches.ends[r : r + 1], caches.chains, caches.ids, caches.id_tokens)


@compiled
def key_of(cache: Cache, chain: ChainState, block: int, block_size: int) -> int:
    """The key of one of a prompt's hashed blocks."""
    last = (block + 1) * block_size - 1
    stretch = last // cache.id_tokens
    identity: int = cache.ids[chain.begin + stretch]
    return identity * cache.id_tokens + last - stretch * cache.id_tokens


@compiled
def find(cache: Cache, key: int) -> int:
    """The slot of a key, NOBODY where it is not cached. Keys are dense numbers: their low bits spread well."""
    slot = cache.slots[key % len(cache.slots)].bucket
    while slot != NOBODY and cache.slots[slot].key != key:
        slot = cache.slots[slot].next
    return slot


@compiled
def leading_hits(replica: ReplicaState, cache: Cache, request: RequestState, index: int) -> tuple[int, int]:
    """How many leading blocks are there, resident ones included, and how many of them are free now.

    The last token that is known is always computed.
    """
    hits, free, chain = request.shared, 0, cache.chains[index]
    most = min(chain.covered, request.prompt + request.generated - 1) // replica.block_size
    while hits < most:
        slot = find(cache, key_of(cache, chain, hits, replica.block_size))
        if slot == NOBODY:
            break
        free += cache.slots[slot].users == 0
        hits += 1
    return hits, free


@compiled
def refer(replica: ReplicaState, cache: Cache, request: RequestState, index: int, hits: int) -> None:
    """Refers to the blocks that `leading_hits` found."""
    chain = cache.chains[index]
    for block in range(request.shared, hits):
        slot = find(cache, key_of(cache, chain, block, replica.block_size))
        if cache.slots[slot].users == 0:
            unlink(cache, slot)
            replica.free -= 1
        cache.slots[slot].users += 1
    chain.held = hits - request.shared


@compiled
def publish(replica: ReplicaState, cache: Cache, request: RequestState, index: int) -> None:
    """Makes the computed full blocks of its prompt known, up to the first that somebody else has made known."""
    chain = cache.chains[index]
    full = min(request.computed, chain.covered) // replica.block_size
    while request.shared + chain.held < full:
        key = key_of(cache, chain, request.shared + chain.held, replica.block_size)
        if find(cache, key) != NOBODY:
            break
        slot, bucket = cache.ends[0].unused, key % len(cache.slots)
        cache.ends[0].unused = cache.slots[slot].next
        cache.slots[slot].key, cache.slots[slot].users = key, 1
        cache.slots[slot].next, cache.slots[bucket].bucket = cache.slots[bucket].bucket, slot
        chain.held += 1


@compiled
def let_go(replica: ReplicaState, cache: Cache, request: RequestState, index: int) -> None:
    """Ends all references of a request; blocks that nobody refers to any more are free, and the youngest cached."""
    chain = cache.chains[index]
    for block in range(request.shared + chain.held - 1, request.shared - 1, -1):
        slot = find(cache, key_of(cache, chain, block, replica.block_size))
        cache.slots[slot].users -= 1
        if cache.slots[slot].users == 0:
            link(cache, slot)
            replica.free += 1
    chain.held = 0


@compiled
def evict(replica: ReplicaState, cache: Cache) -> None:
    """Forgets the oldest cached blocks whose memory has been taken."""
    while cache.ends[0].cached > replica.free:
        slot = cache.ends[0].oldest
        unlink(cache, slot)
        bucket = cache.slots[slot].key % len(cache.slots)
        before = cache.slots[bucket].bucket
        if before == slot:
            cache.slots[bucket].bucket = cache.slots[slot].next
        else:
            while cache.slots[before].next != slot:
                before = cache.slots[before].next
            cache.slots[before].next = cache.slots[slot].next
        cache.slots[slot].next = cache.ends[0].unused
        cache.ends[0].unused = slot


@compiled
def link(cache: Cache, slot: int) -> None:
    """Makes a block the youngest of the cached."""
    ends = cache.ends[0]
    cache.slots[slot].older, cache.slots[slot].newer = ends.newest, NOBODY
    if ends.newest == NOBODY:
        ends.oldest = slot
    else:
        cache.slots[ends.newest].newer = slot
    ends.newest = slot
    ends.cached += 1


@compiled
def unlink(cache: Cache, slot: int) -> None:
    """Takes a block out of the list of the cached."""
    ends, older, newer = cache.ends[0], cache.slots[slot].older, cache.slots[slot].newer
    if older == NOBODY:
        ends.oldest = newer
    else:
        cache.slots[older].newer = newer
    if newer == NOBODY:
        ends.newest = older
    else:
        cache.slots[newer].older = older
    ends.cached -= 1
