"""What came of a replay, as arrays in the order of its requests. Times are seconds on the replay's clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvantile_optimizer.simulator.state import KV_BINS, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """N requests on R replicas. A request that no replica could hold is refused: its times are NaN, its replica -1."""

    arrival_s: Floats
    """(N,)"""
    output: Ints
    """(N,) tokens."""
    admitted_s: Floats
    """(N,) when its first step began."""
    first_s: Floats
    """(N,) when its first token was there."""
    last_s: Floats
    """(N,) when its last token was there."""
    preemptions: Ints
    """(N,)"""
    replica: Ints
    """(N,) which one ran it."""
    hit_tokens: Ints
    """(N,) prompt tokens that its first admission did not have to compute."""
    computed_tokens: int
    """Of all steps, those computed again included."""
    recomputed_tokens: int
    """Computed and lost to a preemption."""
    busy_s: Floats
    """(R,) seconds in steps."""
    kv_seconds: Floats
    """(R, KV_BINS) seconds at each share of the blocks in use."""

    @property
    def served(self) -> npt.NDArray[np.bool_]:
        """(N,) whether it was not refused."""
        return ~np.isnan(self.last_s)

    @property
    def ttft_s(self) -> Floats:
        """(N,) from arrival to the first token."""
        return self.first_s - self.arrival_s

    @property
    def e2e_s(self) -> Floats:
        """(N,) from arrival to the last token."""
        return self.last_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """(N,) time per further token; NaN for answers of one."""
        further = np.where(self.output > 1, self.output - 1, 1)
        return np.where(self.output > 1, (self.last_s - self.first_s) / further, np.nan)

    @property
    def span_s(self) -> float:
        """From the first arrival to the last token; 0 when nothing was served."""
        return float(self.last_s[self.served].max() - self.arrival_s.min()) if self.served.any() else 0.0

    @property
    def arriving_s(self) -> float:
        """From the first arrival to the last one; to the last token where all came at once."""
        return float(np.ptp(self.arrival_s)) or self.span_s

    @property
    def utilisation(self) -> Floats:
        """(R,) seconds in steps for each second in which requests arrive, 1 at most.

        The time until the last answers have ended counts only as far as they are worked on: how long that takes says
        nothing about the load, and in a replay of half an hour it is 1 to 2 % of the time.
        """
        return np.minimum(1.0, self.busy_s / max(self.arriving_s, 1e-9))

    def kv_share(self, percent: float, replicas: slice = slice(None)) -> float:
        """The share of its blocks that one of `replicas` uses or less for `percent` of the span, idle time included."""
        seconds = self.kv_seconds[replicas]
        idle = max(0.0, self.span_s * len(seconds) - float(seconds.sum()))
        reached = idle + np.cumsum(seconds.sum(axis=0))
        wanted = percent / 100 * reached[-1]
        place = min(int(np.searchsorted(reached, wanted)), KV_BINS - 1)
        return 0.0 if idle >= wanted else (place + 0.5) / KV_BINS

    def kv_mean_share(self, replicas: slice = slice(None)) -> float:
        """The mean share of their blocks that `replicas` use over the span, idle time included."""
        seconds = self.kv_seconds[replicas]
        middles = (np.arange(KV_BINS) + 0.5) / KV_BINS
        return float(seconds.sum(axis=0) @ middles) / max(self.span_s * len(seconds), 1e-9)
