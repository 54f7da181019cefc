"""What the emulator does wrong on purpose, so that gateways and clients can be tested against it.

`--fail` takes `NAME=VALUE` with commas, in any combination: `slow-start=SECONDS` (engine seconds before the port
accepts anybody), `hang=SHARE` (requests that are taken and never answered), `cut=SHARE` (answers whose connection ends
half way), `5xx=SHARE` (requests refused with 500 or 503, half each) and `oom=TOKENS` (the process ends with exit code 1
once so many tokens are in the KV cache). A request has at most one of the middle three: 5xx before hang before cut.
Who is hit is drawn from the emulator's seed, so the same requests in the same order fail the same way.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Self

NAMES = {"slow-start": "slow_start_s", "hang": "hang", "cut": "cut", "5xx": "server_error", "oom": "oom_tokens"}
SHARES = ("hang", "cut", "5xx")
LONGEST_START_S = 86_400.0
"""A day: anything longer is a mistake in the unit."""
STATUSES = (500, 503)


class Fate(Enum):
    """What becomes of a request."""

    SERVED = auto()
    HANGS = auto()
    CUT = auto()


@dataclass(frozen=True, slots=True)
class Failures:
    """How often, or when, things go wrong; nothing does unless said."""

    slow_start_s: float = 0.0
    hang: float = 0.0
    cut: float = 0.0
    server_error: float = 0.0
    oom_tokens: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `NAME=VALUE,...`. Raises ValueError that names the part."""
        failures, seen = cls(), set()
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            if name not in NAMES or name in seen:
                found = f"{name} twice" if name in seen else part
                raise ValueError(f"{found}: allowed are {', '.join(f'{known}=VALUE' for known in NAMES)}, each once")
            seen.add(name)
            failures = replace(failures, **{NAMES[name]: _number(name, value)})
        return failures


def _number(name: str, value: str) -> float:
    most = 1.0 if name in SHARES else LONGEST_START_S if name == "slow-start" else 1e9
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    least = 1.0 if name == "oom" else 0.0
    if not least <= number <= most:
        raise ValueError(f"{name}={value}: allowed is a number from {least:g} to {most:g}")
    return number


@dataclass(slots=True)
class Lottery:
    """Draws what becomes of each request."""

    failures: Failures
    seed: int
    _draws: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draws = random.Random(self.seed)

    def refusal(self) -> int | None:
        """The status with which the next request is refused, if it is."""
        draw = self._draws.random()
        share = self.failures.server_error
        return STATUSES[int(draw * 2 >= share)] if draw < share else None

    def fate(self) -> Fate:
        """What becomes of the next request that is not refused."""
        if self._draws.random() < self.failures.hang:
            return Fate.HANGS
        return Fate.CUT if self._draws.random() < self.failures.cut else Fate.SERVED
