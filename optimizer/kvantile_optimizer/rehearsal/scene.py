"""One group of a plan, alone with its share of the traffic: what all parts of a rehearsal replay.

Given the routing, groups do not touch each other, so each is replayed by itself. Of a large group a few replicas are,
at the load that each would have: arrivals are thinned by chance, which keeps a burst's share for each replica.
Requests that the group could not hold are left out; the gateway sends them elsewhere or refuses them in any manner.
What is drawn is kept, because rivals must be compared on the same requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvantile_optimizer.figures import Answers
from kvantile_optimizer.plan import Form, Group, Plan, PlanClass, Route
from kvantile_optimizer.rehearsal.requests import Stream, draw
from kvantile_optimizer.simulator.fleet import longest_tokens
from kvantile_optimizer.simulator.outcome import Outcome
from kvantile_optimizer.simulator.replica import Policy, ReplicaSpec, Requests, simulate_replica
from kvantile_optimizer.simulator.state import Floats, Ints
from kvantile_optimizer.waiting import Order
from kvantile_optimizer.workload import Workload

MOST_REPLICAS = 32
"""Replicas of a group that are replayed. Where prompts are long and replicas mostly idle, the chance of a free one
still grows with their number: eight of 26 had a P99 of TTFT 14 % too high. More cost no time, only span."""
TAIL_REQUESTS = 50
"""Requests wanted beyond the percentile of a class in each replay; five seeds then count the misses to 6 %."""
LEAST_SHARE = 0.1
"""Share of the group's requests below which a class does not make replays longer."""
FEWEST_REQUESTS, MOST_REQUESTS = 10_000, 40_000
"""Of one replay. Of 3,000 a third of the capacities that were found did not hold on fresh seeds; 40,000 take 0.1 to
0.4 s."""
FEWEST_OF_REPLICA = FEWEST_REQUESTS / 8
"""As many for each of them, or a large group would be played for too short a time to fill and empty."""

MOST_DRAWN = 8
"""Sets of requests that a scene keeps, 2 MB each: what its judges ask for again and again."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a group's engines admit: what a plan's routes say of form, phi, reservation and order."""

    form: Form
    phi: float
    reserve: tuple[int, ...]
    """Tokens, for each class of the scene."""
    order: Order


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A class on the group."""

    item: PlanClass
    workload: Workload
    route: Route
    stream: Stream
    engine_seconds: float
    """w: engine time that a request brings, as the plan counts it."""
    served: float = 1.0
    """Share of the class that the plan serves on all of its groups."""

    @property
    def allowed(self) -> float:
        """Share of the requests that may miss a target."""
        return 1 - self.item.slo.percentile / 100


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """What one replay showed, of N requests of C classes."""

    class_index: Ints
    """(N,) into the scene's parts."""
    ttft_s: Floats
    """(N,)"""
    tpot_s: Floats
    """(N,) NaN for answers of one token."""
    preempted: npt.NDArray[np.bool_]
    """(N,) whether it was at least once."""
    goodput: float
    """Share of the requests that met both targets."""
    misses: Floats
    """(2, C) the shares of each class's requests that missed its TTFT and its TPOT target."""
    recomputed_s: float
    """Engine-seconds that preemptions brought again."""
    utilisation: float
    """rho: engine-seconds per second of arrivals and replica, those among them."""
    busy_fraction: float
    """Seconds that a replica is in steps for each second of arrivals, 1 at most."""
    kv_mean_share: float
    kv_p99_share: float
    """Of a replica's KV cache, idle time included."""


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """A group, the classes that are routed to it, and what is replayed of it."""

    group: Group
    parts: list[Part]
    count: int
    """Requests of a replay."""
    longest: int
    """Tokens of prompt and answer that a replica can hold."""
    _drawn: dict[tuple[int, int, float], tuple[Requests, Ints]] = field(default_factory=dict)

    @property
    def price_usd_per_second(self) -> float:
        """Of one replica."""
        return self.group.price_usd_per_hour / max(1, self.group.replicas) / 3600

    @property
    def offered(self) -> float:
        """Engine-seconds per second that arrive: the utilisation of a single replica that had it all."""
        return sum(part.stream.per_second * part.engine_seconds for part in self.parts)

    @property
    def computing(self) -> float:
        """The same without what the plan adds for its radius: what must be done in any case."""
        resident = [bool(part.stream.resident_share) for part in self.parts]
        return sum(
            part.stream.per_second * _engine_seconds(part.workload, self.group, kept)
            for part, kept in zip(self.parts, resident, strict=True)
        )

    @property
    def let_in(self) -> Scene:
        """The scene with what the plan leaves unserved, which no gateway turns away: it comes where the rest goes."""
        streams = [replace(part.stream, share=part.stream.share / part.served) for part in self.parts]
        parts = [replace(part, stream=stream) for part, stream in zip(self.parts, streams, strict=True)]
        return self if all(part.served > 1 - 1e-9 for part in self.parts) else replace(self, parts=parts, _drawn={})

    def replay(
        self, manner: Manner, seed: int, *, replicas: int | None = None, speed: float = 1.0, count: int | None = None
    ) -> Take:
        """Replays some `count` requests, `speed` times faster, on `replicas` replicas; those of the plan if not set."""
        replicas = replicas or self.group.replicas
        played = min(replicas, MOST_REPLICAS)
        requests, places = self._requests(seed, count or self.count, played / replicas)
        requests = replace(requests, arrival_s=requests.arrival_s / speed)
        policy = Policy(manner.form, np.array(manner.reserve)[places], manner.phi, manner.order)
        outcome = simulate_replica(requests, ReplicaSpec.of(self.group), policy, replicas=played, seed=seed)
        return self._take(requests, places, outcome)

    def _requests(self, seed: int, count: int, share: float) -> tuple[Requests, Ints]:
        key = (seed, count, share)
        if key not in self._drawn:
            streams = [replace(part.stream, share=part.stream.share * share) for part in self.parts]
            requests, places = draw(streams, seed, count)
            held = np.flatnonzero(requests.prompt + requests.output <= self.longest)
            targets = np.array([stream.ttft_s for stream in streams])[places[held]]
            if len(self._drawn) >= MOST_DRAWN:
                self._drawn.pop(next(iter(self._drawn)))
            self._drawn[key] = (replace(requests.only(held, math.inf), ttft_s=targets), places[held])
        return self._drawn[key]

    def _take(self, requests: Requests, places: Ints, outcome: Outcome) -> Take:
        answers, classes = self._answers(places, outcome), len(self.parts)
        missed = (~(answers.ttft_s <= answers.ttft_target_s), answers.tpot_s > answers.tpot_target_s)
        sent = np.maximum(1, np.bincount(places, minlength=classes))
        step = self.group.step_time
        prompt, steps = requests.prompt - requests.cached, requests.output - 1
        context = steps * (requests.prompt + requests.output / 2)
        brought = float((step.delta * prompt + step.beta * steps + step.gamma * context).sum())
        again = step.delta * outcome.recomputed_tokens
        return Take(
            class_index=places,
            ttft_s=answers.ttft_s,
            tpot_s=answers.tpot_s,
            preempted=outcome.preemptions > 0,
            goodput=float(answers.met.mean()),
            misses=np.array([np.bincount(places, late, classes) / sent for late in missed]),
            recomputed_s=again,
            utilisation=(brought + again) / (outcome.arriving_s * len(outcome.busy_s)),
            busy_fraction=float(outcome.utilisation.mean()),
            kv_mean_share=outcome.kv_mean_share(),
            kv_p99_share=outcome.kv_share(99),
        )

    def _answers(self, places: Ints, outcome: Outcome) -> Answers:
        slos = [part.item.slo for part in self.parts]
        return Answers(
            arrival_s=outcome.arrival_s,
            first_s=outcome.first_s,
            last_s=outcome.last_s,
            tokens=outcome.output,
            whole=outcome.served,
            ttft_target_s=np.array([slo.ttft_seconds for slo in slos])[places],
            tpot_target_s=np.array([slo.tpot_seconds for slo in slos])[places],
        )


