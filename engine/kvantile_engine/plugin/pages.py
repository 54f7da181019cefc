"""How a model's KV cache groups count: in rows, one block of every group that grows with the answer.

Most models have one group, and a row is a block. Hybrid ones have several, which share one pool of blocks: those with
full attention grow with every token, those with a window or a state stop growing. What the latter take is known when a
request starts and taken off what is free; a reservation is about the former.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvantile_optimizer.admission import blocks_for


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group. `most_blocks` is what a request takes at most, None where it grows."""

    block_size: int
    most_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Pages:
    """The groups of a model, at least one of which grows."""

    groups: tuple[Group, ...]

    @property
    def lead(self) -> int:
        """The place of the group that rows are counted by."""
        return next(place for place, group in enumerate(self.groups) if group.most_blocks is None)

    @property
    def block_size(self) -> int:
        """Tokens of a row."""
        return self.groups[self.lead].block_size

    @property
    def blocks_per_row(self) -> int:
        """Blocks that a row of tokens takes in all groups that grow."""
        return sum(blocks_for(self.block_size, group.block_size) for group in self._growing)

    def rows(self, blocks: int) -> int:
        """Whole rows that so many blocks make."""
        return blocks // self.blocks_per_row

    def others(self, tokens: int) -> int:
        """Blocks that `tokens` take in groups that do not grow."""
        return sum(
            min(blocks_for(tokens, group.block_size), group.most_blocks)
            for group in self.groups
            if group.most_blocks is not None
        )

    @property
    def _growing(self) -> Sequence[Group]:
        return [group for group in self.groups if group.most_blocks is None]
