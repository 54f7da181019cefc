"""What rows about plans have in common: public traces with targets, pools, synthetic mixes, plans that are kept.

A trace stands for one class and is cut into the half that is planned with and the half that is replayed. Clocks are
scaled to the rate of the scenario. Where a source rounds its clock (BurstGPT to seconds, Mooncake to buckets of three
seconds) the rows of one moment are spread evenly until the next tick. Prefixes count as computed each time, in plans
and replays alike: the traces say what an endless cache would hold, which no plan should count on.

A plan is made once for each state of the code and kept in a file: the runs of a row replay it with their seeds.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.optimizer.row import Setting
from kvantile_optimizer import planner, traces, workload
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.simulator.fleet import PlanOutcome, simulate_plan
from kvantile_optimizer.simulator.replica import Requests
from kvantile_optimizer.spec import ServingPlan
from kvantile_optimizer.traces import Trace
from kvantile_optimizer.workload import Workload

Bools = npt.NDArray[np.bool_]
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
PLAN_LIMIT_S = 30.0
"""The planner's own default."""
COLUMNS = ("prompt", "output", "censored", "labels", "sessions", "prefix_tokens")
"""Of a trace, in its order, after the arrivals."""


@dataclass(frozen=True, slots=True)
class Source:
    """A public trace, and what its requests are promised at P99."""

    file: str
    max_model_len: int
    ttft_ms: int
    tpot_ms: int
    rates: tuple[float, ...]
    """Requests per second at which it is replayed."""


SOURCES = {
    "burstgpt": Source("burstgpt.csv.gz", 8192, 2000, 100, (4, 12, 36)),
    "azure-code": Source("azure_code_2023.csv.gz", 16_384, 1000, 60, (3, 9, 27)),
    "azure-conv": Source("azure_conv_2023.csv.gz", 16_384, 2000, 80, (6, 18, 54)),
    # Mooncake's own thresholds are 30 s and 100 ms; a prompt of 120,000 tokens takes half of the former on small GPUs.
    "mooncake": Source("mooncake_conversation.csv.gz", 131_072, 30_000, 100, (1, 3, 9)),
}


