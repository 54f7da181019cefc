"""The figures of a run, measured over HTTP or simulated: percentiles, goodput, missed targets.

One request is one place in each array, and a time that is missing is NaN. Latencies are those of whole answers;
refused and broken ones count as missed targets, so that refusing never makes a policy look fast. Goodput is the
answers that met both targets over the time from the first arrival to the last finish.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Figures = dict[str, float | None]


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """What N requests got, and what they were promised. Times are seconds on one clock."""

    arrival_s: Floats
    """(N,)"""
    first_s: Floats
    """(N,) first token."""
    last_s: Floats
    """(N,) last token."""
    tokens: npt.NDArray[np.int64]
    """(N,) generated."""
    whole: npt.NDArray[np.bool_]
    """(N,) False for what was refused or broke off."""
    ttft_target_s: Floats
    """(N,)"""
    tpot_target_s: Floats
    """(N,)"""

    @property
    def ttft_s(self) -> Floats:
        """(N,) from arrival to the first token."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """(N,) time per further token of whole answers; NaN for those of fewer than two."""
        several = self.whole & (self.tokens > 1)
        return np.where(several, (self.last_s - self.first_s) / np.where(several, self.tokens - 1, 1), np.nan)

    @property
    def e2e_s(self) -> Floats:
        """(N,) from arrival to the last token of whole answers."""
        return np.where(self.whole, self.last_s - self.arrival_s, np.nan)

    @property
    def met(self) -> npt.NDArray[np.bool_]:
        """(N,) whether an answer is whole and met both targets; one of a single token has no time per token to miss."""
        slow = self.tpot_s > self.tpot_target_s
        return self.whole & (self.ttft_s <= self.ttft_target_s) & ~slow

    @property
    def span_s(self) -> float:
        """From the first arrival to the last finish, a refused request ending as it came; never quite zero."""
        if not len(self.arrival_s):
            return 1e-9
        ends = np.where(np.isnan(self.last_s), self.arrival_s, self.last_s)
        return max(float(ends.max() - self.arrival_s.min()), 1e-9)

    def only(self, which: npt.NDArray[np.bool_]) -> Answers:
        """The answers that `which` (N,) marks."""
        return Answers(
            self.arrival_s[which],
            self.first_s[which],
            self.last_s[which],
            self.tokens[which],
            self.whole[which],
            self.ttft_target_s[which],
            self.tpot_target_s[which],
        )


def percentile(values: Floats, percent: float) -> float | None:
    """Joined linearly between the values that are there; None where nothing was measured."""
    known = values[~np.isnan(values)]
    return float(np.percentile(known, percent)) if len(known) else None


def latency_figures(answers: Answers) -> Figures:
    """The figures that any run has, in the names of the evaluation's JSON."""
    count = len(answers.arrival_s)
    met = int(answers.met.sum())
    return {
        "ttftP50Seconds": percentile(answers.ttft_s, 50),
        "ttftP99Seconds": percentile(answers.ttft_s, 99),
        "tpotP99Seconds": percentile(answers.tpot_s, 99),
        "e2eP99Seconds": percentile(answers.e2e_s, 99),
        "goodputRequestsPerSecond": met / answers.span_s if count else 0.0,
        "sloViolationFraction": 1 - met / count if count else 0.0,
    }
