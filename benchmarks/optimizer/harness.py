"""Runs rows and keeps what they found, so that an interrupted table goes on where it stopped.

A run's result is a file of its own, in a folder named after the state of the code: the optimizer's and the benchmarks'
sources, and the size of the traces. Results of another state are never taken for this one's. Rows that measure time
run alone and one after the other; the runs of all others share the workers.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import TypeAlias

import kvantile_optimizer
from benchmarks.optimizer.row import Row, Run, Setting, Watch
from benchmarks.optimizer.table import ROWS
from kvantile_optimizer.errors import KvantileError

Task: TypeAlias = tuple[Row, int]
"""A row and the seed of one of its runs."""
SOURCES = (Path(kvantile_optimizer.__file__).parent, Path(__file__).parent)
QUICK_RUNS, QUICK_LIMIT_S = 1, 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the command was asked for."""

    traces: Path | None
    build: Path
    quick: bool
    workers: int
    kept: Path
    """Where results of this state of code and traces are."""

    @classmethod
    def of(cls, traces: Path | None, build: Path, *, quick: bool, workers: int) -> Options:
        """The options of a command that starts now."""
        kept = build / (state_of_code(traces) + ("-quick" if quick else ""))
        return cls(traces, build, quick, workers, kept)

    def runs(self, row: Row) -> int:
        """How often a row is run."""
        return QUICK_RUNS if self.quick else row.runs

    def limit_s(self, row: Row) -> float:
        """The time of one run; workers beside each other have as much each."""
        if self.quick:
            return QUICK_LIMIT_S
        return row.limit_s / row.runs * (1 if row.alone else min(self.workers, row.runs))


def state_of_code(traces: Path | None) -> str:
    """A name for what the results depend on."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    for path in sorted(traces.glob("*.gz")) if traces else []:
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()[:16]


def measure(rows: list[Row], options: Options, done: Callable[[Row], None]) -> dict[str, list[Run]]:
    """All runs of each row, by its key; `done` is told of each run as it ends."""
    options.kept.mkdir(parents=True, exist_ok=True)
    kept = {(row.key, seed): _kept(options, row, seed) for row in rows for seed in range(options.runs(row))}
    missing = [(row, seed) for row in rows for seed in range(options.runs(row)) if kept[row.key, seed] is None]
    for row in rows:
        for _ in range(options.runs(row) - sum(other is row for other, _ in missing)):
            done(row)
    for row, seed, found in chain(
        _alone([task for task in missing if task[0].alone], options),
        _shared([task for task in missing if not task[0].alone], options),
    ):
        kept[row.key, seed] = found
        done(row)
    return {row.key: [run for seed in range(options.runs(row)) if (run := kept[row.key, seed])] for row in rows}


def _alone(tasks: list[Task], options: Options) -> Iterator[tuple[Row, int, Run]]:
    for row, seed in tasks:
        yield row, seed, run_once(row.key, options, seed)


def _shared(tasks: list[Task], options: Options) -> Iterator[tuple[Row, int, Run]]:
    if options.workers == 1 or len(tasks) < 2:
        yield from _alone(tasks, options)
        return
    # Started afresh, not forked: this process has the progress bar's thread. Leaving the pool ends its processes.
    with get_context("spawn").Pool(options.workers) as pool:
        yield from pool.imap_unordered(_task, [(row.key, options, seed) for row, seed in tasks])


def _task(task: tuple[str, Options, int]) -> tuple[Row, int, Run]:
    return _row(task[0]), task[2], run_once(*task)


def _row(key: str) -> Row:
    return next(row for row in ROWS if row.key == key)


def run_once(key: str, options: Options, seed: int) -> Run:
    """Runs a row once and keeps the result; one that failed has no figures, and is tried again the next time."""
    row = _row(key)
    watch = Watch(options.limit_s(row))
    began = time.perf_counter()
    try:
        run = row.run(Setting(options.traces, options.kept, options.quick, watch), seed)
    except KvantileError as error:
        return Run({}, {"failed": str(error)}, time.perf_counter() - began, watch.left_out)
    run = replace(run, seconds=time.perf_counter() - began, left_out=watch.left_out)
    written = _file(options, row, seed).with_suffix(".part")
    written.write_text(json.dumps(asdict(run)), encoding="utf-8")
    written.replace(_file(options, row, seed))
    return run


def _file(options: Options, row: Row, seed: int) -> Path:
    return options.kept / f"{row.key}-{seed}.json"


def _kept(options: Options, row: Row, seed: int) -> Run | None:
    path = _file(options, row, seed)
    return Run(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