def scenes(plan: Plan, workloads: list[Workload]) -> list[Scene]:
    """A scene for each group of `plan` that has replicas and traffic; `workloads` are its classes', in order."""
    both = zip(plan.classes, workloads, strict=True)
    pairs = {item.name: (item, workload) for item, workload in both if workload.requests_per_second > 0}
    resident = {(prefix.class_, prefix.group) for prefix in plan.resident_prefixes}
    found = []
    served = {item.name: sum(route.fraction for route in plan.routes_of(item.name)) for item in plan.classes}
    for group in plan.groups:
        routes = [route for route in plan.routes if route.group == group.name and route.fraction > 0]
        parts = [
            replace(
                _part(*pairs[route.class_], route, group, (route.class_, route.group) in resident),
                served=min(1.0, served[route.class_]),
            )
            for route in routes
            if route.class_ in pairs
        ]
        if parts and group.replicas:
            found.append(Scene(group, parts, _count(parts, group.replicas), longest_tokens(plan, group)))
    return found


def _part(item: PlanClass, workload: Workload, route: Route, group: Group, resident: bool) -> Part:
    stream = Stream(workload, route.fraction, item.slo.ttft_seconds, float(resident))
    # Plans of another origin may not say it.
    engine_seconds = route.engine_seconds_per_request or _engine_seconds(workload, group, resident)
    return Part(item, workload, route, stream, engine_seconds)


def _engine_seconds(workload: Workload, group: Group, resident: bool) -> float:
    """w of docs/model.md."""
    step, I, O = group.step_time, workload.prompt, workload.output  # noqa: E741 - as in the formulas
    cached = workload.prefix_share * np.minimum(workload.prefix_tokens, I) * resident
    return workload.expect(step.delta * (I - cached) + step.beta * (O - 1) + step.gamma * (O - 1) * (I + O / 2))


def _alike(burstiness: float) -> float:
    """How many requests share a burst, and so tell no more than one: the index of dispersion is burstiness squared."""
    return max(1.0, burstiness**2)


def _count(parts: list[Part], replicas: int) -> int:
    """Requests that show the tail of every class that is not rare; whole passes through the largest one's record."""
    played = min(replicas, MOST_REPLICAS)
    total = sum(part.stream.per_second for part in parts)
    shares = [part.stream.per_second / total for part in parts]
    wanted = max(
        TAIL_REQUESTS / max(part.allowed, 0.01) / max(share, LEAST_SHARE) * _alike(part.workload.burstiness)
        for part, share in zip(parts, shares, strict=True)
    )
    wanted = min(max(wanted, FEWEST_REQUESTS, FEWEST_OF_REPLICA * played), MOST_REQUESTS)
    largest = max(range(len(parts)), key=lambda place: shares[place])
    record, share = parts[largest].workload.record, parts[largest].stream.share * played / replicas
    one_pass = len(record) * share / shares[largest] if record is not None else wanted
    if one_pass <= MOST_REQUESTS:
        wanted = one_pass * min(math.ceil(wanted / one_pass), MOST_REQUESTS // one_pass)
    return round(wanted)
