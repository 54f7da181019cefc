"""The demo: one plan from the first part of a real trace, and its rest replayed under three policies.

Each policy gets a fresh fleet of the plan's own groups, the same requests at the same moments, and nothing else of the
others; what differs is what the gateway tells the engines (`policies`). Nothing is refused for having waited too long,
so that a policy that makes requests wait shows it in the waiting. A replica that dies is started again while the
replay goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from typing import Protocol

import httpx
import numpy as np

from kvantile_optimizer import plots, specfile, workload
from kvantile_optimizer.local import bursts, fleet, metrics, policies, probe, replay
from kvantile_optimizer.local.bursts import Wave
from kvantile_optimizer.local.flags import FleetSettings
from kvantile_optimizer.local.records import Clock, Request
from kvantile_optimizer.local.replay import Progress
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.report import Report
from kvantile_optimizer.spec import ServingPlan
from kvantile_optimizer.traces import Trace
from kvantile_optimizer.workload import Workload

FITTED_SHARE = 0.6
STREAM_INTERVAL = 64
"""Tokens a chunk. The first and the last token come when they would anyway, and those are what is measured; in between
each chunk costs the client and the gateway half a millisecond, of which two cores have none to spare."""
LATE_S = 0.5
"""Requests that leave later than this, engine seconds, are no longer the same requests at the same moments."""
PATIENCE_S = 3600.0
"""How long the gateway lets a request wait, engine seconds: longer than any replay."""
QUEUE_LENGTH = 100_000


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """How the demo runs; times are engine seconds."""

    speed: float
    seconds: float
    seed: int
    wave: Wave = field(default_factory=Wave)


@dataclass(frozen=True, slots=True)
class Scene:
    """What every policy shares."""

    spec: ServingPlan
    workloads: Sequence[Workload]
    held_out: Trace

    @property
    def rates(self) -> dict[str, float]:
        """Planned requests per second of each class."""
        return {item.name: item.requests_per_second for item in self.workloads}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy's replay: its figures' source and its memory."""

    run: metrics.Run
    memory: plots.KvSeries


class Bar(Protocol):
    """Makes a progress display of so many answers."""

    def __call__(self, title: str, total: int) -> AbstractContextManager[Progress]: ...


def scene(trace: Trace) -> Scene:
    """The demo's ServingPlan with its classes fitted on the first part of `trace`."""
    with as_file(files("kvantile_optimizer") / "data" / "demo.yaml") as path:
        spec = specfile.load(path).plans[0]
    longest = spec.spec.model.max_model_len
    fitted, held_out = bursts.split(trace, FITTED_SHARE)
    workloads = [
        workload.of_class(item, longest, fitted.only(fitted.labels == item.name)) for item in spec.spec.classes
    ]
    # A request that the model cannot hold would be refused under every policy and tell nothing.
    return Scene(spec, workloads, held_out.only(held_out.prompt + held_out.output <= longest))


async def compare(plan: Plan, shared: Scene, settings: DemoSettings, say: fleet.Say, bar: Bar) -> list[Outcome]:
    """Replays the held-out trace under every policy, Kvantile's first. Raises WorkError if a fleet cannot start."""
    requests = bursts.arrivals(shared.held_out, shared.rates, settings.seconds, settings.wave, settings.seed)
    lengths = {item.name: item.lengths for item in shared.workloads}
    return [
        await _measure(name, variant, requests, settings, say, bar)
        for name, variant in policies.variants(plan, lengths).items()
    ]


async def _measure(
    name: str, plan: Plan, requests: Sequence[Request], settings: DemoSettings, say: fleet.Say, bar: Bar
) -> Outcome:
    fleet_settings = FleetSettings(
        speed=settings.speed,
        stream_interval=STREAM_INTERVAL,
        queue_wait_s=PATIENCE_S,
        queue_length=QUEUE_LENGTH,
        seed=settings.seed,
    )
    async with fleet.running(plan, fleet_settings, say) as running, httpx.AsyncClient(trust_env=False) as http:
        async with replay.connected(
            replay.Target(running.gateway_url, plan.model.served_name, settings.speed)
        ) as player:
            await probe.reset(http, [url for _, url in running.replica_urls])
            with bar(policies.TITLES[name], len(requests)) as progress:
                clock = Clock(settings.speed)
                records = await player.play(requests, clock, progress)
        # Asked for again: a replica that was started anew may listen elsewhere.
        urls = [url for _, url in running.replica_urls]
        run = metrics.Run(name, plan, records, await probe.preemptions(http, urls), running.restarts)
        capacity = float(sum(group.kv_tokens * group.replicas for group in plan.groups))
        kv = probe.together(await probe.memory(http, urls, clock), capacity, metrics.last_s(records))
        return Outcome(run, kv)


def report(plan: Plan, shared: Scene, outcomes: Sequence[Outcome], rows: Sequence[metrics.Row]) -> Report:
    """What the page shows."""
    return Report(
        plan=plan,
        rows=rows,
        titles=policies.TITLES,
        verdict=metrics.verdict(rows, policies.TITLES),
        measured=[_measured(outcome) for outcome in outcomes],
        lengths=[_lengths(item, [outcome.run.plan for outcome in outcomes]) for item in shared.workloads],
        notes=notes(rows),
    )


def notes(rows: Sequence[metrics.Row]) -> list[str]:
    """What stands between the figures and a fair comparison, if anything."""
    found: list[str] = []
    for row in rows:
        title, restarts, late_s = policies.TITLES[str(row["policy"])], row["replicaRestarts"], row["sentLateP99Seconds"]
        if restarts:
            found.append(f"{title}: replicas that died were started again {restarts} times.")
        if isinstance(late_s, float) and late_s > LATE_S:
            found.append(f"{title}: this machine was too busy, a hundredth of the requests left {late_s:.1f} s late.")
    return found


def _measured(outcome: Outcome) -> plots.Measured:
    ttft = np.asarray([record.ttft_s for record in outcome.run.records if record.ttft_s is not None], dtype=np.float64)
    return plots.Measured(policies.TITLES[outcome.run.policy], ttft, outcome.memory)


def _lengths(item: Workload, plans: Sequence[Plan]) -> plots.ClassLengths:
    lengths = item.lengths
    marks = {
        plots.Mark(place, f"{title} on {route.group}", float(route.reserve_tokens), route.fractile)
        for place, (title, plan) in enumerate(zip(policies.TITLES.values(), plans, strict=True))
        for route in plan.routes_of(item.name)
        if route.form != "none"
    }
    return plots.ClassLengths(item.name, lengths.values, lengths.weights, sorted(marks))


def scenario(plan: Plan, settings: DemoSettings, requests: Mapping[str, float]) -> dict[str, object]:
    """What was compared, for the JSON."""
    return {
        "plan": plan.plan.name,
        "trace": "bundled, held-out part",
        "seconds": settings.seconds,
        "speed": settings.speed,
        "seed": settings.seed,
        "requestsPerSecond": dict(requests),
        "bursts": {
            "periodSeconds": settings.wave.period_s,
            "burstSeconds": settings.wave.burst_s,
            "factor": settings.wave.factor,
        },
    }
