"""The KV cache as blocks: how many are free, and which hold content that can be used again. After vLLM's block pool.

A block is either blank (free, nothing worth keeping), private to one sequence (not full yet, or caching is off), or
full: then it has the key of its content, and any number of sequences may refer to it. A full block that nobody refers
to is free but cached. Blank blocks are taken first, then cached ones, least recently used first, and of one sequence
the tail before the head. Two sequences that compute the same content at the same time have a full block each, of which
the older one is found. Blank and private blocks are alike and only counted; full ones have numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockPool:
    """`total` blocks, all blank at first."""

    total: int
    blank: int = field(init=False)
    _private: int = 0
    _made: int = 0
    _cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _uses: dict[int, int] = field(default_factory=dict)
    _key_of: dict[int, Hashable] = field(default_factory=dict)
    _holding: dict[Hashable, dict[int, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.blank = self.total

    @property
    def free(self) -> int:
        """Blocks that can be had: blank and cached ones."""
        return self.blank + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that sequences hold; a shared one counts once. `free + used` is `total`, always."""
        return self._private + len(self._uses)

    def take(self, count: int) -> bool:
        """Makes `count` free blocks private, or does nothing and says False."""
        if count > self.free:
            return False
        evicted = max(0, count - self.blank)
        for _ in range(evicted):
            self._forget(self._cached.popitem(last=False)[0])
        self.blank -= count - evicted
        self._private += count
        return True

    def leading_hits(self, keys: Iterable[Hashable]) -> tuple[list[int], int]:
        """The blocks that hold the leading ones of `keys`, and how many of them are free now."""
        hits, free_hits = [], 0
        for key in keys:
            blocks = self._holding.get(key)
            if blocks is None:
                break
            block = next(iter(blocks))
            free_hits += block in self._cached
            hits.append(block)
        return hits, free_hits

    def share(self, blocks: Iterable[int]) -> None:
        """Refers to blocks that `leading_hits` found."""
        for block in blocks:
            self._cached.pop(block, None)
            self._uses[block] = self._uses.get(block, 0) + 1

    def publish(self, key: Hashable) -> int:
        """Gives a private block, now full, the key of its content: its number."""
        self._private -= 1
        self._made += 1
        self._uses[self._made] = 1
        self._key_of[self._made] = key
        self._holding.setdefault(key, {})[self._made] = None
        return self._made

    def release(self, full: Sequence[int], private: int) -> None:
        """Gives back what a sequence held: full blocks stay cached, private ones become blank."""
        self._private -= private
        self.blank += private
        for block in reversed(full):
            self._uses[block] -= 1
            if not self._uses[block]:
                del self._uses[block]
                self._cached[block] = None

    def forget(self) -> None:
        """Makes every cached block blank."""
        self.blank += len(self._cached)
        for block in self._cached:
            self._forget(block)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block)
        del self._holding[key][block]
        if not self._holding[key]:
            del self._holding[key]
