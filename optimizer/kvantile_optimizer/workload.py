"""Request classes as the mathematics sees them: how much arrives, and jointly weighted prompt and output lengths.

A class comes from its description in the spec (a log-normal or percentiles), from recorded lengths, or from what the
gateway saw. Answers that were cut off are censored: Kaplan-Meier hands their weight to longer answers, and what lies
beyond the longest one to the class's limit L. Descriptions become grids of quantiles, prompt and output independent,
so that the rest of the optimizer knows one form only and the same spec always gives the same numbers. Whatever does
not fit the model's length is cut or left out and counted in the result, never silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from scipy import special

from kvantile_optimizer import traces
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.observation import ClassObservation, length_bucket
from kvantile_optimizer.spec import Demand, PromptLengths, RequestClass, ServingPlan
from kvantile_optimizer.traces import Trace

Array: TypeAlias = npt.NDArray[np.float64]
Found = TypeVar("Found")

PROMPT_POINTS, OUTPUT_POINTS = 64, 156
"""Grid of a described class, 9,984 points together: finer in outputs, whose upper tail decides the reservation."""
MOST_POINTS = 10_000_000
"""Of all described classes of a plan together, 240 MB: beyond a thousand classes each has a coarser grid."""
_TAIL = 0.9
"""Half of the points lie above this quantile, so that P99 comes out within 2 % of what was described."""
MIN_ANSWERS = 100
"""Fewer answers than this neither replace a class's lengths nor count as a drift."""
MIN_INTERVALS = 30
"""Fewer intervals than this do not replace a class's burstiness."""
DRIFT_P_VALUE = 0.001
DRIFT_DISTANCE = 0.05
"""Relative Wasserstein distance below which a drift, however certain, is not worth a new plan."""
_SAME = 1e-12
_COUNTABLE = 2**20
"""Tokens up to which lengths are counted one by one: 8 MB of counters."""


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """A weighted distribution of output tokens on [1, upper]."""

    values: Array
    """(N,) tokens, ascending, distinct."""
    weights: Array
    """(N,) probabilities, positive, of sum 1."""
    upper: float
    """L: no answer is longer."""
    samples: int = 0
    """Answers behind it; 0 when a person described it."""

    @classmethod
    def of(cls, tokens: npt.ArrayLike, weights: npt.ArrayLike, upper: float, samples: int = 0) -> Lengths:
        """Sorts, merges and normalises `tokens` (N,) with `weights` (N,)."""
        values, mass = _histogram(np.asarray(tokens, float), np.asarray(weights, float))
        kept = mass > 0
        return cls(values[kept], mass[kept] / mass.sum(), float(upper), samples)

    @property
    def mean(self) -> float:
        """Tokens."""
        return float(self.values @ self.weights)

    @property
    def std(self) -> float:
        """Tokens; of the population."""
        return math.sqrt(float((self.values - self.mean) ** 2 @ self.weights))

    def cdf(self, tokens: npt.ArrayLike) -> Array:
        """F at `tokens`, of any shape."""
        below = np.searchsorted(self.values, np.asarray(tokens, float), side="right")
        cumulative = np.concatenate(([0.0], np.cumsum(self.weights)))
        return np.asarray(np.minimum(1.0, cumulative[below]))

    def quantile(self, probability: float) -> float:
        """F^-1, its lower end: the least length whose F is at least `probability`."""
        index = int(np.searchsorted(np.cumsum(self.weights), probability - _SAME, side="left"))
        return float(self.values[min(index, len(self.values) - 1)])

    def excess(self, tokens: npt.ArrayLike) -> Array:
        """E[(O - r)^+] at r = `tokens`, of any shape."""
        at = np.asarray(tokens, float)
        above = np.searchsorted(self.values, at, side="right")
        mass = np.concatenate((np.cumsum(self.weights[::-1])[::-1], [0.0]))
        total = np.concatenate((np.cumsum((self.values * self.weights)[::-1])[::-1], [0.0]))
        return np.asarray(np.maximum(0.0, total[above] - at * mass[above]))


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Answers in order of arrival."""

    tokens: Array
    """(N,)"""
    censored: npt.NDArray[np.bool_]
    """(N,) whether `max_tokens` cut the answer off."""
    upper: float
    """L; infinite on the whole line."""
    arrival_s: Array | None = None
    """(N,) when their requests came, ascending; None where that was not kept."""
    prompt: Array | None = None
    """(N,) prompt tokens of the same requests."""

    def __len__(self) -> int:
        return len(self.tokens)

    def lengths(self, start: int = 0, end: int | None = None) -> Lengths:
        """The distribution of the answers from `start` to before `end`, weighted by Kaplan-Meier.

        On the whole line answers that were cut off count as long as the longest one, where nothing lies beyond.
        """
        tokens, censored = self.tokens[start:end], self.censored[start:end]
        limit = self.upper if math.isfinite(self.upper) else float(self.tokens.max())
        values, weights = kaplan_meier(tokens, np.ones(len(tokens)), censored, np.full(len(tokens), limit))
        return Lengths.of(values, weights, self.upper, len(tokens))


def _histogram(tokens: Array, weights: Array) -> tuple[Array, Array]:
    """Distinct lengths in rising order and the weight of each; whole ones are counted, ten times as fast as sorted."""
    if len(tokens) and 0 <= tokens.min() <= tokens.max() <= _COUNTABLE:
        whole = tokens.astype(np.int64)
        if np.array_equal(whole, tokens):
            mass = np.asarray(np.bincount(whole, weights), float)
            values = np.flatnonzero(mass)
            return values.astype(float), mass[values]
    values, index = np.unique(tokens, return_inverse=True)
    mass = np.asarray(np.bincount(index, weights, len(values)), float)
    return np.asarray(values, float), mass


@dataclass(frozen=True, eq=False)
class Workload:
    """A request class: its arrivals and its lengths, N jointly weighted samples."""

    name: str
    requests_per_second: float
    burstiness: float
    """Coefficient of variation of the times between arrivals."""
    prompt: Array
    """(N,) tokens, at least 1."""
    output: Array
    """(N,) tokens from 1 to `upper`."""
    weight: Array
    """(N,) probabilities of sum 1."""
    upper: float
    """L: the longest answer that is possible, tokens."""
    max_model_len: int
    samples: int = 0
    """Requests behind it; 0 when a person described it."""
    prefix_tokens: int = 0
    """Tokens of the prefix that requests share."""
    prefix_share: float = 0.0
    """Share of the requests that carry it."""
    too_long_share: float = 0.0
    """Share of the requests whose prompt leaves no room for an answer; they are left out."""
    cut_share: float = 0.0
    """Share of the rest whose answer was cut to what the model's length leaves."""
    borrowed_share: float = 0.0
    """Share of the weight that requests of other classes have here, because this one has few of its own."""
    record: Record | None = None
    """The answers in order of arrival, where that order is known."""
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """What `make` gives, asked the first time only: a class is looked up again with every plan that has it.

        The key names all that the answer depends on beside the class itself.
        """
        if key not in self._known:
            self._known[key] = make()
        found: Found = self._known[key]
        return found

    @cached_property
    def lengths(self) -> Lengths:
        """The distribution of outputs alone."""
        return Lengths.of(self.output, self.weight, self.upper, self.samples)

    @property
    def longest(self) -> Array:
        """(N,) tokens of the longest answer that the prompt of each sample leaves room for."""
        return np.maximum(np.minimum(self.upper, self.max_model_len - self.prompt), self.output)

    def expect(self, values: npt.ArrayLike) -> float:
        """The mean of `values` (N,), one for each sample."""
        return float(np.asarray(values, float) @ self.weight)

    @property
    def faults(self) -> list[str]:
        """What no workload may be, a line for each: the field, what was found and what is allowed."""
        numbers = [
            ("requests_per_second", self.requests_per_second, 0 < self.requests_per_second < math.inf, "above 0"),
            ("burstiness", self.burstiness, 0 <= self.burstiness < math.inf, "of at least 0"),
            ("upper", self.upper, 1 <= self.upper < math.inf, "of at least 1"),
        ]
        found = [
            (name, f"{value:g}", f"a finite number {allowed}") for name, value, right, allowed in numbers if not right
        ]
        for name, values, least, most in (
            ("prompt", self.prompt, 1, math.inf),
            ("output", self.output, 1, self.upper),
            ("weight", self.weight, 0, math.inf),
        ):
            wrong = values[~(np.isfinite(values) & (values >= least) & (values <= most))]
            if len(wrong):
                limit = f" to {most:g}" if math.isfinite(most) else " or more"
                found.append((name, f"{wrong[0]:g}", f"finite numbers, {least}{limit}"))
        if not len(self.prompt) == len(self.output) == len(self.weight) > 0:
            sizes = f"{len(self.prompt)}, {len(self.output)} and {len(self.weight)} samples"
            found.append(("prompt, output and weight", sizes, "equally many, at least one"))
        elif not found and not math.isclose(float(self.weight.sum()), 1.0, rel_tol=1e-6):
            found.append(("weight", f"a sum of {self.weight.sum():g}", "1"))
        return [f"class {self.name}: {name}: found {value}, allowed {allowed}" for name, value, allowed in found]

    @property
    def warnings(self) -> list[str]:
        """What was left out or cut, in words."""
        notes = []
        if self.too_long_share > 0:
            notes.append(
                f"class {self.name}: {self.too_long_share:.2%} of the prompts do not fit {self.max_model_len} tokens"
                " and are left out"
            )
        if self.cut_share > 0:
            notes.append(f"class {self.name}: {self.cut_share:.2%} of the answers are cut to what the model can hold")
        if self.borrowed_share > 0:
            notes.append(
                f"class {self.name}: only {self.samples} requests are recorded, so those of the other classes count "
                f"for {self.borrowed_share:.0%} of its lengths"
            )
        return notes


