"""What is set aside, what it counts for, and what the engine is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvantile_optimizer.hint import Hint
from kvantile_optimizer.plan import Route
from kvantile_router.ask import CHAT, Ask, parse
from kvantile_router.reserve import Size, can_hold, counted_tokens, hint_for, outgoing_body, reserve_tokens
from tests.support.plans import make_group, make_plan, make_route


def route(**given: Any) -> Route:
    return make_plan(routes=[make_route(**given)]).routes[0]


def ask(**given: Any) -> Ask:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | given
    return parse(CHAT, {}, json.dumps(body).encode() + b"\n")


@pytest.mark.parametrize(("form", "counted"), [("none", 50), ("held", 50 + 3 * 100), ("pooled", 50 + 3 * 25)])
def test_load_counts_what_the_form_sets_aside(form: str, counted: int) -> None:
    planned = route(form=form, reserveTokens=100, poolingFraction=0.25)
    assert counted_tokens(planned, Size(50, sequences=3)) == counted


def test_the_reservation_is_cut_to_max_tokens() -> None:
    planned = route(form="held", reserveTokens=100)
    assert [reserve_tokens(planned, most) for most in (None, 30, 300)] == [100, 30, 100]
    assert hint_for(planned, 30, 1.0).reserve_tokens == 30


def test_only_pooled_says_a_fraction_and_only_deadlines_a_budget() -> None:
    assert hint_for(route(form="pooled", order="slack"), None, 0.5) == Hint(100, 0.1, "chat", 0.5)
    assert hint_for(route(form="held", order="deadline"), None, -0.5) == Hint(100, None, "chat", -0.5)
    assert hint_for(route(form="held", order="fcfs"), None, 0.5) == Hint(100, None, "chat", None)
    assert hint_for(route(form="none", order="fcfs"), None, 0.5) == Hint(None, None, "chat", None)


def test_what_a_group_can_hold_is_bounded_by_memory_and_by_length() -> None:
    group = make_plan(groups=[make_group(kvTokens=1000, maxModelLen=800)]).groups[0]
    assert can_hold(group, 4096, Size(700, max_tokens=100))
    assert not can_hold(group, 4096, Size(700, max_tokens=101))
    assert can_hold(group, 4096, Size(800))
    assert not can_hold(group, 4096, Size(801))


@pytest.mark.parametrize("allowed", [True, False])
def test_only_our_keys_of_the_client_are_dropped(allowed: bool) -> None:
    sent = ask(vllm_xargs={"kv_reserve_tokens": 5, "mine": [1]})
    body = json.loads(outgoing_body(sent, Hint(100, class_name="chat"), client_hints_allowed=allowed))
    assert body["vllm_xargs"] == {"kv_reserve_tokens": 5 if allowed else 100, "kv_class": "chat", "mine": [1]}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text().map("x{}".format), json_values), st.booleans())
def test_everything_else_reaches_the_engine_as_it_came(extra: dict[str, Any], streams: bool) -> None:
    sent = ask(stream=streams, **extra)
    body = json.loads(outgoing_body(sent, Hint(10), client_hints_allowed=False))
    assert body.pop("vllm_xargs") == {"kv_reserve_tokens": 10}
    assert body.pop("stream_options", None) == ({"include_usage": True} if streams else None)
    assert body == sent.body
