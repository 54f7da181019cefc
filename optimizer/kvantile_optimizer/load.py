"""What a replica does under a load: the closed forms behind the program's rows.

With the affine step time the circle of residence time and batch size closes: if a request brings w seconds of engine
time and rho = lambda * w, the time per output token is (alpha + beta + gamma * context + V / E[O-1]) / (1 - rho),
where V is the delay that prefills of others cause. From it follow the batch, the KV in use, their variances (a gamma
distribution is fitted to each) and so the percentiles; waiting for the prefill queue is a G/G/1 in heavy traffic
(Kingman) with an exponential tail. docs/model.md derives each line.

`capacity` turns that around: the largest utilisation at which the targets hold for this mix of classes. It is a
scalar per replica kind and mix, so that the rows stay linear; the planner works it out again when the mix has changed.
All is elementwise over the shape that the arguments broadcast to, written (...): one replica, or every candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import gammaincinv, ndtr, ndtri

from kvantile_optimizer.workload import Array, Lengths, Workload

Figure: TypeAlias = float | Array
"""A number, or an array (...) of them."""

STEP_BINS = 2.0 ** np.arange(12)
"""Lower ends of the classes of answer lengths, in decoding steps, in which the percentile of TPOT is mixed."""
BISECTIONS = 24
"""Of the interval from the mean to the fullest step: a millionth of it."""
UTILISATIONS = np.linspace(0.005, 0.975, 195)
"""Where the closed forms are evaluated; half a point is finer than they are exact."""

_SHAPES = np.geomspace(1e-3, 1e9, 8001)
_LOG_SHAPES, _P99_OVER_MEAN = np.log(_SHAPES), gammaincinv(_SHAPES, 0.99) / _SHAPES
"""P99 of a gamma distribution over its mean, by its shape: joined linearly it is exact to a ten-thousandth, and ten
times as fast as the function itself, which half of a plan's time would go into."""

EVERY = 4
"""Places of UTILISATIONS that `most_utilisation` steps over: two points."""


class Steps(Protocol):
    """Step-time coefficients as `plan.StepTime` has them, each a number or an array (...)."""

    @property
    def alpha(self) -> Figure: ...
    @property
    def beta(self) -> Figure: ...
    @property
    def gamma(self) -> Figure: ...
    @property
    def delta(self) -> Figure: ...


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Step-time coefficients of many replica kinds, (J,) each."""

    alpha: Array
    beta: Array
    gamma: Array
    delta: Array

    @classmethod
    def of(cls, steps: Sequence[Steps]) -> StepArrays:
        """The coefficients of each kind side by side."""
        return cls(*(np.array([getattr(step, item.name) for step in steps], float) for item in fields(cls)))

    def only(self, which: npt.NDArray[np.intp] | slice) -> StepArrays:
        """Those of the kinds that `which` picks."""
        return StepArrays(*(getattr(self, item.name)[which] for item in fields(self)))


@dataclass(frozen=True, slots=True)
class Moments:
    """Means over a class's requests, or over a mix of them; tokens. Each is a number or an array (...)."""

    prompt: Figure
    """E[I]: computed prompt tokens, resident prefixes taken off."""
    prompt_squared: Figure
    """E[I^2] of the same."""
    prompt_p: Figure
    """The prompt at the target's percentile."""
    steps: Figure
    """E[O-1]"""
    step_shares: Array
    """(..., STEP_BINS) shares of the answers in each of STEP_BINS, of those that decode at all."""
    footprint: Figure
    """f = E[(O-1)(I + O/2)], token-steps"""
    context: Figure
    """Mean context of a decoding request: f / E[O-1]."""
    context_squared: Figure
    burstiness_squared: Figure
    """Squared coefficient of variation of interarrival times."""

    def only(self, which: npt.NDArray[np.intp] | int) -> Moments:
        """Those of the classes or mixes that `which` picks."""
        return Moments(**{item.name: getattr(self, item.name)[which] for item in fields(Moments)})


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


def stacked(parts: Sequence[Moments]) -> Moments:
    """The moments of C classes side by side, (C,)."""
    return Moments(**{item.name: np.array([getattr(part, item.name) for part in parts]) for item in fields(Moments)})


