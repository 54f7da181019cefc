"""A client's request, parsed once and checked: what is asked, how long it is, and what its prefix is.

Only what the gateway decides by is looked at; everything else passes to the replica as it came. JSON is read strictly
(no NaN, no Infinity, nothing that overflows to it), because replicas would answer those with 500. The prefix key ends
before the last user message: what comes before is what other requests may share and a replica may still hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import xxhash

from kvantile_router.errors import BadRequestError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PLANNED_PATHS = (CHAT, COMPLETIONS)
"""Surfaces whose output the plan reserves for; all others are passed on by their input alone."""
TENANT_HEADER = "x-kvantile-tenant"
LEADING_CHARACTERS = 512
"""How much of a bare prompt makes its prefix key: eight blocks of 16 tokens, about a short system prompt."""
LARGEST_COUNT = 10_000_000
DEEPEST = "the nesting is too deep"

Headers = Mapping[str, str]
"""Names in lower case; of a repeated header the last value."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One inference request.

    `prompt_characters` are yet to become tokens, `prompt_token_ids` are tokens already. `sequences` answers are wanted,
    each of at most `max_tokens` (None: as long as the model allows). `prefix` is None when nothing can be shared.
    """

    path: str
    headers: Headers
    raw: bytes
    body: dict[str, Any]
    model: str
    max_tokens: int | None = None
    sequences: int = 1
    prompts: int = 1
    prompt_characters: int = 0
    prompt_token_ids: int = 0
    tools: bool = False
    system: str = ""
    prefix: bytes | None = None

    @property
    def is_planned(self) -> bool:
        """Whether its output is reserved for."""
        return self.path in PLANNED_PATHS

    @property
    def streams(self) -> bool:
        """Whether the client wants the answer as it comes."""
        return self.body.get("stream") is True

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for the usage chunk at the end of its stream."""
        options = self.body.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True


def parse(path: str, headers: Headers, raw: bytes) -> Ask:
    """Reads a POST to `path`. Raises BadRequestError, which names the field."""
    body = _object(raw)
    model = _typed(body, "model", str, "a string")
    if not model:
        raise BadRequestError("model: required, the name of a served model", param="model")
    if path == CHAT:
        return _chat(path, headers, raw, body, model)
    if path == COMPLETIONS:
        return _completion(path, headers, raw, body, model)
    return Ask(path, headers, raw, body, model, prompt_characters=len(raw))


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw.decode(), parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise BadRequestError(f"the body is not JSON that can be read: {DEEPEST}") from None
    except ValueError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError(f"the body: expected a JSON object, found {_kind(body)}")
    return body


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _chat(path: str, headers: Headers, raw: bytes, body: dict[str, Any], model: str) -> Ask:
    messages = _messages(body)
    tools = _typed(body, "tools", list, "an array") or []
    system = next((_text(item.get("content")) for item in messages if item.get("role") in ("system", "developer")), "")
    return Ask(
        path,
        headers,
        raw,
        body,
        model,
        max_tokens=_max_tokens(body, ("max_completion_tokens", "max_tokens")),
        sequences=_common_fields(body),
        prompt_characters=sum(_length(item) for item in messages) + (len(json.dumps(tools)) if tools else 0),
        tools=bool(tools),
        system=system,
        prefix=_chat_prefix(messages, _scope(headers, body, model)),
    )


def _completion(path: str, headers: Headers, raw: bytes, body: dict[str, Any], model: str) -> Ask:
    prompts = _prompts(body.get("prompt"))
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    leading = prompts[0][:LEADING_CHARACTERS]
    key = _scope(headers, body, model)
    text = leading if isinstance(leading, str) else json.dumps(leading)
    key.update(text.encode(errors="surrogatepass"))
    return Ask(
        path,
        headers,
        raw,
        body,
        model,
        max_tokens=_max_tokens(body, ("max_tokens",)),
        sequences=_common_fields(body) * len(prompts),
        prompts=len(prompts),
        prompt_characters=sum(map(len, texts)),
        prompt_token_ids=sum(len(prompt) for prompt in prompts if not isinstance(prompt, str)),
        prefix=key.digest() if leading else None,
    )


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] | None = _typed(body, "messages", list, "an array")
    if not messages:
        raise BadRequestError("messages: required, an array of at least one message", param="messages")
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if not isinstance(message, dict):
            raise BadRequestError(f"{at}: expected an object, found {_kind(message)}", param=at)
        if not isinstance(message.get("role"), str):
            raise BadRequestError(f"{at}.role: required, a string", param=f"{at}.role")
        _check_content(message.get("content"), f"{at}.content")
    return messages


def _check_content(content: object, at: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise BadRequestError(f"{at}: expected a string or an array of parts, found {_kind(content)}", param=at)
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise BadRequestError(f"{at}[{index}]: expected an object, found {_kind(part)}", param=f"{at}[{index}]")


def _prompts(prompt: object) -> list[str] | list[list[int]]:
    """The prompts as a list: the API takes one string, several, one list of token ids, or several."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if all(type(item) is int for item in prompt):
            return [prompt]
        if all(isinstance(item, list) and item and all(type(token) is int for token in item) for item in prompt):
            return prompt
    raise BadRequestError("prompt: required, a string, an array of strings, or token ids", param="prompt")


def _max_tokens(body: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of `names` that is given, after all of them were checked."""
    given = [count for name in names if (count := _count(body, name)) is not None]
    return given[0] if given else None


def _count(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= LARGEST_COUNT:
        shown = value if type(value) in (int, float) else _kind(value)
        raise BadRequestError(f"{name}: expected a whole number from 1 to {LARGEST_COUNT}, found {shown}", param=name)
    return value


def _common_fields(body: dict[str, Any]) -> int:
    """Checks what chat and completions share; gives `n`."""
    _typed(body, "stream", bool, "true or false")
    _typed(body, "stream_options", dict, "an object")
    _typed(body, "vllm_xargs", dict, "an object")
    _typed(body, "cache_salt", str, "a string")
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
        _typed(body, name, (int, float), "a number")
    return _count(body, "n") or 1


def _typed(body: dict[str, Any], name: str, kind: type | tuple[type, ...], expected: str) -> Any:  # noqa: ANN401 - JSON
    """The value of `name`, None when it is absent or null."""
    value = body.get(name)
    wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
    if value is not None and wrong:
        raise BadRequestError(f"{name}: expected {expected}, found {_kind(value)}", param=name)
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _text(content: object) -> str:
    """The text of a message's content, its parts joined."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def _length(message: dict[str, Any]) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) else len(_text(content))


def _scope(headers: Headers, body: dict[str, Any], model: str) -> xxhash.xxh3_64:
    """A hash of who may share prefixes: model, tenant and cache salt, each ended so that none runs into the next."""
    key = xxhash.xxh3_64()
    for part in (model, headers.get(TENANT_HEADER, ""), body.get("cache_salt") or ""):
        key.update(part.encode(errors="surrogatepass") + b"\0")
    return key


def _chat_prefix(messages: list[dict[str, Any]], key: xxhash.xxh3_64) -> bytes | None:
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    leading = messages[: users[-1]] if users else messages[:-1]
    if not leading:
        return None
    for message in leading:
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content)
        key.update(f"{message['role']}\0{text}\0".encode(errors="surrogatepass"))
    return key.digest()
