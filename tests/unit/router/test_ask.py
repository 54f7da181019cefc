"""Reading a request: what is refused, how long it is, and what its prefix is."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvantile_router.ask import CHAT, COMPLETIONS, Ask, parse
from kvantile_router.errors import BadRequestError

SYSTEM = {"role": "system", "content": "be brief"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chat(*messages: dict[str, Any], tenant: str = "", **given: Any) -> Ask:
    body = {"model": "m", "messages": list(messages) or [user("hi")]} | given
    return parse(CHAT, {"x-kvantile-tenant": tenant}, json.dumps(body).encode())


def completion(prompt: object, **given: Any) -> Ask:
    return parse(COMPLETIONS, {}, json.dumps({"model": "m", "prompt": prompt} | given).encode())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000])
def test_numbers_that_json_does_not_have_are_refused(number: str) -> None:
    with pytest.raises(BadRequestError):
        parse(CHAT, {}, b'{"model": "m", "x": ' + number.encode() + b"}")


@given(st.binary())
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    with pytest.raises(BadRequestError):
        parse(CHAT, {}, raw)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_messages_of_any_shape_are_read_or_refused(messages: object) -> None:
    with suppress(BadRequestError):
        assert parse(CHAT, {}, json.dumps({"model": "m", "messages": messages}).encode()).body["messages"] == messages


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"tools": {}}, "tools"),
        ({"vllm_xargs": []}, "vllm_xargs"),
        ({"stream_options": "x"}, "stream_options"),
        ({"temperature": "hot"}, "temperature"),
        ({"model": 3}, "model"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ],
)
def test_the_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        chat(**body)
    assert caught.value.param == param


def test_max_completion_tokens_wins_and_null_is_as_if_absent() -> None:
    assert chat(max_tokens=9, max_completion_tokens=5).max_tokens == 5
    assert chat(max_tokens=9, max_completion_tokens=None).max_tokens == 9
    assert chat().max_tokens is None


def test_all_forms_of_a_prompt_are_measured() -> None:
    assert completion("four").prompt_characters == 4
    assert completion(["ab", "c"], n=2).sequences == 4
    assert completion([1, 2, 3]).prompt_token_ids == 3
    assert completion([[1, 2], [3]]).prompt_token_ids == 3
    parts = [{"type": "text", "text": "abc"}, {"type": "image_url", "image_url": {}}]
    assert chat(SYSTEM, {"role": "user", "content": parts}).prompt_characters == len("be brief") + 3


def test_the_prefix_ends_before_the_last_user_message() -> None:
    assert chat(SYSTEM, user("one")).prefix == chat(SYSTEM, user("two")).prefix
    assert chat(SYSTEM, user("one")).prefix != chat(user("be brief"), user("one")).prefix
    assert chat(user("one")).prefix is None


def test_tenants_and_salts_do_not_share_a_prefix() -> None:
    keys = {
        chat(SYSTEM, user("x"), tenant=tenant, cache_salt=salt).prefix for tenant in ("", "a") for salt in ("", "b")
    }
    assert len(keys) == 4


def test_a_lone_surrogate_is_text_like_any_other() -> None:
    assert chat({"role": "system", "content": "\ud800"}, user("\udfff")).prefix is not None
