"""The plan's rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvantile_optimizer.plan import PlanClass
from kvantile_optimizer.spec import Match
from kvantile_router.classify import CharactersPerToken, Facts, classify, matches
from tests.support.plans import make_class, make_plan


def facts(**given: Any) -> Facts:
    usual: dict[str, Any] = {"path": "/v1/chat/completions", "model": "m", "headers": {}, "prompt_tokens": 100}
    usual |= {"max_tokens": None}
    return Facts(**(usual | {"tools": False, "system": ""} | given))


def classes(**rules: list[dict[str, Any]]) -> list[PlanClass]:
    named = [make_class(name, match=match) for name, match in rules.items()]
    return make_plan(classes=[*named, make_class("rest")], routes=[]).classes


@pytest.mark.parametrize(
    ("rule", "fitting", "other"),
    [
        ({"paths": ["/v1/completions"]}, {"path": "/v1/completions"}, {}),
        ({"models": ["a", "b"]}, {"model": "b"}, {"model": "c"}),
        ({"headers": {"X-Team": "red"}}, {"headers": {"x-team": "red"}}, {"headers": {"x-team": "blue"}}),
        ({"promptTokens": {"gte": 50, "lte": 60}}, {"prompt_tokens": 60}, {"prompt_tokens": 61}),
        ({"maxTokens": {"lte": 256}}, {"max_tokens": 256}, {"max_tokens": None}),
        ({"tools": True}, {"tools": True}, {}),
        ({"tools": False}, {}, {"tools": True}),
        ({"systemPrefix": "You are"}, {"system": "You are a bot"}, {"system": "you are"}),
    ],
)
def test_each_key_decides(rule: dict[str, Any], fitting: dict[str, Any], other: dict[str, Any]) -> None:
    match = Match.model_validate(rule)
    assert matches(match, facts(**fitting))
    assert not matches(match, facts(**other))


def test_all_keys_of_an_item_must_hold_and_any_item_is_enough() -> None:
    found = classes(a=[{"tools": True, "maxTokens": {"lte": 5}}, {"models": ["big"]}])
    assert classify(found, facts(tools=True), header_allowed=False).name == "rest"
    assert classify(found, facts(tools=True, max_tokens=5), header_allowed=False).name == "a"
    assert classify(found, facts(model="big"), header_allowed=False).name == "a"


def test_the_first_class_in_plan_order_wins() -> None:
    found = classes(first=[{"tools": False}], second=[{"tools": False}])
    assert classify(found, facts(), header_allowed=False).name == "first"


def test_the_class_header_counts_only_where_it_is_allowed_and_names_a_class() -> None:
    found = classes(a=[{"tools": True}])
    assert classify(found, facts(headers={"x-kvantile-class": "a"}), header_allowed=True).name == "a"
    assert classify(found, facts(headers={"x-kvantile-class": "a"}), header_allowed=False).name == "rest"
    assert classify(found, facts(headers={"x-kvantile-class": "none"}), header_allowed=True).name == "rest"


@given(st.floats(1.0, 8.0))
def test_the_length_estimate_learns_the_language(ratio: float) -> None:
    estimate = CharactersPerToken()
    for _ in range(300):
        estimate.observe(int(1000 * ratio), 1000)
    assert estimate.tokens(10_000) == pytest.approx(10_000 / ratio, rel=0.02)