def mixed(parts: Moments, rates: npt.ArrayLike) -> Moments:
    """The moments (J,) of J mixes of the classes `parts` (C,); `rates` (C, J) in requests per second, none all zero."""
    share = np.asarray(rates, float)
    share = share / share.sum(axis=0)
    steps = parts.steps @ share
    by_steps = share * np.asarray(parts.steps)[:, None] / steps
    return Moments(
        prompt=parts.prompt @ share,
        prompt_squared=parts.prompt_squared @ share,
        prompt_p=np.where(share > 0, np.asarray(parts.prompt_p)[:, None], 0.0).max(axis=0),
        steps=steps,
        step_shares=share.T @ parts.step_shares,
        footprint=parts.footprint @ share,
        context=parts.context @ by_steps,
        context_squared=parts.context_squared @ by_steps,
        burstiness_squared=parts.burstiness_squared @ share,
    )


def engine_seconds(step: Steps, part: Moments) -> Array:
    """w: engine time that one request brings, besides its share of the fixed alpha."""
    return np.asarray(step.delta * part.prompt + step.beta * part.steps + step.gamma * part.footprint)


def prefill_token_seconds(step: Steps, part: Moments) -> Array:
    """KV that a request holds while its prompt is computed, half of it on average, times how long that takes."""
    return np.asarray((step.delta * part.prompt_squared + step.alpha * part.prompt) / 2)


@dataclass(frozen=True, slots=True)
class LoadedReplica:
    """Replicas under a load; every array is (...). Times in seconds, sizes in tokens, `_p` at the asked percentile."""

    rate: Array
    """Requests per second."""
    tpot_mean: Array
    ttft_p: Array
    """Infinite where the prefill queue grows."""
    prompt_token_s: Array
    """What each token of a prompt adds to that."""
    kv_mean: Array
    kv_p99: Array
    batch_p99: Array
    """Decoding sequences."""
    fullest_step: Array
    """Seconds of a step that P99 of the batch and of the KV and all batched tokens make; no answer is slower."""
    _batch_deviation: Array
    _prefill_variance: Array
    """(...) of the time per token over an answer of one step."""
    _step_shares: Array

    @property
    def tail_margin(self) -> Array:
        """m: P99 of the KV in use over its mean. Memory has no target; 99 whatever the classes ask."""
        return np.asarray(self.kv_p99 / np.maximum(self.kv_mean, 1.0))

    def tpot_beyond(self, seconds: npt.ArrayLike) -> Array:
        """The share (...) of the answers whose time per token is above `seconds` (...).

        An answer of k steps averages over k: what the batch adds lasts longer than an answer and stays, what single
        prefills add falls as 1 / k. Short answers are few and see the worst of it.
        """
        mean, most = self.tpot_mean, np.maximum(self.fullest_step, self.tpot_mean)
        at, mean, most = np.broadcast_arrays(np.asarray(seconds, float), mean, most)
        beyond, some = np.zeros(at.shape), at < most

        def of_some(figure: npt.ArrayLike) -> Array:
            """(S, 1) Most replicas are light enough that no step is as long, and the tail is what takes the time."""
            return np.asarray(np.broadcast_to(figure, at.shape)[some][:, None])

        shares = np.broadcast_to(self._step_shares, (*at.shape, len(STEP_BINS)))[some]
        variance = of_some(self._batch_deviation) ** 2 + of_some(self._prefill_variance) / (1.5 * STEP_BINS)
        slow = ndtr((of_some(mean) - of_some(at)) / np.maximum(np.sqrt(variance), 1e-12))
        beyond[some] = (shares * slow).sum(axis=-1)
        return beyond

    def tpot_p(self, percentile: npt.ArrayLike) -> Array:
        """The time per token (...) at `percentile` (...), over answers of all lengths."""
        rest = 1 - np.asarray(percentile, float) / 100
        low, high = self.tpot_mean, np.maximum(self.tpot_mean, self.fullest_step)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            beyond = self.tpot_beyond(middle) > rest
            low, high = np.where(beyond, middle, low), np.where(beyond, high, middle)
        return np.asarray(high)


