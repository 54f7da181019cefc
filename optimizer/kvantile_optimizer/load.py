"""What a replica does under a load: the closed forms behind the program's rows.

With the affine step time the circle of residence time and batch size closes: if a request brings w seconds of engine
time and rho = lambda * w, the time per output token is (alpha + beta + gamma * context + V / E[O-1]) / (1 - rho),
where V is the delay that prefills of others cause. From it follow the batch, the KV in use, their variances (a gamma
distribution is fitted to each) and so the percentiles; waiting for the prefill queue is a G/G/1 in heavy traffic
(Kingman) with an exponential tail. docs/model.md derives each line.

`capacity` turns that around: the largest utilisation at which the targets hold for this mix of classes. It is a
scalar per replica kind and mix, so that the rows stay linear; the planner works it out again when the mix has changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import gammaincinv, ndtr, ndtri

from kvantile_optimizer.plan import StepTime
from kvantile_optimizer.workload import Array, Lengths, Workload

STEP_BINS = 2.0 ** np.arange(12)
"""Lower ends of the classes of answer lengths, in decoding steps, in which the percentile of TPOT is mixed."""
BISECTIONS = 24
"""Of the interval from the mean to the fullest step: a millionth of it."""
UTILISATIONS = np.linspace(0.005, 0.975, 195)
"""Where the closed forms are evaluated; half a point is finer than they are exact."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Means over a class's requests, or over a mix of them; tokens."""

    prompt: float
    """E[I]: computed prompt tokens, resident prefixes taken off."""
    prompt_squared: float
    """E[I^2] of the same."""
    prompt_p: float
    """The prompt at the target's percentile."""
    steps: float
    """E[O-1]"""
    step_shares: tuple[float, ...]
    """Shares of the answers in each of STEP_BINS, of those that decode at all."""
    footprint: float
    """f = E[(O-1)(I + O/2)], token-steps"""
    context: float
    """Mean context of a decoding request: f / E[O-1]."""
    context_squared: float
    burstiness_squared: float
    """Squared coefficient of variation of interarrival times."""


def moments(workload: Workload, percentile: int, *, resident: bool = False) -> Moments:
    """The moments of one class; with its prefix `resident`, those who carry it need not have it computed."""
    I, O, expect = workload.prompt, workload.output, workload.expect  # noqa: E741 - as in the formulas
    steps = max(expect(O - 1), 1e-9)
    footprint = expect((O - 1) * (I + O / 2))
    share = workload.prefix_share if resident else 0.0
    rest = np.maximum(I - workload.prefix_tokens, 1.0)
    fresh = Lengths.of(
        np.concatenate((I, rest)),
        np.concatenate((workload.weight * (1 - share), workload.weight * share)),
        float(I.max()),
    )
    return Moments(
        prompt=fresh.mean,
        prompt_squared=float(fresh.values**2 @ fresh.weights),
        prompt_p=fresh.quantile(percentile / 100),
        steps=steps,
        step_shares=_step_shares(O - 1, workload.weight),
        footprint=footprint,
        context=footprint / steps,
        context_squared=expect((O - 1) * (I**2 + I * O + O**2 / 3)) / steps,
        burstiness_squared=workload.burstiness**2,
    )


def mixed(parts: list[tuple[float, Moments]]) -> Moments:
    """The moments of a mix of classes; each part is (requests per second, moments)."""
    total = sum(rate for rate, _ in parts)

    def mean(name: str, weight: str | None = None) -> float:
        weights = [rate * (getattr(part, weight) if weight else 1.0) for rate, part in parts]
        values = [float(getattr(part, name)) for _, part in parts]
        return float(np.average(values, weights=weights))

    return Moments(
        prompt=mean("prompt"),
        prompt_squared=mean("prompt_squared"),
        prompt_p=max(part.prompt_p for _, part in parts),
        steps=mean("steps"),
        step_shares=tuple(np.average([p.step_shares for _, p in parts], axis=0, weights=[rate for rate, _ in parts])),
        footprint=mean("footprint"),
        context=mean("context", "steps"),
        context_squared=mean("context_squared", "steps"),
        burstiness_squared=sum(rate * part.burstiness_squared for rate, part in parts) / total,
    )


