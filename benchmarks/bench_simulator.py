"""How fast the simulator is, and how near to recorded engines.

    python benchmarks/bench_simulator.py [--trace burstgpt.csv.gz] [--runs FOLDER]

Speed: requests simulated per second of one core, five replays with a seed each, median and spread. Lengths are drawn
from the trace (meant for BurstGPT; the bundled one unless given), arrivals are Poisson. Bounds: 400,000 requests/s on
one replica of 20,000 KV tokens, 150,000 with eight replicas behind routing.

Nearness: each recorded run in FOLDER is fitted on its first half and judged on the second, if its settings are in RUNS.
Bounds: TTFT mean and P99 2.5 %, TPOT P99 5 %, E2E P99 3.5 %.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from kvantile_optimizer import calibration, runs, traces
from kvantile_optimizer.calibration import Engine
from kvantile_optimizer.plan import StepTime
from kvantile_optimizer.simulator.replica import Policy, ReplicaSpec, Requests, simulate_replica
from kvantile_optimizer.traces import Trace

SEEDS = range(5)
COUNT = 200_000
REPLICA = ReplicaSpec(20_000, StepTime(alpha=0.0075, beta=1e-4, gamma=5e-8, delta=3e-5))
LOADS = {"light": 2.0, "near capacity": 4.5, "overload": 8.0}
"""Requests per second and replica: BurstGPT's lengths fill 20,000 KV tokens at about 6."""
POLICIES = {
    "stock, fcfs": Policy(),
    "held P90, fcfs": Policy("held", 544),
    "pooled P90 at .1, slack": Policy("pooled", 544, 0.1, "slack"),
}
SPEED_BOUNDS = {1: 400_000, 8: 150_000}
ERROR_BOUNDS = {"ttftMean": 0.025, "ttftP99": 0.025, "tpotP99": 0.05, "e2eP99": 0.035}
RUNS = {
    "RTX4090_Llama-3.1-8B.csv": Engine(kv_tokens=41_408, max_num_seqs=256),
    "RTXPRO6000_Llama-3.1-8B.csv": Engine(max_num_seqs=128),
}


def main() -> None:
    """Prints one line for each figure, with its bound beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--runs", type=Path)
    arguments = parser.parse_args()
    trace = traces.read(arguments.trace) if arguments.trace else traces.bundled()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numba, one core")
    simulate_replica(drawn(trace, 1.0, 0, 100), REPLICA, Policy(), replicas=2)
    for replicas, bound in SPEED_BOUNDS.items():
        for load, per_second in LOADS.items():
            for name, policy in POLICIES.items():
                speeds = sorted(speed(trace, per_second, policy, replicas, seed) for seed in SEEDS)
                print(
                    f"{replicas} replica(s), {load:13}, {name:23}: {statistics.median(speeds):>9,.0f} requests/s"
                    f" ({speeds[0]:,.0f} to {speeds[-1]:,.0f}; bound {bound:,})"
                )
    if arguments.runs:
        for name, engine in RUNS.items():
            nearness(arguments.runs / name, engine)


def drawn(trace: Trace, per_second: float, seed: int, count: int = COUNT) -> Requests:
    """Requests with lengths of the trace's rows, in random order, that a replica can hold."""
    rng = np.random.default_rng(seed)
    fitting = np.flatnonzero(trace.prompt + trace.output <= REPLICA.kv_tokens)
    rows = rng.choice(fitting, count)
    arrival_s = np.cumsum(rng.exponential(1 / per_second, count))
    return Requests(arrival_s, trace.prompt[rows], trace.output[rows], ttft_s=2.0)


def speed(trace: Trace, per_second: float, policy: Policy, replicas: int, seed: int) -> float:
    """Requests simulated per second."""
    requests = drawn(trace, per_second * replicas, seed)
    began = time.perf_counter()
    simulate_replica(requests, REPLICA, policy, replicas=replicas, seed=seed)
    return COUNT / (time.perf_counter() - began)


def nearness(path: Path, engine: Engine) -> None:
    """The errors on the second half of a recorded run."""
    found = calibration.calibrate(runs.read(path), engine)
    for name, bound in ERROR_BOUNDS.items():
        error = found.errors[name]
        print(f"{path.stem}, {name}: {error:+.2%} (bound {bound:.1%}{'' if abs(error) <= bound else ', MISSED'})")


if __name__ == "__main__":
    main()
