"""The reservation hint: how the gateway tells the engine what to set aside for a request.

It travels in the request body as `vllm_xargs`, the only per-request carrier that vLLM passes on to its scheduler
(there as `sampling_params.extra_args`). Builder and parser stand side by side; the parser takes whatever a client may
have written, so a hint that makes no sense reads as no hint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvantile_optimizer.admission import HELD, NONE, PER_MILLE, POOLED

CARRIER = "vllm_xargs"
PREFIX = "kv_"
RESERVE_TOKENS, POOLING, CLASS, TTFT_BUDGET = "kv_reserve_tokens", "kv_pooling", "kv_class", "kv_ttft_budget"
FOREIGN = frozenset(("kv_transfer_params",))
"""Keys of vLLM's own, which it puts beside ours before its scheduler sees them."""
LONGEST_RESERVE = 10_000_000


@dataclass(frozen=True, slots=True)
class Hint:
    """What is to be set aside for one sequence.

    `pooling` is phi: absent (None) means held, the whole reservation; `reserve_tokens` None means nothing is reserved.
    `ttft_budget_s` are the seconds left to the target for the first token at dispatch; None means no order is asked.
    """

    reserve_tokens: int | None = None
    pooling: float | None = None
    class_name: str | None = None
    ttft_budget_s: float | None = None

    @property
    def form(self) -> int:
        """The form of `admission` that it asks for."""
        if self.reserve_tokens is None:
            return NONE
        return HELD if self.pooling is None else POOLED

    @property
    def pooling_per_mille(self) -> int:
        """phi in thousandths."""
        return PER_MILLE if self.pooling is None else round(self.pooling * PER_MILLE)

    def or_else(self, other: Hint) -> Hint:
        """The hint, with what `other` says where this one says nothing; form and size belong together."""
        mine = self if self.reserve_tokens is not None else other
        budget_s = self.ttft_budget_s if self.ttft_budget_s is not None else other.ttft_budget_s
        return Hint(mine.reserve_tokens, mine.pooling, self.class_name, budget_s)


def build(hint: Hint) -> dict[str, Any]:
    """The hint's keys for `vllm_xargs`; absent values have no key."""
    pairs = (
        (RESERVE_TOKENS, hint.reserve_tokens),
        (POOLING, hint.pooling),
        (CLASS, hint.class_name),
        (TTFT_BUDGET, hint.ttft_budget_s),
    )
    return {key: value for key, value in pairs if value is not None}


def parse(xargs: object) -> Hint:
    """The hint in `vllm_xargs`. Never raises: a value that makes no sense is as if absent."""
    if not isinstance(xargs, dict):
        return Hint()
    reserve, pooling, budget = (_finite(xargs.get(key)) for key in (RESERVE_TOKENS, POOLING, TTFT_BUDGET))
    whole = reserve is not None and reserve.is_integer() and 0 <= reserve <= LONGEST_RESERVE
    name = xargs.get(CLASS)
    return Hint(
        reserve_tokens=int(reserve) if reserve is not None and whole else None,
        pooling=pooling if pooling is not None and 0 <= pooling <= 1 else None,
        class_name=name if isinstance(name, str) else None,
        ttft_budget_s=budget,
    )


def broken(xargs: object, understood: Hint) -> int:
    """How many `kv_*` keys of `xargs` made no sense: those that are not in what was understood of it."""
    if not isinstance(xargs, dict):
        return int(xargs is not None)
    known = build(understood).keys() | FOREIGN
    return sum(str(key).startswith(PREFIX) and key not in known for key in xargs)


def without_client_hints(xargs: dict[str, Any]) -> dict[str, Any]:
    """`vllm_xargs` less every `kv_*` key; other keys pass untouched."""
    return {key: value for key, value in xargs.items() if not key.startswith(PREFIX)}


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