def engine_seconds(step: StepTime, part: Moments) -> float:
    """w: engine time that one request brings, besides its share of the fixed alpha."""
    return step.delta * part.prompt + step.beta * part.steps + step.gamma * part.footprint


def prefill_token_seconds(step: StepTime, part: Moments) -> float:
    """KV that a request holds while its prompt is computed, half of it on average, times how long that takes."""
    return (step.delta * part.prompt_squared + step.alpha * part.prompt) / 2


@dataclass(frozen=True, slots=True)
class LoadedReplica:
    """One replica at each of a row of utilisations; every array is (U,). Times in seconds, sizes in tokens."""

    rate: Array
    """Requests per second."""
    tpot_mean: Array
    tpot_p: Array
    """At the target's percentile, as all that end in `_p`."""
    ttft_p: Array
    """Infinite where the prefill queue grows."""
    kv_mean: Array
    kv_p99: Array

    @property
    def tail_margin(self) -> Array:
        """m: P99 of the KV in use over its mean. Memory has no target; 99 whatever the classes ask."""
        return self.kv_p99 / np.maximum(self.kv_mean, 1.0)


def loaded(
    step: StepTime, mix: Moments, utilisation: Array, percentile: int, max_num_batched_tokens: int, replicas: float
) -> LoadedReplica:
    """The closed forms at `utilisation` (U,), for one of `replicas` that share the arrivals at random."""
    a, b, g, d = step.alpha, step.beta, step.gamma, step.delta
    p = percentile / 100
    # Splitting a stream at random over n replicas brings it nearer to Poisson.
    ca2 = 1 + (mix.burstiness_squared - 1) / max(1.0, replicas)
    rate = utilisation / engine_seconds(step, mix)
    prefill = np.minimum(rate * d * mix.prompt, 0.999)
    V = rate * d**2 * mix.prompt_squared / (2 * (1 - prefill))
    floor = a + b + g * mix.context
    tpot = (floor + V / mix.steps) / (1 - utilisation)
    batch = rate * mix.steps * tpot
    kv = rate * (mix.footprint * tpot + prefill_token_seconds(step, mix))
    stretch = 1 + 2 * rate * d * mix.prompt / (1 - prefill) + (rate * d / (1 - prefill)) ** 2 * mix.prompt_squared
    batch_variance = batch * (1 - prefill) / (1 - utilisation) * (stretch + 1) / 2 * (1 + max(ca2, 0.0)) / 2
    kv_variance = batch * max(mix.context_squared - mix.context**2, 0.0) + mix.context**2 * batch_variance
    batch_p99 = _gamma_quantile(batch, batch_variance, 0.99)
    kv_p99 = _gamma_quantile(kv, kv_variance, 0.99)
    fullest_step = a + b * batch_p99 + g * kv_p99 + d * max_num_batched_tokens
    # The batch's upper tail is wider than a normal one of its variance, and it is the tail that counts.
    batch_deviation = (tpot - floor) * (batch_p99 / np.maximum(batch, 1e-9) - 1) / ndtri(0.99)
    prefill_variance = rate * tpot * d**2 * mix.prompt_squared * (1 + max(ca2, 0.0)) / 2 / (1 - prefill)
    tpot_p = _mixed_quantile(tpot, batch_deviation, prefill_variance, mix.step_shares, fullest_step, p)
    per_token = d + (a + b * batch + g * kv) / max_num_batched_tokens
    ttft_p = per_token * mix.prompt_p + tpot + _waiting_quantile(rate, per_token, mix, ca2, p)
    return LoadedReplica(rate, tpot, tpot_p, ttft_p, kv, kv_p99)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one replica can take of a mix: `utilisation` at most, and how the closed forms stand there."""

    utilisation: float
    tpot_s: float
    """Mean time per output token where the replica is full."""
    step_s: float
    """The part of it that does not grow with the load: TPOT * (1 - rho)."""
    tail_margin: float
    """m there, at least 1."""


def capacity(
    step: StepTime,
    mix: Moments,
    ttft_target_s: float,
    tpot_target_s: float,
    percentile: int,
    max_num_batched_tokens: int,
    kv_tokens: int,
    replicas: float,
) -> Capacity:
    """The largest utilisation at which both targets hold at the percentile; zero when they hold at none.

    The other figures are those where the replica is full: there, or where P99 of the KV in use reaches `kv_tokens` if
    that comes first. A lighter load has a wider tail for its mean.
    """
    load = loaded(step, mix, UTILISATIONS, percentile, max_num_batched_tokens, replicas)
    within = np.logical_and.accumulate((load.tpot_p <= tpot_target_s) & (load.ttft_p <= ttft_target_s))
    last = int(within.sum()) - 1
    at = max(int((within & (load.kv_p99 <= kv_tokens)).sum()) - 1, 0)
    return Capacity(
        utilisation=float(UTILISATIONS[last]) if last >= 0 else 0.0,
        tpot_s=float(load.tpot_mean[at]),
        step_s=float(load.tpot_mean[at] * (1 - UTILISATIONS[at])),
        tail_margin=max(1.0, float(load.tail_margin[at])),
    )


def exceeds(mean: float, high: float, percentile: int, limit: float) -> float:
    """P(X > limit) for the gamma distribution with this mean and this percentile."""
    from scipy.optimize import brentq
    from scipy.special import gammaincc

    if mean <= 0 or high <= mean:
        return float(mean > limit)

    def miss(log_shape: float) -> float:
        shape = np.exp(log_shape)
        return float(gammaincinv(shape, percentile / 100) * mean / shape - high)

    lower, upper = -4.0, 14.0
    if miss(lower) * miss(upper) > 0:
        return float(high > limit)
    shape = float(np.exp(brentq(miss, lower, upper)))
    return float(gammaincc(shape, limit * shape / mean))


def _mixed_quantile(
    mean: Array, batch_deviation: Array, prefill_variance: Array, shares: tuple[float, ...], most: Array, p: float
) -> Array:
    """The percentile (U,) of the time per token over answers of all lengths, at most `most`.

    An answer of k steps averages over k: what the batch adds lasts longer than an answer and stays, what single
    prefills add falls as 1 / k. Short answers are few and see the worst of it.
    """
    weights = np.array(shares)[:, None]
    deviation = np.sqrt(batch_deviation**2 + prefill_variance / (1.5 * STEP_BINS[:, None]))
    low, high = mean, np.maximum(mean, most)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        beyond = (weights * ndtr((mean - middle) / np.maximum(deviation, 1e-12))).sum(axis=0) > 1 - p
        low, high = np.where(beyond, middle, low), np.where(beyond, high, middle)
    return np.asarray(high)


def _step_shares(steps: Array, weight: Array) -> tuple[float, ...]:
    decodes = steps >= 1
    if not decodes.any():
        return (1.0, *([0.0] * (len(STEP_BINS) - 1)))
    bins = np.searchsorted(STEP_BINS, steps[decodes], side="right") - 1
    shares = np.bincount(bins, weight[decodes], len(STEP_BINS))
    return tuple((shares / shares.sum()).tolist())


def _waiting_quantile(rate: Array, per_token: Array, mix: Moments, ca2: float, p: float) -> Array:
    service = per_token * mix.prompt
    busy = rate * service
    cs2 = mix.prompt_squared / mix.prompt**2 - 1
    safe = np.minimum(busy, 0.999)
    mean_wait = (max(ca2, 0.0) + cs2) / 2 * safe / (1 - safe) * service
    quantile = mean_wait / np.maximum(safe, 1e-9) * np.log(np.maximum(safe / (1 - p), 1.0))
    return np.where(busy < 0.999, quantile, np.inf)


def _gamma_quantile(mean: Array, variance: Array, p: float) -> Array:
    shape = np.maximum(mean**2 / np.maximum(variance, 1e-12), 1e-3)
    return np.asarray(gammaincinv(shape, p) * mean / shape)
