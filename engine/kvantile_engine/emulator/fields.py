"""Fields of a body, read or refused with their names, and the check of those that have no effect here.

What steers sampling changes no time and no memory, so the emulator takes it and does nothing with it; a value that
vLLM would refuse is refused all the same, since a client should learn of it here and not in production.
"""

from __future__ import annotations

import json
import math
from typing import Any

INT64 = 2**63
NUMBERS = {
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "length_penalty": (-math.inf, math.inf),
}
ABOVE_ZERO = {"top_p": 1.0, "repetition_penalty": math.inf}
INTEGERS = {"seed": -INT64, "top_k": -1, "top_logprobs": -1, "prompt_logprobs": -1, "priority": -INT64}
BOOLEANS = ("echo", "include_stop_str_in_output", "skip_special_tokens", "parallel_tool_calls", "add_special_tokens")
TEXTS = ("user", "request_id")
LISTS: dict[str, type] = {"stop_token_ids": int, "allowed_token_ids": int, "bad_words": str, "tools": dict}
OBJECTS = ("logit_bias", "response_format", "structured_outputs", "kv_transfer_params")


class RequestError(Exception):
    """A request that is refused; `body` is OpenAI's error object."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def integer(body: dict[str, Any], key: str, at_least: int, at_most: int = 1_000_000_000) -> int | None:
    """An integer within bounds, None where there is none."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        raise RequestError(f"{key} must be an integer from {at_least} to {at_most} (found {shown(value)})", key)
    return value


def boolean(body: dict[str, Any], key: str) -> bool:
    """True or false; false where there is neither."""
    value = body.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RequestError(f"{key} must be true or false (found {shown(value)})", key)
    return value


def shown(value: object) -> str:
    """The beginning of a value, for a message."""
    try:
        return json.dumps(value)[:80]
    except RecursionError:
        return "something nested too deeply"


def check(body: dict[str, Any], *, chat: bool) -> None:
    """Refuses wrong values of fields that have no effect. Raises RequestError."""
    for key, (least, most) in NUMBERS.items():
        value = _number(body, key)
        if value is not None and not least <= value <= most:
            raise _outside(body, key, least, most)
    for key, most in ABOVE_ZERO.items():
        value = _number(body, key)
        if value is not None and not 0 < value <= most:
            raise _outside(body, key, 0, most)
    for key, least_integer in INTEGERS.items():
        integer(body, key, least_integer, INT64 - 1)
    for key in BOOLEANS:
        boolean(body, key)
    for key in TEXTS:
        _typed(body, key, str, "a string")
    for key, kind in LISTS.items():
        _typed(body, key, list, "a list")
        if not all(isinstance(item, kind) and not isinstance(item, bool) for item in body.get(key) or []):
            raise RequestError(f"{key} must be a list of {kind.__name__}", key)
    for key in OBJECTS:
        _typed(body, key, dict, "an object")
    if chat:
        boolean(body, "logprobs")
    else:
        integer(body, "logprobs", -1, INT64 - 1)
        if body.get("suffix") is not None:
            raise RequestError("suffix is not supported", "suffix")
    if body.get("temperature") == 0 and isinstance(copies := body.get("n"), int) and copies > 1:
        raise RequestError(f"n must be 1 when using greedy sampling, got {copies}.", "n")


def _number(body: dict[str, Any], key: str) -> float | None:
    """A number, None where there is none. Raises RequestError for anything else."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{key} must be a number (found {shown(value)})", key)
    return value


def _outside(body: dict[str, Any], key: str, least: float, most: float) -> RequestError:
    return RequestError(f"{key} must be within {least:g} and {most:g}, got {shown(body[key])}", key)


def _typed(body: dict[str, Any], key: str, kind: type, said: str) -> None:
    value = body.get(key)
    if value is not None and not isinstance(value, kind):
        raise RequestError(f"{key} must be {said} (found {shown(value)})", key)
