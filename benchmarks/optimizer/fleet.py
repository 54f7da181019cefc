"""GPUs that a plan buys for 97 % goodput on bursty mixes, against planning with means and first come, first served.

Both planners plan, and both fleets are confirmed by replay of requests that neither planned with: where the replay says
there are too few, one more replica at a time, ours in the group where most requests miss; what was planned in excess
was planned. The rival knows mean lengths and the mean rate only, as other planners do. It takes one or two GPUs a
replica with the engine's default batch, whichever needs fewer GPUs for TPOT = alpha / (1 - rho) of mean lengths and the
mean wait of an M/M/c queue (Erlang C) of KV slots to meet the targets; nothing is reserved.

The target is on what both planned, since a fleet is bought before it is known. The notes say also how we stand against
the smallest fleet of the rival's shape that the replay confirms, which the rival could only know with hindsight; how
few replicas of that shape do in slack order, which is what order alone saves; and how many GPUs the same planner buys
for the busiest minute of its record, as many do who know that their traffic comes in bursts.

A replay is long against bursts and answers, and begins with an empty fleet that nobody judges: in five minutes of an
essay mix, whose answers take two, a third too few replicas look like enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.optimizer.row import Row, Run, Setting, Target
from benchmarks.optimizer.scenarios import MODEL, Ingredient, Mix, made, pool, serving_plan
from kvantile_optimizer import geometry, hardware
from kvantile_optimizer.figures import Answers
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.simulator.fleet import simulate_plan
from kvantile_optimizer.simulator.replica import Policy, ReplicaSpec, Requests, simulate_replica
from kvantile_optimizer.traces import Trace
from kvantile_optimizer.workload import Workload

Ints: TypeAlias = npt.NDArray[np.int64]
GOODPUT, PERCENTILE = 0.97, 97
SPAN_S = 1200
"""Of a record or a replay: some twenty bursts and ten of the longest class's answers."""
FEWEST_REQUESTS, QUICK_COUNT = 10_000, 500
UNJUDGED = 0.25
"""Share of a replay in which the fleet fills: two answers of the longest class."""
PEAK_S = 60
"""What peak rates are counted over: most monitoring has a figure a minute."""
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
    def count(self) -> int:
        """Requests of a record or a replay."""
        return max(FEWEST_REQUESTS, round(self.rate * SPAN_S))

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

    @property
    def judged(self) -> npt.NDArray[np.bool_]:
        """(N,) whether a request comes after the fleet has filled."""
        return np.asarray(self.requests.arrival_s >= UNJUDGED * self.requests.arrival_s[-1])

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
        return float(answers.met[self.judged].mean()) >= GOODPUT

    def enough(self, shape: Shape, start: int, policy: Policy) -> int:
        """The first number of replicas from `start` on that holds, MOST_REPLICAS when none does."""
        return next((count for count in range(start, MOST_REPLICAS) if self.holds(shape, count, policy)), MOST_REPLICAS)

    def fewest(self, shape: Shape, enough: int, policy: Policy) -> int:
        """The last number of replicas from `enough` down that holds."""
        replicas = enough
        while replicas > 1 and self.holds(shape, replicas - 1, policy):
            replicas -= 1
        return replicas

    def confirmed(self, plan: Plan) -> float:
        """GPUs of the plan, or with as many more replicas, each where most requests miss, as hold; may be infinite."""
        if not plan.groups or any(entry.fraction >= 1 for entry in plan.unserved):
            return math.inf
        while sum(group.replicas for group in plan.groups) <= MOST_REPLICAS:
            found = simulate_plan(plan, self.requests, self.index, self.seed)
            met = found.answers.met
            if float(met[self.judged].mean()) >= GOODPUT:
                return plan.gpu_count
            missed = found.group_index[~met & self.judged & (found.group_index >= 0)]
            plan = _with_one_more(plan, int(np.bincount(missed, minlength=len(plan.groups)).argmax()))
        return math.inf