def pool(gpu: str, per_node: int = 8, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - as it stands in YAML
    """A node pool of the spec, named after its GPU."""
    return {"name": gpu.lower(), "gpu": {"type": gpu, "perNode": per_node}, **more}


POOL_SETS: dict[str, list[dict[str, Any]]] = {
    "one": [pool("L40S", 4)],
    "large": [pool("H100-80"), pool("A100-80")],
    "small": [pool("L4", 4), pool("A10G", 4), pool("L40S", 4)],
}


def request_class(
    name: str, rate: float, ttft_ms: int, tpot_ms: int, *, percentile: int = 99, default: bool = True
) -> dict[str, Any]:
    """A class of the spec; the lengths that it must name are replaced by those of a trace."""
    lengths = {"p50": 100, "max": 1000}
    demand = {"requestsPerSecond": f"{rate:.6f}", "promptTokens": lengths, "outputTokens": lengths}
    slo = {"ttftMilliseconds": ttft_ms, "tpotMilliseconds": tpot_ms, "percentile": percentile}
    return {"name": name, "default": default, "slo": slo, "demand": demand}


def serving_plan(
    name: str, classes: list[dict[str, Any]], pools: list[dict[str, Any]], max_model_len: int
) -> ServingPlan:
    """The ServingPlan of a scenario."""
    spec = {"model": {"name": MODEL, "maxModelLen": max_model_len}, "nodePools": pools, "classes": classes}
    head = {"apiVersion": "kvantile.dev/v1alpha1", "kind": "ServingPlan", "metadata": {"name": name}}
    return ServingPlan.model_validate({**head, "spec": spec})


def made(setting: Setting, spec: ServingPlan, workloads: list[Workload]) -> Plan:
    """The plan of a scenario, made once and kept under the spec's name."""
    path = setting.build / f"plan-{spec.metadata.name}.json"
    if path.exists():
        return Plan.from_json(path.read_bytes())
    plan = planner.make_plan(spec, workloads, time_limit_s=PLAN_LIMIT_S)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(plan.model_dump_json(by_alias=True, exclude_none=True), encoding="utf-8")
    written.replace(path)
    return plan


@dataclass(frozen=True, slots=True)
class Scenario:
    """A trace on a set of pools at a rate; `slack` multiplies the trace's targets."""

    source: str
    pools: str
    rate: float
    slack: int = 1

    @property
    def name(self) -> str:
        """Unique, and a name that Kubernetes would take."""
        return f"{self.source}-{self.pools}-{self.rate:g}" + (f"-x{self.slack}" if self.slack > 1 else "")

    def plan(self, setting: Setting) -> Plan:
        """The plan for the trace's first half."""
        source = SOURCES[self.source]
        promised = request_class("all", self.rate, source.ttft_ms * self.slack, source.tpot_ms * self.slack)
        spec = serving_plan(self.name, [promised], POOL_SETS[self.pools], source.max_model_len)
        seen = halves(setting, self.source)[0]
        work = workload.of_trace("all", seen, source.max_model_len, requests_per_second=self.rate)
        return made(setting, spec, [work])

    def replayed(self, plan: Plan, half: Trace, seed: int) -> PlanOutcome:
        """The plan under half a trace, whose clock is scaled to the scenario's rate."""
        per_second = half.arrivals().per_second
        assert per_second is not None
        arrival_s = (half.arrival_s - half.arrival_s[0]) * per_second / self.rate
        requests = Requests(arrival_s, half.prompt, half.output)
        return simulate_plan(plan, requests, np.zeros(len(half), np.int64), seed)


def halves(setting: Setting, source: str) -> tuple[Trace, Trace]:
    """The half of a trace that is planned with, and the later half."""
    trace = _read(str(setting.trace(SOURCES[source].file)))
    first = np.arange(len(trace)) < len(trace) // 2
    return trace.only(first), trace.only(~first)


@cache
def _read(path: str) -> Trace:
    trace = traces.read(Path(path))
    return replace(trace, arrival_s=spread(trace.arrival_s))


def spread(arrival_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Ascending moments (N,) with those that are the same spread evenly over the clock's tick."""
    moments, first, counts = np.unique(arrival_s, return_index=True, return_counts=True)
    behind = np.arange(len(arrival_s)) - np.repeat(first, counts)
    tick_s = float(np.diff(moments).min())
    return np.asarray(arrival_s + tick_s * behind / np.repeat(counts, counts))


def rotated(trace: Trace, seed: int, count: int) -> Trace:
    """At least `count` requests: whole passes through the trace, each with the same gaps from another place on.

    What was recorded before that place comes at the end of its pass.
    """
    rng, size = np.random.default_rng(seed), len(trace)
    starts = rng.integers(1, size, math.ceil(count / size))
    order = np.concatenate([np.roll(np.arange(size), -start) for start in starts])
    gaps = np.diff(trace.arrival_s, prepend=trace.arrival_s[0])
    gaps[0] = gaps[1:].mean()
    columns = [getattr(trace, name)[order] for name in COLUMNS]
    return Trace(np.cumsum(gaps[order]), *columns)


@dataclass(frozen=True, slots=True)
class Ingredient:
    """A class of a synthetic mix: lengths from a public trace, and what is promised."""

    source: str
    ttft_ms: int
    tpot_ms: int
    long_answers: bool = False
    """Whether the answers are log-normal with a mean of 1,800 tokens instead of the trace's: no public one has such."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Classes in equal parts, and how their requests come."""

    parts: dict[str, Ingredient]
    bursty: bool
    max_model_len: int = 16_384

    def classes(self, rate: float, percentile: int) -> list[dict[str, Any]]:
        """The classes of the spec; the first is the default."""
        each = rate / len(self.parts)
        return [
            request_class(name, each, part.ttft_ms, part.tpot_ms, percentile=percentile, default=place == 0)
            for place, (name, part) in enumerate(self.parts.items())
        ]

    def drawn(self, setting: Setting, rate: float, count: int, seed: int) -> Trace:
        """`count` requests: rows of the classes' traces at random, labelled with the class."""
        rng = np.random.default_rng(seed)
        labels = np.array(list(self.parts))[rng.integers(0, len(self.parts), count)]
        prompt, output = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for name, part in self.parts.items():
            mine = labels == name
            prompt[mine], output[mine] = _lengths(setting, part, int(mine.sum()), self.max_model_len, rng)
        arrival_s = modulated(rng, rate, count) if self.bursty else np.cumsum(rng.exponential(1 / rate, count))
        none, empty = np.zeros(count, np.int64), np.full(count, "", np.str_)
        return Trace(arrival_s, prompt, output, np.zeros(count, np.bool_), labels, empty, none)

    def workloads(self, trace: Trace, rate: float) -> list[Workload]:
        """The classes as a trace shows them, each at its part of `rate`."""
        each = rate / len(self.parts)
        return [
            workload.of_trace(name, trace.only(trace.labels == name), self.max_model_len, requests_per_second=each)
            for name in self.parts
        ]

    def requests(self, trace: Trace) -> tuple[Requests, npt.NDArray[np.int64]]:
        """The requests of a replay, and their classes as places in the plan."""
        places = {name: place for place, name in enumerate(self.parts)}
        index = np.array([places[label] for label in trace.labels.tolist()])
        targets_s = np.array([part.ttft_ms / 1000 for part in self.parts.values()])[index]
        return Requests(trace.arrival_s - trace.arrival_s[0], trace.prompt, trace.output, targets_s), index


def _lengths(
    setting: Setting, part: Ingredient, count: int, max_model_len: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    trace = _read(str(setting.trace(SOURCES[part.source].file)))
    rows = rng.choice(np.flatnonzero(trace.prompt + trace.output <= max_model_len // 2), count)
    if not part.long_answers:
        return trace.prompt[rows], trace.output[rows]
    # Half a deviation of 0.8 in logarithms between median and mean: a tail as BurstGPT's answers have.
    answers = np.rint(rng.lognormal(math.log(1800) - 0.8**2 / 2, 0.8, count))
    return trace.prompt[rows], np.clip(answers, 1, max_model_len // 2).astype(np.int64)


BURST_S = 30.0
"""Mean length of a burst, and of the calm after it: long against an answer, short against a trace."""
BURST = 1.6
"""Rate in a burst over the mean rate; 0.4 in the calm, so a burst has four times its rate."""


def modulated(rng: np.random.Generator, rate: float, count: int) -> npt.NDArray[np.float64]:
    """Moments (count,) of Poisson arrivals whose rate switches between two levels, scaled to `rate` on average."""
    turns = 4 + int(2 * count / rate / BURST_S)
    ends_s = np.cumsum(rng.exponential(BURST_S, turns))
    levels = np.where(np.arange(turns) % 2, 2 - BURST, BURST)
    expected = np.concatenate(([0.0], np.cumsum(levels * np.diff(ends_s, prepend=0.0))))
    at = np.cumsum(rng.exponential(1.0, count)) / count * expected[-1]
    moments = np.interp(np.minimum(at, expected[-1]), expected, np.concatenate(([0.0], ends_s)))
    return np.asarray(moments * (count / rate) / moments[-1])


def good_share(found: PlanOutcome) -> float:
    """Goodput as the share of the requests that met both targets."""
    return float(found.answers.met.mean())
