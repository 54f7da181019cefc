"""How memory and queue went over time, in a bounded list: what the report plots.

A sample is kept every so often; when the list is full every other one goes and the distance doubles, so that it
always spans the whole run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

COLUMNS = ("engineSeconds", "kvUsedTokens", "kvCommittedTokens", "running", "waiting", "preemptions")
Sample = tuple[float, *tuple[int, ...]]
MOST_SAMPLES = 2000
FIRST_DISTANCE_S = 0.02
"""About one step, to begin with."""


@dataclass(slots=True)
class History:
    """Samples in the order of `COLUMNS`; committed tokens are the used ones and what is reserved, firm and soft."""

    origin_s: float = 0.0
    """The engine second from which samples count."""
    samples: list[Sample] = field(default_factory=list)
    distance_s: float = FIRST_DISTANCE_S
    due_s: float = 0.0

    def add(self, now: float, *state: int) -> None:
        """Keeps a sample, whether it is due or not."""
        if len(self.samples) >= MOST_SAMPLES:
            del self.samples[1::2]
            self.distance_s *= 2
        self.samples.append((now - self.origin_s, *state))
        self.due_s = now + self.distance_s
