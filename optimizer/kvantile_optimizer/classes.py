"""The `classes:` section of a ServingPlan from recorded traffic.

Requests become classes by the label that the trace gives them, or, when a number of classes is asked for, by the cuts
in prompt length that best tell output lengths apart: the gateway knows the prompt before it routes, the output only
after. Lengths are written as percentiles, of the Kaplan-Meier estimate where answers were cut off. What a trace cannot
know, the latency targets, gets defaults that the caller should state. The largest class is the default one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvantile_optimizer.errors import InputError
from kvantile_optimizer.radius import standard_error, validated
from kvantile_optimizer.spec import (
    MAX_CLASSES,
    PERCENTILES,
    ClassRobustness,
    Demand,
    IntegerRange,
    Match,
    OutputLengths,
    PromptLengths,
    RequestClass,
    Robustness,
    Slo,
)
from kvantile_optimizer.traces import Trace
from kvantile_optimizer.workload import MIN_INTERVALS, Array, Lengths, Record, kaplan_meier

DEFAULT_SLO = Slo(ttft_milliseconds=2000, tpot_milliseconds=100)
"""What an interactive chat is usually held to; a trace says nothing about it."""
_BINS = 64
"""Prompt lengths between which a cut may fall: a fiftieth of the requests apart is finer than any gain."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A class and what it was fitted on."""

    request_class: RequestClass
    requests: int
    censored: int
    has_arrivals: bool
    """Whether rate and burstiness are measured; otherwise they are 1."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A class's requests in one source, which was recorded for `span_s` seconds."""

    trace: Trace
    span_s: float


def by_label(sources: Sequence[tuple[str, Trace]]) -> list[Fitted]:
    """A class for each label; requests without one are named after their source, the first of the pair.

    Raises InputError when there are more labels than a plan may have classes.
    """
    parts: dict[str, list[_Part]] = {}
    for name, trace in sources:
        span = trace.arrivals().span_s
        names = {label: class_name(label or name) for label in dict.fromkeys(trace.labels.tolist())}
        # Labels that differ only in what a name cannot hold are one class: one part, or its time would count twice.
        named = np.array([names[label] for label in trace.labels.tolist()])
        for found in dict.fromkeys(names.values()):
            parts.setdefault(found, []).append(_Part(trace.only(named == found), span))
    if len(parts) > MAX_CLASSES:
        raise InputError(f"--classes: found {len(parts)} labels, allowed {MAX_CLASSES}; give a number of classes")
    return _defaulted([_fitted(name, found, []) for name, found in sorted(parts.items())])


def by_prompt(sources: Sequence[tuple[str, Trace]], count: int) -> list[Fitted]:
    """`count` classes by prompt length. Raises InputError when there are fewer different prompts."""
    prompt = np.concatenate([trace.prompt for _, trace in sources])
    output = np.concatenate([trace.output for _, trace in sources])
    edges = [0, *cuts(prompt, output, count), None]
    fitted = []
    for below, upto in pairwise(edges):
        bounds = IntegerRange(gte=below + 1 if below else None, lte=upto) if below or upto else None
        name = f"prompt-to-{upto}" if upto else f"prompt-over-{below}" if below else "requests"
        parts = [
            _Part(
                trace.only((trace.prompt > (below or 0)) & (trace.prompt <= (upto or np.inf))), trace.arrivals().span_s
            )
            for _, trace in sources
        ]
        match = [Match(prompt_tokens=bounds)] if bounds else []
        fitted.append(_fitted(name, [part for part in parts if len(part.trace)], match))
    return _defaulted(fitted)