def loaded(
    step: Steps,
    mix: Moments,
    utilisation: npt.ArrayLike,
    percentile: npt.ArrayLike,
    max_num_batched_tokens: npt.ArrayLike,
    replicas: npt.ArrayLike,
) -> LoadedReplica:
    """The closed forms at `utilisation` (...), each for one of `replicas` that share the arrivals at random."""
    a, b, g, d = step.alpha, step.beta, step.gamma, step.delta
    rho, batched = np.asarray(utilisation, float), np.asarray(max_num_batched_tokens, float)
    # Splitting a stream at random over n replicas brings it nearer to Poisson.
    ca2 = np.maximum(1 + (mix.burstiness_squared - 1) / np.maximum(1.0, replicas), 0.0)
    rate = rho / engine_seconds(step, mix)
    prefill = np.minimum(rate * d * mix.prompt, 0.999)
    V = rate * d**2 * mix.prompt_squared / (2 * (1 - prefill))
    floor = a + b + g * mix.context
    # Answers that decode at all take a step or more; of those that do not nobody waits for a second token.
    tpot = (floor + V / np.maximum(mix.steps, 1.0)) / (1 - rho)
    batch = rate * mix.steps * tpot
    kv = rate * (mix.footprint * tpot + prefill_token_seconds(step, mix))
    stretch = 1 + 2 * rate * d * mix.prompt / (1 - prefill) + (rate * d / (1 - prefill)) ** 2 * mix.prompt_squared
    batch_variance = batch * (1 - prefill) / (1 - rho) * (stretch + 1) / 2 * (1 + ca2) / 2
    kv_variance = batch * np.maximum(mix.context_squared - mix.context**2, 0.0) + mix.context**2 * batch_variance
    batch_p99 = _gamma_p99(batch, batch_variance)
    kv_p99 = _gamma_p99(kv, kv_variance)
    per_token = d + (a + b * batch + g * kv) / batched
    waiting = _waiting_quantile(rate, per_token, mix, replicas, np.asarray(percentile, float) / 100)
    return LoadedReplica(
        rate=rate,
        tpot_mean=np.asarray(tpot),
        ttft_p=np.asarray(per_token * mix.prompt_p + tpot + waiting),
        prompt_token_s=np.asarray(per_token),
        kv_mean=np.asarray(kv),
        kv_p99=kv_p99,
        batch_p99=batch_p99,
        fullest_step=np.asarray(a + b * batch_p99 + g * kv_p99 + d * batched),
        # The batch's upper tail is wider than a normal one of its variance, and it is the tail that counts.
        _batch_deviation=np.asarray((tpot - floor) * (batch_p99 / np.maximum(batch, 1e-9) - 1) / ndtri(0.99)),
        _prefill_variance=np.asarray(rate * tpot * d**2 * mix.prompt_squared * (1 + ca2) / 2 / (1 - prefill)),
        _step_shares=mix.step_shares,
    )


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one replica can take of a mix: `utilisation` at most, and how the closed forms stand there. (...) each."""

    utilisation: Array
    """Zero where the targets hold at no load."""
    tpot_s: Array
    """Mean time per output token where the replica is full."""
    step_s: Array
    """The part of it that does not grow with the load: TPOT * (1 - rho)."""
    tail_margin: Array
    """m there, at least 1."""
    batch_p99: Array
    """Decoding sequences there."""
    sustained: Array
    """The utilisation there."""

    def where(self, use: npt.NDArray[np.bool_], other: Capacity) -> Capacity:
        """These figures (J,) where `use` says so, the other's elsewhere."""
        return Capacity(
            *(np.where(use, getattr(self, item.name), getattr(other, item.name)) for item in fields(Capacity))
        )


def joined(parts: Sequence[Capacity]) -> Capacity:
    """The capacities of several rows of candidates as one."""
    return Capacity(
        *(np.concatenate([np.zeros(0), *(getattr(part, item.name) for part in parts)]) for item in fields(Capacity))
    )