def of_plan(plan: ServingPlan, config_maps: Mapping[tuple[str, str, str], str]) -> list[Workload]:
    """The workloads of a plan's classes, in its order.

    `config_maps` is (namespace, name, key) to text. Raises InputError, one line for each fault, with its path.
    """
    workloads, faults = [], []
    for index in range(len(plan.spec.classes)):
        try:
            workloads.append(of_plan_class(plan, index, config_maps))
        except InputError as error:
            faults += str(error).splitlines()
    if faults:
        raise InputError("\n".join(faults))
    return workloads


class MissingSamplesError(InputError):
    """A class refers to a ConfigMap that is not at hand; a cluster may have it."""


def of_plan_class(plan: ServingPlan, index: int, config_maps: Mapping[tuple[str, str, str], str]) -> Workload:
    """The workload of `spec.classes[index]`. Raises InputError, MissingSamplesError among them."""
    request_class, path = plan.spec.classes[index], f"spec.classes[{index}]"
    trace = _recorded(request_class.demand, plan.metadata.namespace, config_maps, path)
    most = MOST_POINTS // len(plan.spec.classes)
    return of_class(request_class, plan.spec.model.max_model_len, trace, path=path, most_points=most)


def _recorded(
    demand: Demand, namespace: str, config_maps: Mapping[tuple[str, str, str], str], path: str
) -> Trace | None:
    if demand.samples is None:
        return None
    ref = demand.samples.config_map_ref
    where = f"{path}.demand.samples.configMapRef"
    text = config_maps.get((namespace, ref.name, ref.key))
    if text is None:
        have = ", ".join(sorted("/".join(key) for key in config_maps)) or "the file has no ConfigMap"
        raise MissingSamplesError(
            f"{where}: found {namespace}/{ref.name}/{ref.key}, allowed a ConfigMap in the file ({have})"
        )
    return traces.parse(text, where)