def cuts(prompt: npt.NDArray[np.int64], output: npt.NDArray[np.int64], count: int) -> list[int]:
    """The `count` - 1 prompt lengths, each the last of its class, that leave least variance of log(output) within.

    Exact over at most 64 candidate lengths by dynamic programming. Raises InputError when there are too few.
    """
    ends = np.unique(np.quantile(prompt, np.arange(1, _BINS + 1) / _BINS, method="inverted_cdf"))
    if count > len(ends):
        raise InputError(f"--classes: found {count}, allowed at most {len(ends)} for these prompts")
    place = np.searchsorted(ends, prompt)
    logs = np.log(output)
    sums = np.stack([np.bincount(place, values, len(ends)) for values in (np.ones_like(logs), logs, logs**2)])
    number, first, second = np.concatenate([np.zeros((3, 1)), np.cumsum(sums, axis=1)], axis=1)

    def within(start: npt.NDArray[np.int64], end: int) -> Array:
        return np.asarray(
            (second[end] - second[start]) - (first[end] - first[start]) ** 2 / (number[end] - number[start])
        )

    best = np.array([np.inf] + [within(np.array([0]), end)[0] for end in range(1, len(ends) + 1)])
    choices: list[list[int]] = []
    for classes in range(2, count + 1):
        starts = [np.arange(classes - 1, end) for end in range(len(ends) + 1)]
        totals = [
            best[start] + within(start, end) if len(start) else np.array([np.inf]) for end, start in enumerate(starts)
        ]
        choices.append([int(np.argmin(total)) + classes - 1 for total in totals])
        best = np.array([total.min() for total in totals])
    found, end = [], len(ends)
    for choice in reversed(choices):
        end = choice[end]
        found.append(int(ends[end - 1]))
    return found[::-1]


def class_name(label: str) -> str:
    """A label as a class name: lower-case letters, digits and hyphens, at most 63."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:63].strip("-") or "requests"


def _fitted(name: str, parts: list[_Part], match: list[Match]) -> Fitted:
    prompt = np.concatenate([part.trace.prompt for part in parts]).astype(float)
    output = np.concatenate([part.trace.output for part in parts]).astype(float)
    censored = np.concatenate([part.trace.censored for part in parts])
    weights = np.ones(len(output))
    tokens, mass = kaplan_meier(output, weights, censored, np.full(len(output), output.max()))
    rate, burstiness = _arrivals(parts)
    demand = Demand(
        requests_per_second=_decimal(rate or 1.0),
        burstiness=_decimal(1.0 if burstiness is None else burstiness),
        prompt_tokens=PromptLengths(**_percentiles(Lengths.of(prompt, weights, prompt.max()))),
        output_tokens=OutputLengths(**_percentiles(Lengths.of(tokens, mass, output.max()))),
    )
    robustness = ClassRobustness(radius=_radius(parts))
    request_class = RequestClass(name=name, match=match, slo=DEFAULT_SLO, demand=demand, robustness=robustness)
    return Fitted(request_class, len(output), int(censored.sum()), rate is not None)


def _radius(parts: list[_Part]) -> str:
    """Tokens, from the answers in order of arrival; without arrival times as if each answer told nothing of the next.

    Sources count as recorded one after another, like everywhere here.
    """
    tokens = np.concatenate([part.trace.output for part in parts]).astype(float)
    censored = np.concatenate([part.trace.censored for part in parts])
    record = Record(tokens, censored, float(tokens.max()))
    timed = all(np.isfinite(part.trace.arrival_s).all() for part in parts)
    return _decimal(validated(record, Robustness().order) if timed else standard_error(record.lengths()))


def _percentiles(lengths: Lengths) -> dict[str, int]:
    known = {f"p{percent}": int(lengths.quantile(percent / 100)) for percent in PERCENTILES}
    return {**known, "max": int(lengths.upper)}


def _arrivals(parts: list[_Part]) -> tuple[float | None, float | None]:
    """Rate over the time that the sources were recorded for, and the coefficient of variation of the intervals."""
    timed = [part for part in parts if part.span_s > 0]
    if not timed:
        return None, None
    rate = sum(len(part.trace) for part in timed) / sum(part.span_s for part in timed)
    intervals = np.concatenate([np.diff(part.trace.arrival_s) for part in timed])
    enough = len(intervals) >= MIN_INTERVALS and intervals.sum() > 0
    return rate, float(intervals.std() / intervals.mean()) if enough else None


def _decimal(value: float) -> str:
    """Four significant digits without an exponent, never rounded to nothing when above it nor beyond a quantity."""
    value = min(value, 999_999_999.0)
    digits = max(0, 3 - int(np.floor(np.log10(value)))) if value > 0 else 0
    text = f"{max(value, 1e-9 if value > 0 else 0.0):.{min(digits, 9)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _defaulted(fitted: list[Fitted]) -> list[Fitted]:
    """Marks the class of most requests, the first of equals, as the default one."""
    largest = max(range(len(fitted)), key=lambda index: (fitted[index].requests, -index))
    return [
        Fitted(
            item.request_class.model_copy(update={"default": index == largest}),
            item.requests,
            item.censored,
            item.has_arrivals,
        )
        for index, item in enumerate(fitted)
    ]
