"""Which class a request belongs to: the plan's rules in plan order, the first that matches, else the default class.

Any item of a class's `match` list is enough; within an item all keys must hold. `x-kvantile-class` decides before the
rules where the plan allows it and names a class that exists; otherwise it is as if absent. Prompt lengths are known
in characters only, so tokens are estimated, at a ratio that `CharactersPerToken` learns from the replicas' usage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvantile_optimizer.plan import PlanClass
from kvantile_optimizer.spec import IntegerRange, Match

CLASS_HEADER = "x-kvantile-class"


@dataclass(frozen=True, slots=True)
class Facts:
    """What rules are written about. `headers` have lower-case names; `max_tokens` is None when the client sets none."""

    path: str
    model: str
    headers: Mapping[str, str]
    prompt_tokens: int
    max_tokens: int | None
    tools: bool
    system: str


def classify(classes: Sequence[PlanClass], facts: Facts, *, header_allowed: bool) -> PlanClass:
    """The class of a request. `classes` are in plan order and exactly one of them is the default."""
    wanted = facts.headers.get(CLASS_HEADER) if header_allowed else None
    named = next((item for item in classes if item.name == wanted), None)
    if named is not None:
        return named
    for item in classes:
        if any(matches(match, facts) for match in item.match):
            return item
    return next(item for item in classes if item.default)


def matches(match: Match, facts: Facts) -> bool:
    """Whether every key that `match` has holds. A length the client did not give is in no range."""
    return (
        (match.paths is None or facts.path in match.paths)
        and (match.models is None or facts.model in match.models)
        and (match.tools is None or match.tools == facts.tools)
        and _within(match.max_tokens, facts.max_tokens)
        and _within(match.prompt_tokens, facts.prompt_tokens)
        and all(facts.headers.get(name.lower()) == value for name, value in (match.headers or {}).items())
        and (match.system_prefix is None or facts.system.startswith(match.system_prefix))
    )


def _within(bounds: IntegerRange | None, value: int | None) -> bool:
    if bounds is None:
        return True
    if value is None:
        return False
    return (bounds.gte is None or value >= bounds.gte) and (bounds.lte is None or value <= bounds.lte)


@dataclass(slots=True)
class CharactersPerToken:
    """The running estimate of how many characters make a token."""

    ratio: float = 4.0
    """English prose with today's vocabularies, until usage says otherwise."""
    weight: float = 0.02
    """Of one observation: fifty requests of another language move the estimate most of the way."""

    def tokens(self, characters: int) -> int:
        """Estimated tokens of so many characters, rounded up."""
        return math.ceil(characters / self.ratio)

    def observe(self, characters: int, tokens: int) -> None:
        """Learns from one prompt; short ones say more about the chat template than about the text, so they are left."""
        if tokens >= 32 and characters > 0:
            seen = min(16.0, max(0.5, characters / tokens))
            self.ratio += self.weight * (seen - self.ratio)
