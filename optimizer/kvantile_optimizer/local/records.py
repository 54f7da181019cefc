"""A request of a replay, and what became of it. Times are engine seconds since the replay began."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Clock:
    """Engine seconds since it was made, `speed` to each second on the wall."""

    speed: float
    _began: float = field(default_factory=time.monotonic)

    def __call__(self) -> float:
        return (time.monotonic() - self._began) * self.speed


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent, and when."""

    index: int
    class_name: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Record:
    """What came back. Without a first token `first_s` is None; `error` is empty when the answer is whole."""

    request: Request
    sent_s: float
    first_s: float | None
    last_s: float | None
    tokens: int
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per further token; None for answers of fewer than two."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Time to the last token of a whole answer."""
        return None if self.last_s is None or self.error else self.last_s - self.sent_s
