"""How long to wait before a server that died is started again.

The wait doubles from failure to failure up to a cap, with jitter so that replicas that died together do not come back
together, and starts over once a run was healthy for a while.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

FIRST_S = 0.25
CAP_S = 10.0
HEALTHY_S = 30.0
"""A run this long was no start-up failure: the next wait is the first one again."""


@dataclass(slots=True)
class Backoff:
    """The waits between the starts of one server. `rng` gives the jitter."""

    rng: random.Random = field(default_factory=random.Random)
    first_s: float = FIRST_S
    cap_s: float = CAP_S
    healthy_s: float = HEALTHY_S
    _failures: int = 0

    def next_wait_s(self, ran_s: float) -> float:
        """The wait after a run of `ran_s` seconds: between half and all of the doubled time."""
        self._failures = 1 if ran_s >= self.healthy_s else self._failures + 1
        full_s = min(self.cap_s, self.first_s * 2.0 ** min(self._failures - 1, 32))
        return full_s * self.rng.uniform(0.5, 1.0)
