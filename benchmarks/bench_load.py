"""How far the closed forms of `load` are from the simulator, in which memory is there for all.

    python benchmarks/bench_load.py --traces FOLDER

FOLDER holds the public traces that docs/benchmarks.md names. Prompt and answer lengths are drawn from a trace in random
order; an 8B model on an L40S at 2,048 batched tokens serves them first come, first served. Gaps between arrivals are
gamma distributed. Each line is the closed form's error against the median of five replays with a seed each, below zero
where it is too hopeful, with the spread of the replays' P99 of TTFT beside it. docs/model.md quotes the table.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvantile_optimizer import geometry, hardware, load, traces, workload
from kvantile_optimizer.plan import StepTime
from kvantile_optimizer.simulator.replica import Policy, ReplicaSpec, Requests, simulate_replica
from kvantile_optimizer.workload import Array, Workload

SEEDS = range(5)
COUNT = 20_000
"""Requests for each replica, of which the first tenth is not counted."""
BATCHED, SEQS, MAX_MODEL_LEN, PERCENTILE = 2048, 4096, 16_384, 99
ROOM = 5
"""Memory of a replica over what the closed form calls its P99."""
LONG_ANSWERS = 4.0
"""Factor on the answers of BurstGPT, with a third of its prompts: no public trace has the lengths of reasoning."""
FILES = {
    "BurstGPT": "burstgpt.csv.gz",
    "Azure conversation": "azure_conv_2023.csv.gz",
    "Azure code": "azure_code_2023.csv.gz",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of traffic on some replicas at a load."""

    source: str
    ca2: float
    replicas: int
    rho: float


CASES = tuple(
    Case(source, ca2, replicas, rho)
    for source, ca2, replicas in (
        ("BurstGPT", 1.0, 1),
        ("BurstGPT", 4.0, 1),
        ("BurstGPT", 4.0, 4),
        ("Azure conversation", 1.0, 1),
        ("Azure code", 1.0, 1),
        ("Azure code", 1.0, 4),
        ("long answers", 1.0, 1),
    )
    for rho in (0.3, 0.6, 0.75 if source == "Azure code" else 0.85)
)


def main() -> None:
    """Prints the table, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    folder = parser.parse_args().traces
    print(
        "| traffic (mean prompt, answer) | ca2 | replicas | rho | TPOT mean | TPOT P99 | KV mean | KV P99 | TTFT P99 |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        work = traffic(folder, case.source, case.ca2)
        told, runs = closed_form(work, case), np.array([replayed(work, case, seed) for seed in SEEDS])
        errors = [f"{100 * error:+.0f} %" for error in told / np.median(runs, axis=0) - 1]
        spread = runs[:, -1].max() / runs[:, -1].min() - 1
        name = f"{case.source} ({work.expect(work.prompt):,.0f}, {work.expect(work.output):,.0f})"
        cells = [name, f"{case.ca2:g}", f"{case.replicas}", f"{case.rho:g}", *errors]
        print(f"| {' | '.join(cells)} (replays differ by {100 * spread:.0f} %) |", flush=True)


def traffic(folder: Path, source: str, ca2: float) -> Workload:
    """Lengths as recorded, with gaps of this squared coefficient of variation."""
    trace = traces.read(folder / FILES.get(source, FILES["BurstGPT"]))
    found = workload.of_trace("all", trace, MAX_MODEL_LEN, requests_per_second=1.0)
    found = replace(found, burstiness=float(np.sqrt(ca2)))
    if source in FILES:
        return found
    output = np.minimum(np.rint(LONG_ANSWERS * found.output), MAX_MODEL_LEN / 2)
    return replace(found, prompt=np.maximum(np.rint(found.prompt / 3), 1), output=output)


def step_time() -> StepTime:
    """Of an 8B model on an L40S."""
    return hardware.step_time(geometry.catalogue()["Llama-3.1-8B"], hardware.gpu_table()["L40S"], 1, 1)


def closed_form(work: Workload, case: Case) -> Array:
    """TPOT mean and P99, KV mean and P99 of a replica, TTFT P99; (5,), seconds and tokens."""
    found = load.loaded(step_time(), load.moments(work, PERCENTILE), case.rho, PERCENTILE, BATCHED, case.replicas)
    return np.array([found.tpot_mean, found.tpot_p(PERCENTILE), found.kv_mean, found.kv_p99, found.ttft_p], float)


def replayed(work: Workload, case: Case, seed: int) -> Array:
    """The same (5,) from one replay."""
    rng, count = np.random.default_rng(seed), COUNT * case.replicas
    rate = case.replicas * case.rho / float(load.engine_seconds(step_time(), load.moments(work, PERCENTILE)))
    rows = rng.choice(len(work.weight), count, p=work.weight / work.weight.sum())
    arrival_s = np.cumsum(rng.gamma(1 / case.ca2, case.ca2 / rate, count))
    # Memory for whatever comes: the closed forms are about time, what memory adds is a row of the program.
    spec = ReplicaSpec(int(ROOM * closed_form(work, case)[3]), step_time(), 16, SEQS, BATCHED)
    requests = Requests(arrival_s, work.prompt[rows].astype(np.int64), work.output[rows].astype(np.int64))
    found = simulate_replica(requests, spec, Policy(), replicas=case.replicas, seed=seed)
    counted = np.arange(count) >= count // 10
    decoding = counted & (found.output > 1)
    return np.array(
        [
            # Over tokens, as the closed form's mean is: an answer counts for as much as it is long.
            np.average(found.tpot_s[decoding], weights=found.output[decoding] - 1),
            np.percentile(found.tpot_s[decoding], PERCENTILE),
            found.kv_mean_share() * spec.kv_tokens,
            found.kv_share(99) * spec.kv_tokens,
            np.percentile(found.ttft_s[counted], PERCENTILE),
        ]
    )


if __name__ == "__main__":
    main()
