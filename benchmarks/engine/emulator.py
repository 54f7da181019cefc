"""The emulator: how near it comes to recorded engines and to the simulator, without HTTP.

Each recorded run is fitted with the simulator on its first half; then the emulator's own scheduler and step times are
stepped through all of its requests, and the second half is compared. The search for the fit begins at fixed points, so
seeds change nothing there. The recordings do not say who was preempted; preemptions are those of the simulator.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks import bench_simulator
from benchmarks.optimizer.row import Row, Run, Setting, Target
from kvantile_engine.emulator.scheduler import Limits, Scheduler, Sequence
from kvantile_engine.emulator.steptime import StepTime
from kvantile_optimizer import calibration, runs
from kvantile_optimizer.calibration import RecordedRun
from kvantile_optimizer.simulator.replica import Policy, ReplicaSpec, Requests, simulate_replica

CASES, QUICK_CASES = 20, 2
COUNT = 2_000
"""Requests of a case: some minutes of engine time."""


def recorded(setting: Setting, seed: int) -> Run:  # noqa: ARG001 - a row's signature
    """The largest relative error over the recorded runs, of each time, on the half that the fit did not see."""
    figures = dict.fromkeys(("ttftMean", "ttftP99", "e2eMean", "e2eP99", "preemptions"), 0.0)
    notes = {}
    for name, engine in list(bench_simulator.RUNS.items())[-1 if setting.quick else 0 :]:
        run = runs.read(setting.trace("engine_runs") / name)
        run = run.first(60) if setting.quick else run
        first = np.arange(len(run)) < len(run) // 2
        starts = calibration._starts(run.first(len(run) // 2))  # noqa: SLF001 - the fit that `calibrate` judges
        step_time = calibration.fit(run, engine, first, starts)
        spec = engine.replica(step_time, run)
        stepped = step_through(run.requests, spec, prefix_caching=True)  # the engine's default
        times = RecordedRun(run.arrival_s, run.prompt, run.output, stepped.first_s, stepped.last_s)
        errors = _errors(run, times, ~first)
        simulated = int(simulate_replica(run.requests, spec, Policy()).preemptions.sum())
        errors["preemptions"] = abs(stepped.preemptions - simulated) / max(1, simulated)
        shown = ", ".join(f"{figure} {error:+.1%}" for figure, error in errors.items())
        notes[name.removesuffix(".csv")] = f"{shown} ({stepped.preemptions} preempted)"
        figures = {figure: max(error, abs(errors[figure])) for figure, error in figures.items()}
    return Run(figures, notes)


def _errors(run: RecordedRun, found: RecordedRun, which: npt.NDArray[np.bool_]) -> dict[str, float]:
    errors = {}
    for name, end in (("ttft", "first_s"), ("e2e", "last_s")):
        theirs = (getattr(run, end) - run.arrival_s)[which]
        ours = (getattr(found, end) - run.arrival_s)[which]
        errors[f"{name}Mean"] = float(ours.mean() / theirs.mean()) - 1
        errors[f"{name}P99"] = float(np.percentile(ours, 99) / np.percentile(theirs, 99)) - 1
    return errors


def against_simulator(setting: Setting, seed: int) -> Run:
    """The largest relative difference of any step's end, seen through first and last tokens, on random crowds."""
    rng = np.random.default_rng(seed)
    worst, preemptions = 0.0, 0
    for _ in setting.watch.within(range(QUICK_CASES if setting.quick else CASES)):
        requests, spec = _crowd(rng)
        simulated, stepped = simulate_replica(requests, spec, Policy()), step_through(requests, spec)
        for ours, theirs in ((stepped.first_s, simulated.first_s), (stepped.last_s, simulated.last_s)):
            worst = max(worst, float(np.max(np.abs(ours - theirs) / (theirs - requests.arrival_s))))
        preemptions += stepped.preemptions
    return Run({"difference": worst}, {"preemptions": str(preemptions)})


def _crowd(rng: np.random.Generator) -> tuple[Requests, ReplicaSpec]:
    """Requests at a random rate around what a small replica can take, its memory sometimes too small for them."""
    arrival_s = np.cumsum(rng.exponential(rng.choice([0.1, 0.25, 1.0]), COUNT))
    lengths = np.clip(rng.lognormal(5, 1, (2, COUNT)), 1, 2_000).astype(np.int64)
    tokens = int(rng.choice([8_000, 20_000, 200_000]))
    return Requests(arrival_s, lengths[0], lengths[1]), ReplicaSpec(tokens, bench_simulator.REPLICA.step_time)


class Stepped:
    """When each of N requests had its first and its last token, in seconds, and how many preemptions there were."""

    def __init__(self, count: int) -> None:
        self.first_s, self.last_s = np.full(count, np.nan), np.full(count, np.nan)
        self.preemptions = 0


def step_through(requests: Requests, spec: ReplicaSpec, *, prefix_caching: bool = False) -> Stepped:
    """Steps the emulator's scheduler through the requests as its engine does: each joins the first step after it.

    With prefix caching a preempted sequence finds its own blocks again, as long as nobody else needed them; the
    simulator, for requests without hash ids, has no cache.
    """
    scheduler = Scheduler(
        Limits(
            spec.kv_tokens // spec.block_size,
            spec.block_size,
            spec.max_num_seqs,
            spec.max_num_batched_tokens,
            prefix_caching=prefix_caching,
        )
    )
    model = spec.step_time
    step_time = StepTime(model.alpha, model.beta, model.gamma, model.delta)
    sequences = [
        Sequence(int(prompt), int(output), arrival=float(arrival))
        for arrival, prompt, output in zip(requests.arrival_s, requests.prompt, requests.output, strict=True)
    ]
    place = {sequence: index for index, sequence in enumerate(sequences)}
    found, entered, now = Stepped(len(sequences)), 0, 0.0
    while scheduler.busy or entered < len(sequences):
        if not scheduler.busy:
            now = max(now, sequences[entered].arrival)
        while entered < len(sequences) and sequences[entered].arrival <= now:
            scheduler.submit(sequences[entered])
            entered += 1
        step = scheduler.begin(now)
        now += step_time.seconds(len(step.decoding), step.context_tokens, step.prefill_tokens)
        for sequence in scheduler.end(step):
            index = place[sequence]
            if sequence.generated == 1:
                found.first_s[index] = now
            found.last_s[index] = now
    found.preemptions = scheduler.preemptions
    return found


ROWS = (
    Row(
        "recorded",
        "emulator against recorded engines, second half",
        (
            Target("e2eMean", 0.05, "at most", "{:.2%}", what="E2E mean"),
            Target("e2eP99", 0.05, "at most", "{:.2%}", what="E2E P99"),
            Target("ttftMean", 0.08, "at most", "{:.2%}", what="TTFT mean"),
            Target("ttftP99", 0.08, "at most", "{:.2%}", what="TTFT P99"),
            Target("preemptions", 0.15, "at most", "{:.1%}", what="preemptions, against the simulator's"),
        ),
        recorded,
        limit_s=180,
        needs_traces=True,
        runs=1,
    ),
    Row(
        "emulator-simulator",
        f"emulator against the simulator, {CASES} random crowds a run, largest difference",
        (Target("difference", 0.02, "at most", "{:.2g}", "worst"),),
        against_simulator,
        limit_s=300,
    ),
)