@dataclass(frozen=True, slots=True)
class Rival:
    """What planning with means comes to, GPUs."""

    planned: int
    confirmed: int
    """With as many more replicas as the replay asks for."""
    hindsight: int
    """The fewest of its shape that the replay confirms."""
    slack: int
    """The same in slack order."""
    peak: int
    """Planned for the busiest minute, and confirmed."""
    tp: int
    """Of its shape; that for the busiest minute may have another."""

    @classmethod
    def of(cls, show: Audition, past: Trace, gpu: str, rate: float) -> Rival:
        """The rival that saw `past` come at `rate`."""
        workloads = show.mix.workloads(past, rate)
        shape, replicas = _bought(show.mix, workloads, gpu)
        enough = show.enough(shape, replicas, Policy())
        fewest = show.fewest(shape, enough, Policy())
        slack = show.fewest(shape, fewest, Policy(order="slack"))
        busiest = show.mix.workloads(past, peak_rate(past.arrival_s))
        other, more = _bought(show.mix, busiest, gpu)
        peak = more if other == shape and more >= fewest else show.enough(other, more, Policy())
        tp = shape.gpus
        return cls(tp * replicas, tp * enough, tp * fewest, tp * slack, other.gpus * peak, tp)

    def __str__(self) -> str:
        return (
            f"means planned {self.planned} of tp {self.tp}, confirmed {self.confirmed}; with hindsight "
            f"{self.hindsight}, in slack order {self.slack}; for the busiest minute {self.peak}"
        )


def run(setting: Setting, seed: int) -> Run:
    """The share of GPUs that plans save, in the median over the cases."""
    every = cases(setting.quick)
    begin = seed * len(every) // 5
    ours: list[float] = []
    rivals: list[Rival] = []
    notes = {}
    for case in setting.watch.within([*every[begin:], *every[:begin]]):
        mix, count = case.mix, QUICK_COUNT if setting.quick else case.count
        past = mix.drawn(setting, case.rate, case.count, 1000)
        spec = serving_plan(case.name, mix.classes(case.rate, PERCENTILE), [pool(case.gpu, 4)], mix.max_model_len)
        plan = made(setting, spec, mix.workloads(past, case.rate))
        show = Audition(mix, *mix.requests(mix.drawn(setting, case.rate, count, 2000 + seed)), seed)
        ours.append(show.confirmed(plan))
        rivals.append(Rival.of(show, past, case.gpu, case.rate))
        notes[case.name] = f"planned {plan.gpu_count}, confirmed {ours[-1]:g}; {rivals[-1]}"
    saved = {name: _saved(ours, [getattr(rival, name) for rival in rivals]) for name in ("hindsight", "peak")}
    notes["median"] = (
        f"{saved['hindsight']:.0%} against the rival's best fleet with hindsight, "
        f"{saved['peak']:.0%} where it plans for the busiest minute"
    )
    return Run({"saved": _saved(ours, [rival.confirmed for rival in rivals]), **saved}, notes)


def _saved(ours: list[float], theirs: list[int]) -> float:
    return float(np.median(1 - np.array(ours) / np.array(theirs)))


def _bought(mix: Mix, workloads: list[Workload], gpu: str) -> tuple[Shape, int]:
    """The shape and the replicas that means ask for."""
    planned = [(shape, planned_with_means(mix, workloads, shape)) for shape in (Shape.of(gpu, tp) for tp in TPS)]
    return min(planned, key=lambda each: each[0].gpus * each[1])


def peak_rate(arrival_s: npt.NDArray[np.float64]) -> float:
    """Requests per second in the busiest minute of (N,) ascending moments."""
    counts = np.bincount(((arrival_s - arrival_s[0]) / PEAK_S).astype(np.int64))
    return float(counts.max()) / PEAK_S


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
        limit_s=7200,
        needs_traces=True,
    ),
)
