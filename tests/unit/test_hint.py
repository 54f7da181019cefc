"""The hint's builder and parser."""

from typing import Any

import pytest

from kvantile_optimizer import hint
from kvantile_optimizer.hint import Hint


def test_what_is_built_is_what_is_parsed() -> None:
    said = Hint(reserve_tokens=256, pooling=0.1, class_name="chat", ttft_budget_s=1.25)
    assert hint.parse(hint.build(said)) == said


@pytest.mark.parametrize("value", [-1, 1.5, "256", True, None, float("nan"), float("inf"), 10**400, [1], {}])
def test_a_reservation_that_makes_no_sense_is_as_if_absent(value: Any) -> None:
    assert hint.parse({hint.RESERVE_TOKENS: value}).reserve_tokens is None


@pytest.mark.parametrize("xargs", [None, "text", 3, [], {"other": 1}])
def test_anything_else_reads_as_no_hint(xargs: object) -> None:
    assert hint.parse(xargs) == Hint()


def test_only_our_keys_are_taken_out() -> None:
    assert hint.without_client_hints({"kv_reserve_tokens": 1, "kv_mine": 2, "other": 3}) == {"other": 3}
