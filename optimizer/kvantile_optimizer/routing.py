"""The routing rule: which group of a class, and which of its replicas, takes a request.

One rule for the gateway and for the simulator, so it is arithmetic on plain numbers and records: it can be called with
objects or compiled. Both choices are rendezvous hashing (each candidate is scored with the key, the highest score
wins), so a candidate that comes or goes moves its own share of the keys and no others. Groups are weighted with the
planned fractions, corrected by what each is owed: one that is too far ahead of its fraction is passed over, and one
too far behind goes first. Among replicas the first in the key's order that has room and is not above its fair share
takes the request (consistent hashing with bounded loads: Mirrokni, Thorup, Zadimoghaddam 2018).
"""

from __future__ import annotations

import math
import zlib
from typing import Protocol, TypeVar

LOAD_BOUND = 1.25
"""Times the mean load: lower moves prefixes off their replica for ordinary noise, higher lets a hot one queue while
others idle; 1.25 is where the cited paper's trade-off flattens."""
CREDIT_BOUND = 16.0
"""Requests that a group may be ahead of or behind its fraction: 0.16 points after 10,000 requests. A random walk meets
bounds this wide about once in a hundred requests, so hardly any prefix is torn from its group for it."""
LEAD_WEIGHT = 0.05
"""Of one request in a group's lead: some twenty requests' memory, less than a burst brings."""
QUEUE_LENGTH = 256
"""Requests of one class that may wait: at 10 requests/s half a minute, longer than a target allows."""
NO_KEY = -1
"""Of a request that has nothing in common with others."""
NONE = -1
"""No replica."""
WORDS = 2**32


class Loaded(Protocol):
    """A replica as seen here: the hash of its URL (below 2^32) and what it has in flight."""

    @property
    def name_hash(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def requests(self) -> int: ...


Item = TypeVar("Item", covariant=True)


class Row(Protocol[Item]):
    """What has places: a list of objects or an array of records."""

    def __getitem__(self, index: int, /) -> Item: ...


def hashed(data: bytes) -> int:
    """What stands for a key or a name: 32 bits, the same in every process. `score` mixes them."""
    return zlib.crc32(data)


def score(key: int, name_hash: int) -> int:
    """A 32-bit score of a candidate for a key: MurmurHash3's finaliser (Appleby 2011) of both, each below 2^32."""
    mixed = key ^ name_hash
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)


def weighted_score(key: int, name_hash: int, weight: float) -> float:
    """-w / ln(u) for a uniform u made of key and name: the highest is w's with probability w / sum(w)."""
    return -weight / math.log((score(key, name_hash) + 0.5) / WORDS)


def precedence(credit: float, fraction: float) -> int:
    """0 for a group that is owed too much, 1 for one within the bounds, 2 for one too far ahead."""
    owed = credit + fraction
    if owed > CREDIT_BOUND:
        return 0
    return 2 if owed - 1 < -CREDIT_BOUND else 1


def credit_after(credit: float, fraction: float, chosen: bool) -> float:
    """A group's credit, in requests, after one was placed. What it misses while it is away is forgotten beyond the
    bound: no flood on its return."""
    owed = credit + fraction - (1.0 if chosen else 0.0)
    return max(-CREDIT_BOUND, min(CREDIT_BOUND, owed))


def has_room(replica: Loaded, tokens: int, kv_tokens: int, max_requests: int) -> bool:
    """Whether `tokens` more fit. An empty replica takes whatever could ever run on it."""
    return replica.requests == 0 or (replica.requests < max_requests and replica.tokens + tokens <= kv_tokens)


def pick(
    replicas: Row[Loaded],
    begin: int,
    end: int,
    key: int,
    tokens: int,
    kv_tokens: int,
    max_requests: int,
    chance: float,
) -> int:
    """The place in [begin, end) of the replica for a request of `tokens`; NONE when none has room.

    `kv_tokens` and `max_requests` are one replica's capacity. Without a key there is nothing to stay close to: the one
    with the fewest tokens, then requests, is taken, of equal ones that at `chance` in [0, 1). The same holds when every
    replica with room is above its fair share.
    """
    if key != NO_KEY:
        total = 0
        for place in range(begin, end):
            total += replicas[place].tokens
        bound, best, highest = LOAD_BOUND * total / (end - begin), NONE, -1
        for place in range(begin, end):
            replica = replicas[place]
            if replica.tokens <= bound and has_room(replica, tokens, kv_tokens, max_requests):
                own = score(key, replica.name_hash)
                if own > highest:
                    best, highest = place, own
        if best != NONE:
            return best
    return least_loaded(replicas, begin, end, tokens, kv_tokens, max_requests, chance)


def least_loaded(
    replicas: Row[Loaded], begin: int, end: int, tokens: int, kv_tokens: int, max_requests: int, chance: float
) -> int:
    """The replica with room that has the fewest tokens, then requests; of equal ones that at `chance`."""
    best, equal = NONE, 0
    for place in range(begin, end):
        replica = replicas[place]
        if not has_room(replica, tokens, kv_tokens, max_requests):
            continue
        lightest = replicas[begin if best == NONE else best]
        if best == NONE or replica.tokens < lightest.tokens:
            best, equal = place, 1
        elif replica.tokens == lightest.tokens:
            if replica.requests < lightest.requests:
                best, equal = place, 1
            elif replica.requests == lightest.requests:
                equal += 1
    skip = int(chance * equal)
    if skip == 0:
        return best
    lightest = replicas[best]
    for place in range(best + 1, end):
        replica = replicas[place]
        alike = replica.tokens == lightest.tokens and replica.requests == lightest.requests
        if alike and has_room(replica, tokens, kv_tokens, max_requests):
            skip -= 1
            if skip == 0:
                return place
    return best


def lead_after(lead_s: float, seconds: float) -> float:
    """How long first tokens of a group take after dispatch, after one took `seconds`: an exponential mean."""
    return lead_s + LEAD_WEIGHT * (seconds - lead_s)
