"""GPUs that a plan buys for 97 % goodput on bursty mixes, against planning with means and first come, first served.

Both fleets are confirmed by replay of requests that neither planned with. Ours: what the plan buys, and where the
replay says it is too few, one more replica at a time in the group where most requests miss. The rival knows mean
lengths only, as other planners do. It takes one or two GPUs a replica with the engine's default batch, whichever needs
fewer GPUs for TPOT = alpha / (1 - rho) of mean lengths and the mean wait of an M/M/c queue (Erlang C) of KV slots to
meet the targets. To its favour, what counts is not that number but the smallest fleet of that shape that the replay
confirms with nothing reserved and first come, first served, even where its closed form would buy more. The notes also
say how few replicas of the better shape would do in slack order: what is there to be saved by order and shape alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.optimizer.row import Row, Run, Setting, Target
from benchmarks.optimizer.scenarios import MODEL, Ingredient, Mix, good_share, made, pool, serving_plan
from kvantile_optimizer import geometry, hardware
from kvantile_optimizer.figures import Answers
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.simulator.fleet import simulate_plan
from kvantile_optimizer.simulator.replica import Policy, ReplicaSpec, Requests, simulate_replica
from kvantile_optimizer.workload import Workload

Ints: TypeAlias = npt.NDArray[np.int64]
GOODPUT, PERCENTILE = 0.97, 97
COUNT, QUICK_COUNT = 10_000, 500
TPS = (1, 2)
"""Shapes that the rival chooses from."""
MOST_REPLICAS = 200
"""Beyond which no fleet is looked for; the largest here need some thirty."""

CODE = Ingredient("azure-code", 2000, 80)
CONVERSATION = Ingredient("azure-conv", 4000, 100)
CHAT = Ingredient("burstgpt", 2000, 100)
ESSAY = Ingredient("burstgpt", 5000, 120, long_answers=True)
MIXES = {
    "code-conv": {"code": CODE, "conv": CONVERSATION},
    "chat-code": {"chat": CHAT, "code": CODE},
    "chat-essay": {"chat": CHAT, "essay": ESSAY},
    "all-four": {"code": CODE, "conv": CONVERSATION, "chat": CHAT, "essay": ESSAY},
}
RATES = {"RTX4090": (5.0, 15.0), "L40S": (10.0, 30.0), "H100-80": (60.0,)}
"""Requests per second on each kind of GPU."""


@dataclass(frozen=True, slots=True)
class Case:
    """A bursty mix at a rate on one kind of GPU."""

    mix_name: str
    gpu: str
    rate: float

    @property
    def name(self) -> str:
        """Unique, and a name that Kubernetes would take."""
        return f"fleet-{self.mix_name}-{self.gpu.lower()}-{self.rate:g}"

    @property
    def mix(self) -> Mix:
        """Classes and arrivals."""
        return Mix(MIXES[self.mix_name], bursty=True)


@dataclass(frozen=True, slots=True)
class Shape:
    """A replica of the rival's fleet."""

    gpus: int
    spec: ReplicaSpec

    @classmethod
    def of(cls, gpu: str, tp: int) -> Shape:
        """Tensor parallel over `tp` GPUs, with the engine's defaults."""
        model, kind = geometry.catalogue()[MODEL.split("/")[1].removesuffix("-Instruct")], hardware.gpu_table()[gpu]
        step, batched, seqs = hardware.step_time(model, kind, tp, 1), 2048, 256
        return cls(tp, ReplicaSpec(hardware.kv_tokens(model, kind, tp, 1, batched, seqs), step))


def cases(quick: bool) -> list[Case]:
    """All of them, or one."""
    every = [Case(mix, gpu, rate) for mix in MIXES for gpu, rates in RATES.items() for rate in rates]
    return every[:1] if quick else every


@dataclass(frozen=True, slots=True, eq=False)
class Audition:
    """Requests that nobody planned with, which fleets are confirmed by."""

    mix: Mix
    requests: Requests
    index: Ints
    """(N,) into the mix's classes."""
    seed: int

    def holds(self, shape: Shape, replicas: int, policy: Policy) -> bool:
        """Whether so many replicas reach the goodput."""
        outcome = simulate_replica(self.requests, shape.spec, policy, replicas=replicas, seed=self.seed)
        parts = list(self.mix.parts.values())
        answers = Answers(
            outcome.arrival_s,
            outcome.first_s,
            outcome.last_s,
            outcome.output,
            outcome.served,
            np.array([part.ttft_ms / 1000 for part in parts])[self.index],
            np.array([part.tpot_ms / 1000 for part in parts])[self.index],
        )
        return float(answers.met.mean()) >= GOODPUT

    def fewest(self, shape: Shape, start: int, policy: Policy) -> float:
        """GPUs of the smallest fleet that holds, looked for up and then down from `start` replicas; may be infinite."""
        replicas = start
        while not self.holds(shape, replicas, policy):
            replicas += 1
            if replicas > MOST_REPLICAS:
                return math.inf
        while replicas > 1 and self.holds(shape, replicas - 1, policy):
            replicas -= 1
        return replicas * shape.gpus

    def confirmed(self, plan: Plan) -> float:
        """GPUs of the plan, or with as many more replicas, each where most requests miss, as hold; may be infinite."""
        if not plan.groups or any(entry.fraction >= 1 for entry in plan.unserved):
            return math.inf
        while sum(group.replicas for group in plan.groups) <= MOST_REPLICAS:
            found = simulate_plan(plan, self.requests, self.index, self.seed)
            if good_share(found) >= GOODPUT:
                return plan.gpu_count
            missed = found.group_index[~found.answers.met & (found.group_index >= 0)]
            plan = _with_one_more(plan, int(np.bincount(missed, minlength=len(plan.groups)).argmax()))
        return math.inf


