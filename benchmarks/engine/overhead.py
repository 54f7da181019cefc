"""What reservations add to a step of vLLM's own scheduler, at 256 running requests.

Schedulers in a process each, stock and ours with and without hints, take turns of so many steps: what else the machine
does meets all of them. What counts is the median step of each in a turn, over stock's in the same turn, and of that the
median of all turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support import real_vllm
from tests.support.tiny_model import make_model

from benchmarks.optimizer.row import Row, Run, Setting, Target
from kvantile_optimizer.errors import KvantileError

PROGRAM = Path(__file__).with_name("steps.py")
KINDS = {
    "stock": ("stock", "seats"),
    "plain": ("plain", "seats"),
    "hinted": ("hinted", "seats"),
    "stock at the gate": ("stock", "blocks"),
    "at the gate": ("hinted", "blocks"),
}
"""Arguments of the program. Each of ours has a stock one that does the same work."""
STOCK = {"plain": "stock", "hinted": "stock", "at the gate": "stock at the gate"}
WARM_UP_STEPS = 100
STEPS_A_TURN = 100
TURNS = 30


class NoVllmError(KvantileError):
    """vLLM is not installed, or did not start."""


def overhead(setting: Setting, seed: int) -> Run:
    """Our step over stock's, less 1."""
    del seed  # Nothing is drawn: a run is one more look.
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = make_model(Path(folder))
        steppers = {kind: stack.enter_context(_stepper(kind, model)) for kind in KINDS}
        for kind in KINDS:
            _steps(steppers[kind], WARM_UP_STEPS)
        turns = range(2 if setting.quick else TURNS)
        for turn in setting.watch.within(turns):
            order = KINDS if turn % 2 else reversed(KINDS)
            found.append({kind: statistics.median(_steps(steppers[kind], STEPS_A_TURN)) for kind in order})
    figures = {kind: statistics.median(of[kind] / of[stock] for of in found) - 1 for kind, stock in STOCK.items()}
    return Run(
        figures, {kind: f"{statistics.median(of[kind] for of in found):.0f} µs a step" for kind in STOCK.values()}
    )


@contextmanager
def _stepper(kind: str, model: Path) -> Iterator[subprocess.Popen[str]]:
    python = real_vllm.python()
    if python is None:
        raise NoVllmError(real_vllm.MISSING)
    with subprocess.Popen(
        [python, PROGRAM, *KINDS[kind], model],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=real_vllm.environment(VLLM_LOGGING_LEVEL="ERROR"),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _steps(process: subprocess.Popen[str], count: int) -> list[float]:
    """So many steps; microseconds each."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(count, file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        raise NoVllmError("the scheduler ended before it had made its steps")
    taken: list[float] = json.loads(line)
    return taken


ROWS = (
    Row(
        "overhead",
        "a step of vLLM's scheduler with 256 running requests, longer than stock",
        (
            Target("hinted", 0.03, "at most", "{:.1%}", what="every request with a hint"),
            Target("at the gate", 0.03, "at most", "{:.1%}", what="the same, while others wait for blocks"),
            Target("plain", 0.03, "at most", "{:.1%}", what="no request with a hint"),
        ),
        overhead,
        limit_s=900,
        alone=True,
    ),
)