def of_class(
    request_class: RequestClass,
    max_model_len: int,
    trace: Trace | None = None,
    *,
    path: str | None = None,
    most_points: int = MOST_POINTS,
) -> Workload:
    """The workload of one class of a spec; `trace` holds its recorded lengths when it refers to some.

    A class that is only described has `most_points` lengths at most.

    Raises InputError, naming `path` (the class itself unless given), when there are no such lengths.
    """
    path = path or f"class {request_class.name}"
    demand, prefix = request_class.demand, request_class.shared_prefix
    rate = float(demand.requests_per_second)
    if trace is not None:
        base = of_trace(request_class.name, trace, max_model_len, requests_per_second=rate, path=path)
    elif demand.prompt_tokens is None or demand.output_tokens is None:
        raise InputError(f"{path}.demand.samples: found no recorded lengths, allowed a trace")
    else:
        finer = min(1.0, math.sqrt(most_points / (PROMPT_POINTS * OUTPUT_POINTS)))
        points = [max(2, math.floor(finer * count)) for count in (PROMPT_POINTS, OUTPUT_POINTS)]
        prompt = _described(demand.prompt_tokens, points[0], f"{path}.demand.promptTokens")
        output = _described(demand.output_tokens, points[1], f"{path}.demand.outputTokens")
        limit = demand.output_tokens.max or np.inf
        base = _independent(request_class.name, prompt, output, max_model_len, limit, f"{path}.demand.promptTokens")
    return replace(
        base,
        requests_per_second=rate,
        burstiness=float(demand.burstiness),
        prefix_tokens=prefix.tokens if prefix else 0,
        prefix_share=float(prefix.share) if prefix else 0.0,
    )


