"""The simulator: how fast it is, that its shortcut changes nothing, and how near it comes to recorded engines.

Speed is measured by `benchmarks.bench_simulator` with lengths of BurstGPT; of its loads and policies the slowest
counts. Nearness: each recorded run is fitted on its first half and judged on its second; the search for the fit begins
at fixed points, so seeds change nothing there and one run is all. Beyond capacity the queue has to grow without bound:
with twice the requests the last ones must wait about twice as long.
"""

from __future__ import annotations

import numpy as np

from benchmarks import bench_simulator
from benchmarks.optimizer.row import Row, Run, Setting, Target
from kvantile_optimizer import calibration, runs, traces
from kvantile_optimizer.plan import StepTime
from kvantile_optimizer.simulator.replica import Policy, ReplicaSpec, Requests, simulate_replica
from kvantile_optimizer.waiting import Order

CASES, QUICK_CASES = 200, 5
"""Of each run: a thousand in all."""
FORMS = (Policy("none"), Policy("held", 24), Policy("pooled", 40, 0.1), Policy("none", watermark=0.1))
ORDERS: tuple[Order, ...] = ("fcfs", "deadline", "slack")
OVERLOAD_PER_S = 20.0
"""Requests a second for one replica that BurstGPT's lengths fill at six."""


def speed(setting: Setting, seed: int) -> Run:
    """Requests simulated a second by one core, at the slowest load and policy."""
    trace = traces.read(setting.trace("burstgpt.csv.gz"))
    simulate_replica(bench_simulator.drawn(trace, 1.0, 0, 100), bench_simulator.REPLICA, Policy(), replicas=2)
    loads = list(bench_simulator.LOADS.items())[: 1 if setting.quick else None]
    figures, notes = {}, {}
    for replicas in bench_simulator.SPEED_BOUNDS:
        speeds = {
            (load, name): bench_simulator.speed(trace, per_second, policy, replicas, seed)
            for load, per_second in loads
            for name, policy in bench_simulator.POLICIES.items()
        }
        load, name = min(speeds, key=speeds.__getitem__)
        figures[f"{replicas} replicas"] = speeds[load, name]
        notes[f"slowest with {replicas} replicas"] = f"{load} under {name}"
    return Run(figures, notes)


def exactness(setting: Setting, seed: int) -> Run:
    """The largest difference, in seconds, between jumping over steps and taking each, on small crowded replicas."""
    rng = np.random.default_rng(seed)
    worst = 0.0
    for _ in setting.watch.within(range(QUICK_CASES if setting.quick else CASES)):
        requests, replica = _crowded(rng)
        policy = FORMS[rng.integers(len(FORMS))]
        policy = Policy(
            policy.form, policy.reserve, policy.pooling, ORDERS[rng.integers(len(ORDERS))], policy.watermark
        )
        jumped, stepped = (simulate_replica(requests, replica, policy, shortcut=jump) for jump in (True, False))
        differs = not np.array_equal(jumped.preemptions, stepped.preemptions)
        differs |= not np.array_equal(jumped.served, stepped.served)
        times = [np.abs(getattr(jumped, name) - getattr(stepped, name)) for name in ("first_s", "last_s")]
        worst = max(worst, float("inf") if differs else float(np.nanmax(np.append(0.0, np.concatenate(times)))))
    return Run({"difference": worst})


def _crowded(rng: np.random.Generator) -> tuple[Requests, ReplicaSpec]:
    """Some thirty requests that come at once or nearly, and a replica with room for a few of them."""
    block, blocks, count = int(rng.choice([1, 4, 16])), int(rng.integers(20, 200)), int(rng.integers(10, 40))
    tokens = block * blocks
    arrival_s = np.cumsum(rng.exponential(rng.choice([0.05, 1.0, 10.0]), count) * (rng.random(count) < 0.7))
    prompt = rng.integers(1, max(2, tokens // 3), count)
    output = rng.integers(1, max(2, min(150, tokens // 2)), count)
    requests = Requests(arrival_s, prompt, output, rng.uniform(0.5, 40, count))
    alpha, beta, gamma, delta = rng.uniform(0.2, 1, 4) * (1.0, 0.1, 0.005, 0.05)
    step = StepTime(alpha=alpha, beta=beta, gamma=gamma, delta=delta)
    return requests, ReplicaSpec(tokens, step, block, int(rng.choice([3, 8, 64])), int(rng.choice([4, 32, 512])))


def nearness(setting: Setting, seed: int) -> Run:
    """The largest relative error over the recorded runs, of each time, on the half that the fit did not see."""
    errors: dict[str, float] = dict.fromkeys(bench_simulator.ERROR_BOUNDS, 0.0)
    notes = {}
    for name, engine in list(bench_simulator.RUNS.items())[-1 if setting.quick else 0 :]:
        recorded = runs.read(setting.trace("engine_runs") / name)
        found = calibration.calibrate(recorded.first(60) if setting.quick else recorded, engine)
        shown = ", ".join(f"{figure} {found.errors[figure]:+.1%}" for figure in errors)
        notes[name.removesuffix(".csv")] = shown
        errors = {figure: max(error, abs(found.errors[figure])) for figure, error in errors.items()}
    return Run({**errors, "growth": _growth(setting, seed)}, notes)


def _growth(setting: Setting, seed: int) -> float:
    """How many times longer the last tenth waits when twice as many requests come beyond capacity."""
    trace = traces.read(setting.trace("burstgpt.csv.gz"))
    few = 2_000 if setting.quick else 10_000
    waits = []
    for count in (few, 2 * few):
        requests = bench_simulator.drawn(trace, OVERLOAD_PER_S, seed, count)
        outcome = simulate_replica(requests, bench_simulator.REPLICA, Policy())
        waits.append(float(outcome.ttft_s[-count // 10 :].mean()))
    return waits[1] / waits[0]


ROWS = (
    Row(
        "simulator-speed",
        "simulator, one core, BurstGPT lengths",
        (
            Target("1 replicas", 400_000, "at least", "{:,.0f}/s", what="requests on one replica"),
            Target("8 replicas", 150_000, "at least", "{:,.0f}/s", what="requests on 8 replicas with routing"),
        ),
        speed,
        limit_s=180,
        needs_traces=True,
        alone=True,
    ),
    Row(
        "simulator-exact",
        f"simulator against single-stepping, {5 * CASES:,} random cases",
        (Target("difference", 1e-9, "at most", "{:.1e} s", "worst"),),
        exactness,
        limit_s=120,
    ),
    Row(
        "simulator-near",
        "simulator against recorded engines, second half",
        (
            Target("ttftMean", 0.025, "at most", "{:.2%}", what="TTFT mean"),
            Target("ttftP99", 0.025, "at most", "{:.2%}", what="TTFT P99"),
            Target("tpotP99", 0.05, "at most", "{:.2%}", what="TPOT P99"),
            Target("e2eP99", 0.035, "at most", "{:.2%}", what="E2E P99"),
            Target("growth", 1.8, "at least", "{:.2f}", what="overload: waiting when twice as many come, times"),
        ),
        nearness,
        limit_s=180,
        needs_traces=True,
        runs=1,
    ),
)
