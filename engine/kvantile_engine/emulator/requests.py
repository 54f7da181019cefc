"""What clients send: the body of a completion or chat completion, read into a frozen request or refused.

Unknown fields pass, as with vLLM; wrong values are 400 with the field's name. Beyond OpenAI's fields `vllm_xargs`
carries the reservation hint, of which broken parts are counted and otherwise ignored, and for replays (nothing but
this emulator knows them) `emulator_prompt_tokens`, `emulator_output_tokens`, and `emulator_prefix_tokens` together
with `emulator_prefix_id`: a prompt of so many tokens, an answer of so many, a prefix shared with whoever names it too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn

from kvantile_engine.emulator import text
from kvantile_engine.emulator.settings import Settings
from kvantile_optimizer import hint as hints
from kvantile_optimizer.hint import Hint

MOST_SEQUENCES = 1024
"""Sequences of one request; far above what anybody asks for, far below what hurts."""


class RequestError(Exception):
    """A request that is refused; `body` is OpenAI's error object."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One sequence of a request. `output` is its length after every limit; `cut` says that `limit` ended it."""

    prompt: int
    output: int
    limit: int
    cut: bool
    hashes: tuple[int, ...]
    words_key: int


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request that can be served. `broken_hints` counts `kv_*` keys that made no sense."""

    chat: bool
    model: str
    sequences: tuple[SequencePlan, ...]
    per_prompt: int
    """Sequences for each prompt (`n`)."""
    stream: bool
    include_usage: bool
    hint: Hint
    broken_hints: int


Prompt = str | list[int]


def parse(raw: bytes, *, chat: bool, settings: Settings) -> CompletionRequest:
    """Reads a body. Raises RequestError."""
    body = _json_object(raw)
    _check_model(body, settings)
    prompts = [_chat_prompt(body)] if chat else _prompts(body)
    xargs = body.get(hints.CARRIER)
    extra = xargs if isinstance(xargs, dict) else {}
    copies = _integer(body, "n", 1, at_most=MOST_SEQUENCES) or 1
    if copies * len(prompts) > MOST_SEQUENCES:
        raise RequestError(f"at most {MOST_SEQUENCES} sequences in a request", "n")
    sequences = tuple(_sequence(body, extra, prompt, i, settings) for prompt in prompts for i in range(copies))
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestError("stream_options must be an object", "stream_options")
    hint = hints.parse(xargs)
    return CompletionRequest(
        chat=chat,
        model=settings.public_name,
        sequences=sequences,
        per_prompt=copies,
        stream=_boolean(body, "stream"),
        include_usage=_boolean(options, "include_usage"),
        hint=hint,
        broken_hints=hints.broken(xargs, hint),
    )


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw, parse_constant=_refuse_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _refuse_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse_number(digits)


def _check_model(body: dict[str, Any], settings: Settings) -> None:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise RequestError("model must be a string", "model")
    if model and model != settings.public_name:
        raise RequestError(f"The model `{model}` does not exist.", "model", HTTPStatus.NOT_FOUND, "NotFoundError")


def _chat_prompt(body: dict[str, Any]) -> str:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    return "".join(_message_text(message, i) for i, message in enumerate(messages))


def _message_text(message: object, index: int) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError("each message must be an object with a role", f"messages.{index}.role")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    if content is not None and not isinstance(content, str):
        raise RequestError("content must be a string or a list of parts", f"messages.{index}.content")
    return f"{message['role']}\n{content or ''}\n"


def _prompts(body: dict[str, Any]) -> list[Prompt]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _is_ids(prompt):
            return [prompt]
        if all(isinstance(item, str) or (isinstance(item, list) and item and _is_ids(item)) for item in prompt):
            return prompt
    raise RequestError("prompt must be a string, token ids, or a list of these", "prompt")


def _is_ids(value: list[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value)


def _sequence(
    body: dict[str, Any], extra: dict[str, Any], prompt: Prompt, index: int, settings: Settings
) -> SequencePlan:
    given = _integer(extra, "emulator_prompt_tokens", 1)
    tokens = text.token_count(prompt) if given is None else given
    room = _room(tokens, settings)
    most = _most_tokens(body)
    limit = room if most is None else min(room, most)
    wanted = _wanted_tokens(body, extra, prompt, index, settings)
    return SequencePlan(
        prompt=tokens,
        output=min(wanted, limit),
        limit=limit,
        cut=wanted > limit,
        hashes=_hashes(extra, prompt, tokens, settings),
        words_key=tokens + 7 * index,
    )


def _room(prompt_tokens: int, settings: Settings) -> int:
    """Tokens that an answer may have at most; the last one is never stored, so the KV cache holds one more."""
    kv_tokens = settings.total_blocks * settings.block_size
    if prompt_tokens >= settings.max_model_len:
        raise RequestError(
            f"This model's maximum context length is {settings.max_model_len} tokens; the prompt has {prompt_tokens}."
        )
    if prompt_tokens > kv_tokens:
        raise RequestError(f"the prompt has {prompt_tokens} tokens, more than the KV cache holds, {kv_tokens}")
    return min(settings.max_model_len - prompt_tokens, kv_tokens - prompt_tokens + 1)


def _most_tokens(body: dict[str, Any]) -> int | None:
    newer = _integer(body, "max_completion_tokens", 1)
    return newer if newer is not None else _integer(body, "max_tokens", 1)


def _wanted_tokens(body: dict[str, Any], extra: dict[str, Any], prompt: Prompt, index: int, settings: Settings) -> int:
    """How long the answer would get without limits."""
    if _boolean(body, "ignore_eos"):
        return settings.max_model_len + 1
    given = _integer(extra, "emulator_output_tokens", 1)
    least = _integer(body, "min_tokens", 0) or 0
    return max(least, text.answer_tokens(settings.seed, prompt, index) if given is None else given)


def _hashes(extra: dict[str, Any], prompt: Prompt, tokens: int, settings: Settings) -> tuple[int, ...]:
    if not settings.enable_prefix_caching:
        return ()
    name, length = extra.get("emulator_prefix_id"), _integer(extra, "emulator_prefix_tokens", 0)
    if name is not None and length is not None:
        return text.named_hashes(str(name), settings.block_size, min(length, tokens))
    return text.block_hashes(prompt, settings.block_size, tokens)


def _integer(body: dict[str, Any], key: str, at_least: int, at_most: int = 1_000_000_000) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        raise RequestError(f"{key} must be an integer from {at_least} to {at_most} (found {_shown(value)})", key)
    return value


def _boolean(body: dict[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RequestError(f"{key} must be true or false (found {_shown(value)})", key)
    return value


def _shown(value: object, show: Callable[[object], str] = json.dumps) -> str:
    return show(value)[:80]
