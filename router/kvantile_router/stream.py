"""Reads along with a stream of server-sent events without holding it up.

Whole events pass as the bytes they came in; only the part of an event that is still incomplete waits for its rest,
which no client could use anyway. JSON is parsed for three rare kinds of events: the usage at the end (taken out when
the client did not ask for it), an error (after which nothing more may pass, `[DONE]` least of all) and a finish by
length. They are found by their quoted key, which text inside a JSON string cannot contain.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_EVENT_END = re.compile(rb"\r?\n\r?\n")
_USAGE, _ERROR, _LENGTH, _DATA, _DONE = b'"usage"', b'"error"', b'"length"', b"data:", b"[DONE]"


@dataclass(slots=True)
class Outcome:
    """What is known of an answer: tokens by usage (None until it comes), events with data, and how it ended."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    events: int = 0
    cut_by_length: bool = False
    failed: bool = False

    @property
    def seen_tokens(self) -> int:
        """Output tokens, by the number of events where usage never came: engines send about one per token."""
        return self.output_tokens if self.output_tokens is not None else self.events


class EventReader:
    """Takes chunks as they arrive and gives back what may pass on. `strip_usage`: the client did not ask for it."""

    def __init__(self, outcome: Outcome, *, strip_usage: bool) -> None:
        self._outcome = outcome
        self._strip_usage = strip_usage
        self._rest = b""
        self.done = False

    @property
    def failed(self) -> bool:
        """Whether an error event has passed: nothing more may."""
        return self._outcome.failed

    def feed(self, chunk: bytes) -> bytes:
        """The bytes to pass on now; empty when there are none."""
        if self._rest:
            chunk, self._rest = self._rest + chunk, b""
        if not chunk.endswith((b"\n\n", b"\r\n\r\n")):
            chunk = self._whole_events(chunk)
        if _USAGE in chunk or _ERROR in chunk or _DONE in chunk:
            return b"".join(self._event(event) for event in _split(chunk))
        self._note(chunk)
        return chunk

    def flush(self) -> bytes:
        """What is left when the stream has ended without the end of an event."""
        rest, self._rest = self._rest, b""
        return self._event(rest) if rest else b""

    def _whole_events(self, chunk: bytes) -> bytes:
        end = max(chunk.rfind(b"\n\n") + 2, chunk.rfind(b"\n\r\n") + 3)
        if end < 3:
            self._rest = chunk
            return b""
        self._rest = chunk[end:]
        return chunk[:end]

    def _note(self, chunk: bytes) -> None:
        self._outcome.events += chunk.count(_DATA)
        if _LENGTH in chunk:
            self._outcome.cut_by_length = True

    def _event(self, event: bytes) -> bytes:
        """One event, empty when it may not pass."""
        if self._outcome.failed:
            return b""
        data = _data(event)
        if data is None:
            self.done = self.done or _DONE in event
            return event
        read_usage(data, self._outcome)
        if data.get("error"):
            self._outcome.failed = True
        elif data.get("usage") and not data.get("choices"):
            return b"" if self._strip_usage else event
        self._note(event)
        return event


def _split(chunk: bytes) -> list[bytes]:
    ends = [found.end() for found in _EVENT_END.finditer(chunk)]
    starts = [0, *ends]
    return [chunk[start:end] for start, end in zip(starts, [*ends, len(chunk)], strict=True) if end > start]


def _data(event: bytes) -> dict[str, Any] | None:
    """The JSON object of an event, None when there is none."""
    lines = [line[len(_DATA) :].strip() for line in event.splitlines() if line.startswith(_DATA)]
    try:
        data = json.loads(b"\n".join(lines))
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def read_usage(data: dict[str, Any], outcome: Outcome) -> None:
    """Takes the token counts out of a chunk or a whole answer, where there are any."""
    usage = data.get("usage")
    if isinstance(usage, dict):
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        outcome.prompt_tokens = prompt if isinstance(prompt, int) else outcome.prompt_tokens
        outcome.output_tokens = output if isinstance(output, int) else outcome.output_tokens


def read_answer(body: bytes, outcome: Outcome) -> None:
    """The same for an answer in one piece."""
    try:
        data = json.loads(body)
    except ValueError:
        return
    if isinstance(data, dict):
        read_usage(data, outcome)
        choices = data.get("choices") or []
        outcome.cut_by_length = any(
            isinstance(choice, dict) and choice.get("finish_reason") == "length" for choice in choices
        )
