"""The gateway's time: seconds of the plan, which run `speed` times faster than the wall.

In front of emulators that run faster than life every duration a plan speaks of (waits, deadlines, time to first token)
shrinks alike. What belongs to the machine (connecting, health checks, looking at files) stays in wall time.
"""

from __future__ import annotations

import time


class Clock:
    """Calling it gives plan seconds since it was made."""

    __slots__ = ("_start", "speed")

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self._start = time.monotonic()

    def __call__(self) -> float:
        return (time.monotonic() - self._start) * self.speed

    def wall_s(self, plan_s: float) -> float:
        """Wall seconds that `plan_s` plan seconds last."""
        return plan_s / self.speed
