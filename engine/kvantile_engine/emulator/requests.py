"""What clients send: the body of a completion or chat completion, read into a frozen request or refused.

Unknown fields pass, as with vLLM; wrong values are 400 with the field's name. Beyond OpenAI's fields `vllm_xargs`
carries the reservation hint, of which broken parts are counted and otherwise ignored, and for replays (nothing but
this emulator knows them) `emulator_prompt_tokens`, `emulator_output_tokens`, and `emulator_prefix_tokens` together
with `emulator_prefix_id`: a prompt of so many tokens, an answer of so many, a prefix shared with whoever names it too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain
from typing import Any, NoReturn

from kvantile_engine.emulator import fields, text
from kvantile_engine.emulator.fields import RequestError, boolean, integer
from kvantile_engine.emulator.settings import Settings
from kvantile_engine.emulator.stopping import Stop, Stops
from kvantile_optimizer import hint as hints
from kvantile_optimizer.hint import Hint

MOST_SEQUENCES = 1024
"""Sequences of one request; far above what anybody asks for, far below what hurts."""
DEFAULT_MOST_TOKENS = 16
"""Of a completion that says nothing, as in OpenAI's API; a chat may go on to the end."""


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One sequence of a request. `output` is its length after every limit; `cut` says that `limit` ended it."""

    prompt: int
    output: int
    limit: int
    cut: bool
    hashes: tuple[int, ...]
    words_key: int
    stop: Stop | None = None
    """The stop string that ends it, if one does."""
    echo: str = ""
    """What stands before the answer."""


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
    continuous_usage: bool
    """Whether each chunk has the usage so far."""
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
    fields.check(body, chat=chat)
    copies = integer(body, "n", 1, at_most=MOST_SEQUENCES) or 1
    if copies * len(prompts) > MOST_SEQUENCES:
        raise RequestError(f"at most {MOST_SEQUENCES} sequences in a request", "n")
    stream = boolean(body, "stream")
    include_usage, continuous_usage = _usage_options(body, stream=stream)
    hint = hints.parse(xargs)
    sequences = (_sequences(body, extra, prompt, copies, chat, settings) for prompt in prompts)
    return CompletionRequest(
        chat=chat,
        model=settings.public_name,
        sequences=tuple(chain.from_iterable(sequences)),
        per_prompt=copies,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        hint=hint,
        broken_hints=hints.broken(xargs, hint),
    )


def _usage_options(body: dict[str, Any], *, stream: bool) -> tuple[bool, bool]:
    """Whether the usage follows the last chunk, and whether each chunk has it too."""
    options = body.get("stream_options")
    if options is None:
        return False, False
    if not isinstance(options, dict):
        raise RequestError("stream_options must be an object", "stream_options")
    if not stream:
        raise RequestError("Stream options can only be defined when `stream=True`.", "stream_options")
    include = boolean(options, "include_usage")
    return include, boolean(options, "continuous_usage_stats") and include


def tokenized(raw: bytes, settings: Settings) -> str:
    """The prompt of a body of /tokenize. Raises RequestError."""
    body = _json_object(raw)
    _check_model(body, settings)
    if "messages" in body:
        return _chat_prompt(body)
    if not isinstance(prompt := body.get("prompt"), str):
        raise RequestError("prompt must be a string", "prompt")
    return prompt


def detokenized(raw: bytes, settings: Settings) -> list[int]:
    """The ids of a body of /detokenize. Raises RequestError."""
    body = _json_object(raw)
    _check_model(body, settings)
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not _is_ids(tokens) or max(tokens, default=0) >= fields.INT64:
        raise RequestError("tokens must be a list of ids from 0 to 9223372036854775807", "tokens")
    return tokens


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


def _sequences(
    body: dict[str, Any], extra: dict[str, Any], prompt: Prompt, copies: int, chat: bool, settings: Settings
) -> Iterator[SequencePlan]:
    """The answers to one prompt, which is looked at once for all of them."""
    given = integer(extra, "emulator_prompt_tokens", 1)
    tokens = text.token_count(prompt) if given is None else given
    room = _room(tokens, settings)
    most = _most_tokens(body, extra, chat=chat)
    limit = room if most is None else min(room, most)
    least = integer(body, "min_tokens", 0) or 0
    if most is not None and least > most:
        raise RequestError(f"min_tokens must be less than or equal to max_tokens={most}, got {least}.", "min_tokens")
    stops, hashes = Stops.read(body), _hashes(extra, prompt, tokens, settings)
    echo = text.shown(prompt) if boolean(body, "echo") and not chat else ""
    for index, wanted in enumerate(_wanted_tokens(body, extra, prompt, copies, settings)):
        key, output = tokens + 7 * index, min(max(least, wanted), limit)
        stop = stops.first(key, output, least)
        yield SequencePlan(
            prompt=tokens,
            output=stop.tokens if stop else output,
            limit=limit,
            cut=wanted > limit and not stop,
            hashes=hashes,
            words_key=key,
            stop=stop,
            echo=echo,
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


def _most_tokens(body: dict[str, Any], extra: dict[str, Any], *, chat: bool) -> int | None:
    newer, older = integer(body, "max_completion_tokens", 1), integer(body, "max_tokens", 1)
    usual = None if chat or boolean(body, "ignore_eos") or "emulator_output_tokens" in extra else DEFAULT_MOST_TOKENS
    return newer or older or usual


def _wanted_tokens(
    body: dict[str, Any], extra: dict[str, Any], prompt: Prompt, copies: int, settings: Settings
) -> list[int]:
    """How long the answers would get without limits."""
    if boolean(body, "ignore_eos"):
        return [settings.max_model_len + 1] * copies
    given = integer(extra, "emulator_output_tokens", 1)
    return text.answer_tokens(settings.seed, prompt, copies) if given is None else [given] * copies


def _hashes(extra: dict[str, Any], prompt: Prompt, tokens: int, settings: Settings) -> tuple[int, ...]:
    if not settings.enable_prefix_caching:
        return ()
    name, length = extra.get("emulator_prefix_id"), integer(extra, "emulator_prefix_tokens", 0)
    if name is not None and length is not None:
        return text.named_hashes(str(name), settings.block_size, min(length, tokens))
    return text.block_hashes(prompt, settings.block_size, tokens)