def of_trace(
    name: str,
    trace: Trace,
    max_model_len: int,
    *,
    requests_per_second: float | None = None,
    path: str | None = None,
) -> Workload:
    """The workload that a trace records, prompt and output joined; `requests_per_second` overrides its arrivals.

    Raises InputError when no request fits `max_model_len`, or when no rate is known.
    """
    path = path or f"class {name}"
    base = _joined(name, trace.prompt, trace.output, np.ones(len(trace)), trace.censored, max_model_len, np.inf, path)
    arrivals = trace.arrivals()
    rate = arrivals.per_second if requests_per_second is None else requests_per_second
    if rate is None:
        raise InputError(f"{path}: found a trace without arrival times, allowed one that has them")
    burstiness = 1.0 if arrivals.burstiness is None else arrivals.burstiness
    record = _in_order(trace, max_model_len) if np.isfinite(trace.arrival_s).all() else None
    return replace(base, requests_per_second=rate, burstiness=burstiness, record=record)


def _in_order(trace: Trace, max_model_len: int) -> Record:
    """The answers of a trace that fit, cut as `_joined` cuts them."""
    room = max_model_len - trace.prompt
    fits = room > 0
    tokens = np.minimum(trace.output, room)[fits].astype(float)
    return Record(
        tokens,
        (trace.censored & (trace.output < room))[fits],
        float(room[fits].max()),
        trace.arrival_s[fits],
        trace.prompt[fits].astype(float),
    )


def of_observation(name: str, seen: ClassObservation, prior: Workload, since_seconds: float) -> Workload:
    """The workload that a gateway saw in `since_seconds`, with `prior` for what it saw too little of.

    Prompt and output are taken as independent: the gateway counts them apart. A class that got no request counts as
    one that got a single one, so that it keeps a route.
    """
    seconds = since_seconds if since_seconds > 0 else seen.arrival_seconds_sum
    rate = max(1, seen.requests) / seconds if seconds > 0 else prior.requests_per_second
    base = prior if seen.answers < MIN_ANSWERS or not seen.prompts else _observed(name, seen, prior)
    return replace(
        base,
        name=name,
        requests_per_second=rate,
        burstiness=_observed_burstiness(seen, prior.burstiness),
        prefix_tokens=prior.prefix_tokens,
        prefix_share=prior.prefix_share,
    )


