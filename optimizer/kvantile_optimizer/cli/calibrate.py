"""`kvantile calibrate RUN.csv`: step-time coefficients from a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvantile_optimizer.cli.output import output_option, write
from kvantile_optimizer.errors import InputError

if TYPE_CHECKING:
    from kvantile_optimizer.plan import StepTime

COEFFICIENTS = {
    "alpha": "per step",
    "beta": "per sequence",
    "gamma": "per context token",
    "delta": "per prefill token",
}


@click.command("calibrate")
@click.argument("run", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--kv-tokens", type=click.IntRange(1), help="KV cache of the engine; unlimited unless set or logged.")
@click.option(
    "--engine-log",
    type=click.Path(path_type=Path, dir_okay=False),
    help='The engine\'s log, for its line "GPU KV cache size: ... tokens".',
)
@click.option("--max-num-seqs", type=click.IntRange(1), default=256, show_default=True)
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=2048, show_default=True)
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens of a KV block.")
@click.option("--gpu", help="A name of the GPU table: with --model, shows what was expected without a run.")
@click.option("--model", help="A name of the model catalogue.")
@click.option("--tensor-parallel", type=click.IntRange(1), default=1, show_default=True, help="GPUs of the engine.")
@output_option
def command(
    run: Path,
    kv_tokens: int | None,
    engine_log: Path | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
    gpu: str | None,
    model: str | None,
    tensor_parallel: int,
    output: str,
) -> None:
    """Fit an engine's step time to RUN, a CSV of requests and when their first and last tokens came.

    Its columns are arrival_s, prompt_tokens, output_tokens, first_token_s and last_token_s, in seconds on one clock.
    The simulator replays the run until it agrees. How well it does is measured by fitting on the first half of the
    requests and judging on the second.

    \b
    Example:
      kvantile calibrate run.csv --engine-log vllm.log
    """
    from kvantile_optimizer import calibration, runs

    logged = calibration.kv_tokens_of_log(_lines(engine_log)) if engine_log else None
    if engine_log and logged is None and kv_tokens is None:
        raise InputError(f'{engine_log}: found no line "GPU KV cache size: ... tokens", allowed one, or --kv-tokens')
    expected = _prior(gpu, model, tensor_parallel)
    engine = calibration.Engine(kv_tokens or logged, max_num_seqs, max_num_batched_tokens, block_size)
    recorded = runs.read(None if str(run) == "-" else run)
    found = calibration.calibrate(recorded, engine)
    result: dict[str, Any] = {
        "stepTime": found.step_time.model_dump(),
        "kvTokens": engine.kv_tokens,
        "requests": len(recorded),
        "preemptions": found.preemptions,
        "errors": found.errors,
        "expected": expected.model_dump() if expected else None,
    }
    if output == "table":
        _print(result)
    else:
        write(result, output)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _prior(gpu: str | None, model: str | None, tp: int) -> StepTime | None:
    """What the planner assumes without a run. Raises InputError for names that nobody knows."""
    from kvantile_optimizer import geometry, hardware
    from kvantile_optimizer.spec import Model

    if not gpu and not model:
        return None
    if not gpu or not model:
        raise InputError("--gpu, --model: found one of them, allowed both or none")
    shape = geometry.of_model(Model(name=model, max_model_len=16))
    return hardware.step_time(shape, hardware.gpu_type(gpu, "--gpu"), tp, 1)


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Step time from {result['requests']:,} requests", title_justify="left")
    for heading in ("coefficient", "seconds", "expected"):
        table.add_column(heading, justify="left" if heading == "coefficient" else "right")
    for name, meaning in COEFFICIENTS.items():
        expected = f"{result['expected'][name]:.4g}" if result["expected"] else "-"
        table.add_row(f"{name}, {meaning}", f"{result['stepTime'][name]:.4g}", expected)
    console = Console()
    console.print(table)
    errors = ", ".join(f"{name} {error:+.1%}" for name, error in result["errors"].items())
    console.print(f"Fitted on the first half and judged on the second: {errors}.", highlight=False, soft_wrap=True)
    console.print(f"Simulated preemptions: {result['preemptions']}.", highlight=False)