def run(setting: Setting, seed: int) -> Run:
    """The share of GPUs that plans save, in the median over the cases."""
    every = cases(setting.quick)
    begin = seed * len(every) // 5
    saved: list[float] = []
    notes = {}
    for case in setting.watch.within([*every[begin:], *every[:begin]]):
        mix, count = case.mix, QUICK_COUNT if setting.quick else COUNT
        past = mix.workloads(mix.drawn(setting, case.rate, COUNT, 1000), case.rate)
        spec = serving_plan(case.name, mix.classes(case.rate, PERCENTILE), [pool(case.gpu, 4)], mix.max_model_len)
        plan = made(setting, spec, past)
        show = Audition(mix, *mix.requests(mix.drawn(setting, case.rate, count, 2000 + seed)), seed)
        ours, (theirs, told) = show.confirmed(plan), _rival(show, past, case.gpu)
        saved.append(1 - ours / theirs if math.isfinite(theirs) else math.nan)
        notes[case.name] = f"planned {plan.gpu_count}, confirmed {ours:g}; {told}"
    return Run({"saved": float(np.median(saved))}, notes)


def _rival(show: Audition, past: list[Workload], gpu: str) -> tuple[float, str]:
    """GPUs of the rival's fleet, and what else is worth knowing about it."""
    planned = [(shape, planned_with_means(show.mix, past, shape)) for shape in (Shape.of(gpu, tp) for tp in TPS)]
    shape, replicas = min(planned, key=lambda each: each[0].gpus * each[1])
    theirs = show.fewest(shape, replicas, Policy())
    slack = min(show.fewest(other, start, Policy(order="slack")) for other, start in planned)
    told = f"means and first come {theirs:g} of tp {shape.gpus} (by closed form {shape.gpus * replicas})"
    return theirs, f"{told}; the better of tp {TPS[0]} and {TPS[1]} in slack order {slack:g}"


def _with_one_more(plan: Plan, place: int) -> Plan:
    group = plan.groups[place]
    each = group.gpus // group.replicas
    more = group.model_copy(update={"replicas": group.replicas + 1, "gpus": group.gpus + each})
    return plan.model_copy(update={"groups": [*plan.groups[:place], more, *plan.groups[place + 1 :]]})


def planned_with_means(mix: Mix, past: list[Workload], shape: Shape) -> int:
    """Replicas that mean lengths ask for: rho and TPOT of the affine step, Erlang C for the wait for a KV slot."""
    rate = sum(work.requests_per_second for work in past)
    prompt, output = (
        sum(work.requests_per_second * work.expect(getattr(work, name)) for work in past) / rate
        for name in ("prompt", "output")
    )
    step = shape.spec.step_time
    busy_s = step.delta * prompt + (output - 1) * (step.beta + step.gamma * (prompt + output / 2))
    slots = min(shape.spec.max_num_seqs, int(shape.spec.kv_tokens / (prompt + output)))
    ttft_s, tpot_s = (
        min(getattr(part, f"{name}_ms") for part in mix.parts.values()) / 1000 for name in ("ttft", "tpot")
    )
    for replicas in range(1, MOST_REPLICAS):
        rho = rate * busy_s / replicas
        if rho >= 1 or (per_token_s := step.alpha / (1 - rho)) > tpot_s:
            continue
        service_s = step.delta * prompt + output * per_token_s
        wait_s = mean_wait(rate, service_s, replicas * slots)
        if wait_s + step.delta * prompt + per_token_s <= ttft_s:
            return replicas
    return MOST_REPLICAS


def mean_wait(rate: float, service_s: float, servers: int) -> float:
    """Mean seconds in the queue of an M/M/c (Erlang C, through the recursion of Erlang B); infinite when it grows."""
    offered = rate * service_s
    if servers < 1 or offered >= servers:
        return math.inf
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    share = offered / servers
    return blocked / (1 - share + share * blocked) * service_s / (servers - offered)


ROWS = (
    Row(
        "fleet",
        f"fewer GPUs for {GOODPUT:.0%} goodput on bursty mixes than with means and first come, in the median",
        (Target("saved", 0.20, "at least", "{:.0%}"),),
        run,
        limit_s=600,
        needs_traces=True,
    ),
)
