"""Step-time coefficients from a recorded run: the ones with which the simulator repeats it.

Regression of step times would need the engine's own log of steps, and cannot tell the price of a sequence from that of
its context when both grow together. Here the run's requests are replayed, and the four coefficients of
T = alpha + beta sequences + gamma context tokens + delta prefill tokens are moved until the times to the first token,
per further token and to the last token agree: least squares over logarithms of the coefficients, with a loss that
outliers cannot rule. A replay is not smooth in them, so the search begins from several points; the best end wins.

A run whose batch is always as large as memory allows cannot tell alpha from beta and gamma. Their ratios hardly depend
on how fast a GPU is, though: gamma to alpha is bytes of cache per token to bytes of weights. So where the hardware is
known, the ratios that are expected of it are a log-normal prior, which decides what the run does not.
How far the fit can be trusted is measured by fitting on the first half of the requests and judging on the second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from kvantile_optimizer.errors import InputError
from kvantile_optimizer.figures import percentile
from kvantile_optimizer.plan import StepTime
from kvantile_optimizer.simulator.outcome import Outcome
from kvantile_optimizer.simulator.replica import Policy, ReplicaSpec, Requests, simulate_replica

Floats = npt.NDArray[np.float64]
FEWEST = 20
"""Requests below which four coefficients mean nothing."""
MOST = 5000
"""Requests that are looked at: more make the fit slower and hardly better."""
_OUTLIER = 0.1
"""Relative error from which on a request counts linearly."""
_STARTS = ((0.3, 0.6, 0.9), (1e-3, 1e-2), (1e-6, 1e-5))
"""alpha in fast times per token, beta and gamma in alphas: engines seen so far lie within a factor of three."""
_DIFFERENCE = 0.01
"""Step of the numerical derivative, in logarithms: wide enough to average over single preemptions."""
_EVALUATIONS = 40
_DEVIATIONS = (math.log(2), 0.3)
"""Of the logarithms of beta / alpha and gamma / alpha from what is expected: engines seen have betas of half to twice
the assumed one, and read cache and weights at shares of the bandwidth that differ by up to a third."""
_KV_LINE = re.compile(r"GPU KV cache size:\s*([\d,]+)\s*tokens")


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRun:
    """N requests as an engine served them, in order of arrival; times are seconds on one clock."""

    arrival_s: Floats
    prompt: npt.NDArray[np.int64]
    output: npt.NDArray[np.int64]
    first_s: Floats
    last_s: Floats

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def requests(self) -> Requests:
        """What the run was given."""
        return Requests(self.arrival_s, self.prompt, self.output)

    def first(self, count: int) -> RecordedRun:
        """Its first `count` requests."""
        return RecordedRun(*(getattr(self, name)[:count] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Engine:
    """What the run's engine was configured with. Without `kv_tokens` memory never ran out."""

    kv_tokens: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16

    def replica(self, step_time: StepTime, run: RecordedRun) -> ReplicaSpec:
        """The replica that is simulated."""
        enough = int((run.prompt + run.output + self.block_size).sum())
        return ReplicaSpec(
            self.kv_tokens or enough, step_time, self.block_size, self.max_num_seqs, self.max_num_batched_tokens
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    """The coefficients, and the relative errors of a fit on the first half, judged on the second."""

    step_time: StepTime
    errors: dict[str, float]
    preemptions: int
    """In the simulated run."""


def kv_tokens_of_log(lines: Iterable[str]) -> int | None:
    """The KV cache's size that vLLM logs at start, the last such line's; None where there is none."""
    found = [match[1] for line in lines if (match := _KV_LINE.search(line))]
    return int(found[-1].replace(",", "")) if found else None


def calibrate(run: RecordedRun, engine: Engine, expected: StepTime | None = None) -> Calibration:
    """Fits the step time to `run`; what it cannot tell is decided by what is `expected` of the hardware, if known.

    Raises InputError for a run that is too short or that the KV cache cannot hold.
    """
    run = _checked(run, engine).first(MOST)
    half = np.arange(len(run)) < len(run) // 2
    halfway = fit(run, engine, half, _starts(run.first(len(run) // 2)), expected)
    errors = compare(run, simulated(run, engine, halfway), ~half)
    step_time = fit(run, engine, np.ones_like(half), [halfway], expected)
    return Calibration(step_time, errors, int(simulated(run, engine, step_time).preemptions.sum()))


def fit(
    run: RecordedRun,
    engine: Engine,
    which: npt.NDArray[np.bool_],
    starts: Iterable[StepTime],
    expected: StepTime | None = None,
) -> StepTime:
    """The best step time for the requests that `which` (N,) marks; all are replayed."""

    def residuals(logs: Floats) -> Floats:
        seen = _residuals(run, simulated(run, engine, _step_time(logs)), which)
        return np.append(seen, _surprise(logs, expected)) if expected else seen

    ends = [
        least_squares(
            residuals,
            np.log([start.alpha, start.beta, start.gamma, start.delta]),
            diff_step=[_DIFFERENCE] * 4,
            loss="soft_l1",
            f_scale=_OUTLIER,
            max_nfev=_EVALUATIONS,
        )
        for start in starts
    ]
    return _step_time(min(ends, key=lambda end: float(end.cost)).x)


def simulated(run: RecordedRun, engine: Engine, step_time: StepTime) -> Outcome:
    """The run's requests on a simulated engine with that step time, without any reservation."""
    return simulate_replica(run.requests, engine.replica(step_time, run), Policy())


def compare(run: RecordedRun, outcome: Outcome, which: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Relative errors of the simulated figures over the requests that `which` (N,) marks."""
    recorded = _times(run.arrival_s, run.first_s, run.last_s, run.output)
    found = _times(run.arrival_s, outcome.first_s, outcome.last_s, run.output)
    errors: dict[str, float] = {}
    for name, ours, theirs in zip(("ttft", "tpot", "e2e"), found, recorded, strict=True):
        errors[f"{name}Mean"] = float(np.nanmean(ours[which]) / np.nanmean(theirs[which])) - 1
        p99, recorded_p99 = percentile(ours[which], 99), percentile(theirs[which], 99)
        errors[f"{name}P99"] = p99 / recorded_p99 - 1 if p99 is not None and recorded_p99 else 0.0
    return errors


def _times(arrival_s: Floats, first_s: Floats, last_s: Floats, output: npt.NDArray[np.int64]) -> tuple[Floats, ...]:
    """(N,) each: to the first token, per further token (NaN where there is none), to the last token."""
    several = output > 1
    per_token = np.where(several, (last_s - first_s) / np.where(several, output - 1, 1), np.nan)
    return first_s - arrival_s, per_token, last_s - arrival_s


def _residuals(run: RecordedRun, outcome: Outcome, which: npt.NDArray[np.bool_]) -> Floats:
    """Relative errors of the three times of each request; the first token's over their mean, as some are tiny."""
    recorded = _times(run.arrival_s, run.first_s, run.last_s, run.output)
    found = _times(run.arrival_s, outcome.first_s, outcome.last_s, run.output)
    several = which & (run.output > 1)
    return np.concatenate(
        [
            (found[0] - recorded[0])[which] / recorded[0][which].mean(),
            ((found[1] - recorded[1]) / recorded[1])[several],
            ((found[2] - recorded[2]) / recorded[2])[which],
        ]
    )


def _surprise(logs: Floats, expected: StepTime) -> Floats:
    """Residuals (2,) of the prior: a standard deviation counts as much as a request that is nearly an outlier."""
    usual = np.log([expected.beta / expected.alpha, expected.gamma / expected.alpha])
    return np.asarray(_OUTLIER * (logs[1:3] - logs[0] - usual) / _DEVIATIONS)


def _starts(run: RecordedRun) -> list[StepTime]:
    ttft, tpot, _ = _times(run.arrival_s, run.first_s, run.last_s, run.output)
    fast = float(np.nanpercentile(tpot, 5)) if (run.output > 1).any() else float(ttft.min()) / 2
    delta = max(float(np.percentile(ttft / run.prompt, 5)) / 2, 1e-9)
    return [
        StepTime(alpha=a * fast, beta=a * b * fast, gamma=a * g * fast, delta=delta) for a, b, g in product(*_STARTS)
    ]


def _step_time(logs: Floats) -> StepTime:
    alpha, beta, gamma, delta = (float(value) for value in np.exp(np.clip(logs, -40, 5)))
    return StepTime(alpha=alpha, beta=beta, gamma=gamma, delta=delta)


def _checked(run: RecordedRun, engine: Engine) -> RecordedRun:
    if len(run) < FEWEST:
        raise InputError(f"run: found {len(run)} requests, allowed at least {FEWEST}")
    wrong = (
        (run.first_s <= run.arrival_s) | (run.last_s < run.first_s) | ((run.output > 1) & (run.last_s <= run.first_s))
    )
    if wrong.any():
        raise InputError(f"run: found a token before its time in request {int(np.argmax(wrong)) + 1}, allowed none")
    longest = int((run.prompt + run.output).max())
    if engine.kv_tokens is not None and longest > engine.kv_tokens // engine.block_size * engine.block_size:
        raise InputError(f"kv tokens: found {engine.kv_tokens}, allowed at least the longest request's {longest}")
    return run