def _observed(name: str, seen: ClassObservation, prior: Workload) -> Workload:
    tokens = np.clip(np.array([*seen.finished, *seen.censored], float), 1, prior.upper)
    counts = np.array([*seen.finished.values(), *seen.censored.values()], float)
    censored = np.arange(len(tokens)) >= len(seen.finished)
    tokens, counts = kaplan_meier(tokens, counts, censored, np.full(len(tokens), prior.upper))
    prompts = np.maximum(1, np.array(list(seen.prompts), float))
    base = _independent(
        name,
        _thinned(Lengths.of(prompts, list(seen.prompts.values()), np.inf), PROMPT_POINTS),
        _thinned(Lengths.of(tokens, counts, prior.upper), OUTPUT_POINTS),
        prior.max_model_len,
        prior.upper,
        f"class {name}",
    )
    return replace(base, samples=seen.answers)


def _observed_burstiness(seen: ClassObservation, prior: float) -> float:
    intervals = seen.requests - 1
    if intervals < MIN_INTERVALS or seen.arrival_seconds_sum <= 0:
        return prior
    mean = seen.arrival_seconds_sum / intervals
    return math.sqrt(max(0.0, seen.arrival_seconds_squared_sum / intervals / mean**2 - 1))


def kaplan_meier(tokens: Array, weights: Array, censored: npt.NDArray[np.bool_], limits: Array) -> tuple[Array, Array]:
    """Lengths and probabilities (N,) from lengths of which some are only known to be longer.

    The weight of a censored length goes to those beyond it (Efron's redistribution to the right, which is the
    Kaplan-Meier estimate); a censored length equal to one that ended counts as beyond it. Where nothing lies beyond,
    the censored answers are taken to reach their `limits` (N,). Others that are censored are left with weight 0.
    """
    times, index = np.unique(tokens, return_inverse=True)
    at_risk = np.cumsum(np.bincount(index, weights, len(times))[::-1])[::-1]
    ended = np.bincount(index, np.where(censored, 0.0, weights), len(times))
    survival = np.cumprod(1 - ended / at_risk)
    before = np.concatenate(([1.0], survival[:-1]))
    result = np.where(censored, 0.0, weights * (before / at_risk)[index])
    beyond = censored & (tokens >= (times[ended > 0].max() if ended.any() else 0))
    if beyond.any():
        result[beyond] = survival[-1] * weights[beyond] / weights[beyond].sum()
    return np.where(beyond, np.maximum(tokens, limits), tokens), result / result.sum()


def _joined(
    name: str,
    prompt: npt.ArrayLike,
    output: npt.ArrayLike,
    weight: Array,
    censored: npt.NDArray[np.bool_],
    max_model_len: int,
    limit: float,
    path: str,
) -> Workload:
    """A workload of joint samples (N,), without arrivals: what does not fit is left out or cut, and counted."""
    asked, answered = np.asarray(prompt, float), np.minimum(np.asarray(output, float), limit)
    fits = asked < max_model_len
    if not fits.any():
        raise InputError(
            f"{path}: found prompts of {asked.min():.0f} tokens and more, allowed some under {max_model_len}"
        )
    asked, answered, share = asked[fits], answered[fits], weight[fits]
    room = np.minimum(max_model_len - asked, limit)
    tokens, mass = kaplan_meier(np.minimum(answered, room), share, censored[fits] & (answered < room), room)
    kept = mass > 0
    return Workload(
        name=name,
        requests_per_second=0.0,
        burstiness=1.0,
        prompt=asked[kept],
        output=tokens[kept],
        weight=mass[kept],
        upper=float(room.max()),
        max_model_len=max_model_len,
        samples=int(fits.sum()),
        too_long_share=float(weight[~fits].sum() / weight.sum()),
        cut_share=float(share[answered > room].sum() / share.sum()),
    )


def _independent(name: str, prompt: Lengths, output: Lengths, max_model_len: int, limit: float, path: str) -> Workload:
    """The workload of two distributions that have nothing to do with each other."""
    weight = np.outer(prompt.weights, output.weights).ravel()
    prompts = np.repeat(prompt.values, len(output.values))
    outputs = np.tile(output.values, len(prompt.values))
    none = np.zeros(len(weight), bool)
    return replace(_joined(name, prompts, outputs, weight, none, max_model_len, limit, path), samples=0)


