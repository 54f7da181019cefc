"""What to reserve for requests that bring no hint, by class: a JSON file that is followed while it changes.

    {"default": {"reserveTokens": 400, "pooling": 0.25},
     "classes": {"chat": {"reserveTokens": 600, "pooling": 0.1, "ttftBudgetSeconds": 2.0}}}

The keys say what a hint says: without `pooling` the whole reservation is held, without `reserveTokens` nothing is.
`default` is for requests without a class and for classes that are not listed. A file that is no good leaves in force
what was read before, is told once, and counted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvantile_optimizer import hint as hints
from kvantile_optimizer.hint import Hint

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
KEYS = {"reserveTokens": hints.RESERVE_TOKENS, "pooling": hints.POOLING, "ttftBudgetSeconds": hints.TTFT_BUDGET}


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the file says."""

    default: Hint = field(default_factory=Hint)
    classes: dict[str, Hint] = field(default_factory=dict)

    def of(self, class_name: str | None) -> Hint:
        """What holds for a request of that class."""
        return self.classes.get(class_name or "", self.default)


def parse(data: bytes) -> Defaults:
    """The defaults in a file. Raises ValueError with the field, what was found and what is allowed."""
    given = json.loads(data)
    if not isinstance(given, dict):
        raise ValueError("expected an object with default and classes")  # noqa: TRY004 - one kind for a bad file
    if unknown := sorted(given.keys() - {"default", "classes"}):
        raise ValueError(f"{unknown[0]}: no such field, allowed default and classes")
    classes = given.get("classes", {})
    if not isinstance(classes, dict):
        raise ValueError("classes: expected an object by class name")  # noqa: TRY004 - as above
    return Defaults(
        _entry("default", given.get("default", {})),
        {name: _entry(f"classes.{name}", entry) for name, entry in classes.items()},
    )


def _entry(where: str, entry: Any) -> Hint:  # noqa: ANN401 - as it stands in JSON
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected an object")  # noqa: TRY004 - one kind for a bad file
    if unknown := sorted(entry.keys() - KEYS.keys()):
        raise ValueError(f"{where}.{unknown[0]}: no such field, allowed {', '.join(KEYS)}")
    found = hints.parse({KEYS[name]: value for name, value in entry.items()})
    understood = hints.build(found)
    for name, value in entry.items():
        if KEYS[name] not in understood:
            raise ValueError(f"{where}.{name}: found {value!r}, allowed what {KEYS[name]} allows in a request")
    return found


class DefaultsFile:
    """The file, looked at once a second by `clock` in seconds. `faults` counts versions of it that were no good."""

    def __init__(self, path: Path | None, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._looked_s = -LOOK_EVERY_S
        self._seen: tuple[int, int, int] | None = None
        self.faults = 0
        self.current = Defaults()

    def load(self) -> None:
        """Reads the file for the first time. Raises ValueError, with the path."""
        if self._path is None:
            return
        try:
            self._seen = self._signature()
            self.current = parse(self._path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{self._path}: {error}") from error

    def follow(self) -> None:
        """Takes up a change, if it is time to look."""
        now_s = self._clock()
        if self._path is None or now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self.current = parse(self._path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            self.faults += 1
            # The fault is the file's, so a traceback would tell nothing.
            log.error("%s: %s; what was read before stays in force", self._path, error)  # noqa: TRY400

    def _signature(self) -> tuple[int, int, int] | None:
        assert self._path is not None  # noqa: S101 - callers have looked
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size
