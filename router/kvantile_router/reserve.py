"""What is set aside for a request on a group, what that counts for, and how the engine is told.

The reservation is the route's, cut to `max_tokens`. A replica's load counts prompt and reservations of all sequences
where they are held, the pooled share of them where they are pooled, and the prompt alone where nothing is reserved.
The hint is for one sequence. It is spliced into the client's own bytes where that is possible: writing a long prompt
out again would cost more than all other decisions together.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from kvantile_optimizer import hint
from kvantile_optimizer.hint import Hint
from kvantile_optimizer.plan import Group, Route
from kvantile_router.ask import Ask


@dataclass(frozen=True, slots=True)
class Size:
    """What a request may take: prompt tokens in all, answers wanted, and the most tokens of each (None: not said)."""

    prompt_tokens: int
    sequences: int = 1
    max_tokens: int | None = None


def reserve_tokens(route: Route, max_tokens: int | None) -> int:
    """Tokens to reserve for one sequence."""
    if route.form == "none":
        return 0
    return route.reserve_tokens if max_tokens is None else min(route.reserve_tokens, max_tokens)


def counted_tokens(route: Route, size: Size) -> int:
    """Tokens that the request counts for on a replica, rounded up."""
    reserved = size.sequences * reserve_tokens(route, size.max_tokens)
    share = route.pooling_fraction if route.form == "pooled" else 1.0
    return size.prompt_tokens + math.ceil(share * reserved)


def longest_tokens(group: Group, model_len: int) -> int:
    """Prompt and answer that a replica of the group can hold at most."""
    return min(group.kv_tokens, group.max_model_len or model_len)


def can_hold(group: Group, model_len: int, size: Size) -> bool:
    """Whether a replica of the group could ever serve the request; without `max_tokens` only the prompt counts."""
    return size.prompt_tokens + (size.max_tokens or 0) <= longest_tokens(group, model_len)


def hint_for(route: Route, max_tokens: int | None, ttft_left_s: float) -> Hint:
    """The hint of one sequence. `ttft_left_s` is negative once the target has passed."""
    return Hint(
        reserve_tokens=None if route.form == "none" else reserve_tokens(route, max_tokens),
        pooling=route.pooling_fraction if route.form == "pooled" else None,
        class_name=route.class_,
        ttft_budget_s=None if route.order == "fcfs" else round(ttft_left_s, 6),
    )


def outgoing_body(ask: Ask, said: Hint, *, client_hints_allowed: bool) -> bytes:
    """The client's body with the hint, and with usage asked for where the answer streams."""
    sent = ask.body.get(hint.CARRIER) or {}
    kept = sent if client_hints_allowed else hint.without_client_hints(sent)
    added = {hint.CARRIER: {**hint.build(said), **kept}}
    if ask.streams and not ask.wants_usage:
        added["stream_options"] = {**(ask.body.get("stream_options") or {}), "include_usage": True}
    if added.keys() & ask.body.keys():
        return json.dumps({**ask.body, **added}, separators=(",", ":")).encode()
    return ask.raw.rstrip()[:-1] + b"," + json.dumps(added, separators=(",", ":")).encode()[1:]