def capacity(
    step: Steps,
    mix: Moments,
    ttft_target_s: npt.ArrayLike,
    tpot_target_s: npt.ArrayLike,
    percentile: npt.ArrayLike,
    max_num_batched_tokens: npt.ArrayLike,
    kv_tokens: npt.ArrayLike,
    replicas: npt.ArrayLike,
    *,
    prompt_p: npt.ArrayLike | None = None,
) -> Capacity:
    """The largest utilisation (...) at which both targets hold at the percentile; zero when they hold at none.

    Classes of one mix may have prompts `prompt_p` (A, ...) and TTFT targets (A, ...) of their own, which all have to
    hold; the mix's longest has the one target otherwise. The other figures are those where the replica is full: there,
    or where P99 of the KV in use reaches `kv_tokens` if that comes first. A lighter load has a wider tail for its mean.
    """
    rest, ttft_s = 1 - np.asarray(percentile, float) / 100, np.asarray(ttft_target_s, float)
    shape = np.broadcast_shapes(np.shape(mix.prompt), np.shape(step.alpha), np.shape(tpot_target_s))
    memory = np.asarray(kv_tokens, float)

    def state(index: npt.NDArray[np.int64]) -> LoadedReplica:
        return loaded(step, mix, UTILISATIONS[index], percentile, max_num_batched_tokens, replicas)

    def keeps(index: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        found = state(index)
        longer = 0.0 if prompt_p is None else np.asarray(prompt_p, float) - mix.prompt_p
        early = found.ttft_p + found.prompt_token_s * longer <= ttft_s
        return (early if prompt_p is None else early.all(axis=0)) & (found.tpot_beyond(tpot_target_s) <= rest)

    last = _last(keeps, shape)
    full = _last(lambda index: state(index).kv_p99 <= memory, shape)
    at = np.maximum(np.minimum(last, full), 0)
    found = state(at)
    return Capacity(
        utilisation=np.where(last >= 0, UTILISATIONS[np.maximum(last, 0)], 0.0),
        tpot_s=found.tpot_mean,
        step_s=np.asarray(found.tpot_mean * (1 - UTILISATIONS[at])),
        tail_margin=np.maximum(1.0, found.tail_margin),
        batch_p99=found.batch_p99,
        sustained=np.where((last >= 0) & (full >= 0), UTILISATIONS[at], 0.0),
    )


def most_utilisation(
    step: Steps,
    mix: Moments,
    ttft_target_s: npt.ArrayLike,
    tpot_target_s: npt.ArrayLike,
    percentile: npt.ArrayLike,
    max_num_batched_tokens: npt.ArrayLike,
    replicas: npt.ArrayLike,
) -> Array:
    """`capacity` without regard to memory, and to a step of `EVERY` places: for many pairs at once."""
    rest, ttft_s = 1 - np.asarray(percentile, float) / 100, np.asarray(ttft_target_s, float)
    places = UTILISATIONS[::EVERY]

    def keeps(index: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        found = loaded(step, mix, places[index], percentile, max_num_batched_tokens, replicas)
        return (found.ttft_p <= ttft_s) & (found.tpot_beyond(tpot_target_s) <= rest)

    last = _last(keeps, np.shape(mix.prompt), len(places))
    return np.asarray(np.where(last >= 0, places[np.maximum(last, 0)], 0.0))


def _last(
    holds: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]],
    shape: tuple[int, ...],
    count: int = len(UTILISATIONS),
) -> npt.NDArray[np.int64]:
    """The last of `count` places (...) that holds, -1 for none; what holds at a place holds at all before it."""
    last, above = np.full(shape, -1), np.full(shape, count)
    while (above - last > 1).any():
        middle = np.maximum((last + above) // 2, 0)
        good = holds(middle)
        last, above = np.where(good, middle, last), np.where(good, above, middle)
    return last


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


def _step_shares(steps: Array, weight: Array) -> Array:
    decodes = steps >= 1
    if not decodes.any():
        return np.zeros(len(STEP_BINS))
    bins = np.searchsorted(STEP_BINS, steps[decodes], side="right") - 1
    shares = np.bincount(bins, weight[decodes], len(STEP_BINS))
    return np.asarray(shares / shares.sum())


def _waiting_quantile(rate: Figure, per_token: Figure, mix: Moments, replicas: npt.ArrayLike, p: Figure) -> Array:
    """The percentile of waiting for the prefills of others, for one of `replicas` that take the least loaded first.

    Allen and Cunneen's G/G/n with Sakasegawa's exponent for the chance to wait (1977), and an exponential tail.
    """
    servers = np.maximum(1.0, replicas)
    service = np.asarray(per_token * mix.prompt)
    busy = rate * service
    cs2 = mix.prompt_squared / mix.prompt**2 - 1
    safe = np.minimum(busy, 0.999)
    waits = safe ** (np.sqrt(2 * (servers + 1)) - 1)
    if_waiting = (mix.burstiness_squared + cs2) / 2 * service / (servers * (1 - safe))
    quantile = if_waiting * np.log(np.maximum(waits / (1 - p), 1.0))
    return np.where(busy < 0.999, quantile, np.inf)


def _gamma_p99(mean: Figure, variance: Figure) -> Array:
    """P99 of the gamma distribution with this mean and variance."""
    shape = np.maximum(mean**2 / np.maximum(variance, 1e-12), _SHAPES[0])
    return np.asarray(np.interp(np.log(shape), _LOG_SHAPES, _P99_OVER_MEAN) * mean)
