"""The KV cache as blocks: how many are free, and which hold prompt prefixes that can be used again.

A block is either blank (free, nothing worth keeping), cached (free, but still holding a known piece of a prompt),
private to one sequence, or shared, when its content has a hash and any number of sequences may refer to it. Blocks of
one kind are alike, so they are counted and have no numbers; only hashed ones are told apart. Unlike vLLM, which keeps
one list of free blocks, blank blocks are used up before a cached one is overwritten; cached ones go least recently
used first, and of one sequence the tail before the head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockPool:
    """`total` blocks, all blank at first."""

    total: int
    blank: int = field(init=False)
    _cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _shared: dict[int, int] = field(default_factory=dict)
    _private: int = 0

    def __post_init__(self) -> None:
        self.blank = self.total

    @property
    def free(self) -> int:
        """Blocks that can be had: blank and cached ones."""
        return self.blank + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that sequences hold; a shared one counts once. `free + used` is `total`, always."""
        return self._private + len(self._shared)

    def take(self, count: int) -> bool:
        """Makes `count` free blocks private, or does nothing and says False."""
        if count > self.free:
            return False
        evicted = max(0, count - self.blank)
        for _ in range(evicted):
            self._cached.popitem(last=False)
        self.blank -= count - evicted
        self._private += count
        return True

    def leading_hits(self, hashes: Sequence[int]) -> tuple[int, int]:
        """How many leading blocks of `hashes` are there, and how many of these are free now."""
        hits = free_hits = 0
        for key in hashes:
            if key in self._cached:
                free_hits += 1
            elif key not in self._shared:
                break
            hits += 1
        return hits, free_hits

    def share(self, hashes: Sequence[int]) -> None:
        """Refers to blocks that `leading_hits` found."""
        for key in hashes:
            if key in self._cached:
                del self._cached[key]
            self._shared[key] = self._shared.get(key, 0) + 1

    def publish(self, key: int) -> bool:
        """Turns a private block, now full, into the shared one of that hash; False when there is one already."""
        if key in self._shared or key in self._cached:
            return False
        self._private -= 1
        self._shared[key] = 1
        return True

    def release(self, shared: Sequence[int], private: int) -> None:
        """Gives back what a sequence held: shared blocks stay cached, private ones become blank."""
        self._private -= private
        self.blank += private
        for key in reversed(shared):
            self._shared[key] -= 1
            if not self._shared[key]:
                del self._shared[key]
                self._cached[key] = None

    def forget(self) -> None:
        """Makes every cached block blank."""
        self.blank += len(self._cached)
        self._cached.clear()
