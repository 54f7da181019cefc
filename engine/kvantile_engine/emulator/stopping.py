"""Where a stop string ends an answer: known before it begins, since all its words are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvantile_engine.emulator import text
from kvantile_engine.emulator.fields import RequestError, boolean

MOST_STOPS, LONGEST_STOP = 64, 1_000
"""Stop strings of a request and characters of each: far above what anybody asks for, far below what hurts."""


@dataclass(frozen=True, slots=True)
class Stop:
    """An answer that ends with its token number `tokens`, of which `characters` in all are sent."""

    tokens: int
    characters: int
    string: str


@dataclass(frozen=True, slots=True)
class Stops:
    """The stop strings of a request; `kept` says that the one that matched stays in the answer."""

    strings: tuple[str, ...]
    kept: bool

    @classmethod
    def read(cls, body: dict[str, Any]) -> Stops:
        """Reads `stop`, a string or a list of them. Raises RequestError."""
        stop = body.get("stop")
        strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
        if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
            raise RequestError("stop must be a string or a list of strings", "stop")
        if not all(strings):
            raise RequestError("stop cannot contain an empty string.", "stop")
        if len(strings) > MOST_STOPS or any(len(string) > LONGEST_STOP for string in strings):
            raise RequestError(f"stop: at most {MOST_STOPS} strings of {LONGEST_STOP} characters", "stop")
        return cls(tuple(strings), boolean(body, "include_stop_str_in_output"))

    def first(self, key: int, tokens: int, least: int) -> Stop | None:
        """The stop in the first `tokens` words of the answer `key` that is complete first, after at least `least`."""
        if not self.strings:
            return None
        # Words repeat: what is not found within two rounds and the length of a stop string is never found.
        reach = max(map(len, self.strings))
        begin = max(0, least - reach)
        end = min(tokens, least + 2 * len(text.WORDS) + reach)
        before = text.length(key, begin)
        window = text.words(key, begin, end)
        soonest = text.length(key, least) - before
        found = [
            (place + len(string), place, string)
            for string in self.strings
            if (place := window.find(string, max(0, soonest - len(string) + 1))) >= 0
        ]
        if not found:
            return None
        stop, place, string = min(found)
        # Each word but the very first begins with its space.
        count = begin + window.count(" ", 0, stop) + (begin == 0)
        return Stop(count, before + (stop if self.kept else place), string)