def _thinned(lengths: Lengths, points: int) -> Lengths:
    """The same distribution, or its quantiles in the middle of `points` strata where it has more lengths."""
    if len(lengths.values) <= points:
        return lengths
    places, weights = _strata(points)
    return Lengths.of([lengths.quantile(place) for place in places], weights, lengths.upper, lengths.samples)


def _described(given: PromptLengths, points: int, path: str) -> Lengths:
    """`points` lengths of a described distribution: its quantiles in the middle of as many strata, rounded."""
    places, weights = _strata(points)
    if given.mean is not None and given.p99 is not None:
        tokens = _log_normal(given.mean, given.p99, places, path)
    else:
        known = given.percentiles()
        steps = [0.0, *(percent / 100 for percent in known), 1.0]
        tokens = np.interp(places, steps, [1.0, *known.values(), float(given.max or 1)])
    upper = float(given.max or np.inf)
    return Lengths.of(np.clip(np.rint(tokens), 1, upper), weights, upper)


def _log_normal(mean: int, p99: int, places: Array, path: str) -> Array:
    """Quantiles at `places` (N,) of the log-normal of that mean and 99th percentile.

    log(p99 / mean) = z s - s^2 / 2 with z = 2.326 has a solution up to p99 / mean = exp(z^2 / 2) = 14.96; the smaller
    one is meant. Raises InputError beyond.
    """
    z = float(special.ndtri(0.99))
    ratio = math.log(p99 / mean)
    if 2 * ratio > z * z:
        allowed = math.floor(mean * math.exp(z * z / 2))
        raise InputError(f"{path}: found p99 {p99} with mean {mean}, allowed p99 at most {allowed} for a log-normal")
    sigma = z - math.sqrt(z * z - 2 * ratio)
    quantiles: Array = np.exp(math.log(mean) - sigma**2 / 2 + sigma * special.ndtri(places))
    return quantiles


def _strata(points: int) -> tuple[Array, Array]:
    """Midpoints and widths (points,) of intervals that cover [0, 1], half of them above `_TAIL`."""
    upper = points // 2
    widths = np.concatenate([np.full(points - upper, _TAIL / (points - upper)), np.full(upper, (1 - _TAIL) / upper)])
    return np.cumsum(widths) - widths / 2, widths


@dataclass(frozen=True, slots=True)
class Drift:
    """How far the output lengths of a class have moved."""

    shifted: bool
    p_value: float
    """Of the two-sample Kolmogorov-Smirnov test: the chance of such a difference without any drift."""
    relative_distance: float
    """Wasserstein distance of order 1 over the old mean."""

    def __bool__(self) -> bool:
        return self.shifted


def shifted(old: Lengths, new: Lengths) -> Drift:
    """Whether `new` lengths call for a new plan: surely different, and by more than 5 % of the old mean.

    Both are compared on the grid of `observation.length_bucket`, which what the gateway saw is on anyway.
    """
    before, after = _on_grid(old), _on_grid(new)
    grid = np.unique(np.concatenate([before.values, after.values]))
    gap = np.abs(before.cdf(grid) - after.cdf(grid))
    distance = float(gap[:-1] @ np.diff(grid)) / old.mean
    size = new.samples * old.samples / (new.samples + old.samples) if old.samples else new.samples
    p_value = float(special.kolmogorov(math.sqrt(size) * gap.max()))
    enough = new.samples >= MIN_ANSWERS
    return Drift(enough and p_value < DRIFT_P_VALUE and distance > DRIFT_DISTANCE, p_value, distance)


def _on_grid(lengths: Lengths) -> Lengths:
    tokens = [length_bucket(round(value)) for value in lengths.values]
    return Lengths.of(tokens, lengths.weights, lengths.upper, lengths.samples)
