"""What rows about plans have in common: public traces with targets, pools, synthetic mixes, plans that are kept.

A trace stands for one class and is cut into the half that is planned with and the half that is replayed. Clocks are
scaled to the rate of the scenario. Where a source rounds its clock (BurstGPT to seconds, Mooncake to buckets of three
seconds) the rows of one moment are spread evenly until the next tick. Prefixes count as computed each time, in plans
and replays alike: the traces say what an endless cache would hold, which no plan should count on.

A plan is made once for each state of the code and kept in a file: the runs of a row replay it with their seeds.
"""

from __future__ import annotations

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
PLAN_LIMIT_S = 120.0


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


def rotated(trace: Trace, seed: int) -> Trace:
    """The same requests with the same gaps, from another place on: what was recorded before it comes at the end."""
    start = int(np.random.default_rng(seed).integers(1, len(trace)))
    gaps = np.diff(trace.arrival_s, prepend=trace.arrival_s[0])
    gaps[0] = gaps[1:].mean()
    order = np.roll(np.arange(len(trace)), -start)
    return replace(
        trace,
        arrival_s=np.cumsum(gaps[order]),
        prompt=trace.prompt[order],
        output=trace.output[order],
        censored=trace.censored[order],
        labels=trace.labels[order],
        sessions=trace.sessions[order],
        prefix_tokens=trace.prefix_tokens[order],
    )
