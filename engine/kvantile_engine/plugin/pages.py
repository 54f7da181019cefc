"""How a model's KV cache groups count: those that are alike together, each kind with what a request takes of it.

Most models have one group. Hybrid ones have several, which share one pool of blocks: those with full attention grow
with every token, those with a window or a state stop growing, and until then they grow like the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvantile_optimizer.admission import blocks_for


@dataclass(frozen=True, slots=True)
class Kind:
    """What groups that are alike have in common. Blocks are of one request in one group."""

    block_size: int
    most_prompt_blocks: int | None = None
    """While a prompt is computed; None where it grows without end."""
    most_answer_blocks: int | None = None
    """While an answer is."""

    @property
    def swing(self) -> int:
        """Blocks by which what a full window takes goes down and up again while it moves over the borders of blocks."""
        return 1 if self.most_answer_blocks is not None and self.most_answer_blocks > 1 else 0

    def lengths(self, prompt: int, generated: int, reserve: int) -> tuple[int, int]:
        """(prompt, reservation) in tokens of a request that starts here with so many of its answer, as far as it grows.

        Their sum is the most that it will take; the prompt is such that `generated` more is what it takes at first, so
        that the rule, which adds that, comes to the same.
        """
        if self.most_prompt_blocks is None or self.most_answer_blocks is None:
            return prompt, reserve
        first = min(prompt + generated, self.most_prompt_blocks * self.block_size)
        most = max(first, min(prompt + reserve, self.most_answer_blocks * self.block_size))
        return first - generated, most - first + generated


@dataclass(frozen=True, slots=True)
class Group:
    """All groups of a kind. Accounts are kept for one of them, `place` among the model's groups."""

    kind: Kind
    place: int
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Pages:
    """A model's groups by kind. `lead` is one that grows, whose blocks reservations are told in."""

    lead: Group
    others: tuple[Group, ...] = ()

    @property
    def blocks_per_row(self) -> int:
        """Blocks that a block's length of tokens takes in all groups that grow."""
        growing = [group for group in (self.lead, *self.others) if group.kind.most_prompt_blocks is None]
        size = self.lead.kind.block_size
        return sum(group.copies * blocks_for(size, group.kind.block_size) for group in growing)


def pages_of(kinds: Iterable[Kind]) -> Pages | None:
    """The groups of a model, one by one; None where none of them grows with the answer."""
    listed = list(kinds)
    groups = [Group(kind, listed.index(kind), copies) for kind, copies in Counter(listed).items()]
    lead = next((group for group in groups if group.kind.most_prompt_blocks is None), None)
    return Pages(lead, tuple(group for group in groups if group is not lead)) if lead else None
