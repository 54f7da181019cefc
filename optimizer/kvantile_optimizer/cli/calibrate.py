"""`kvantile calibrate RUN.csv` or `URL`: step-time coefficients from a recorded run or a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvantile_optimizer.cli.output import output_option, write
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.ranges import FiniteRange

if TYPE_CHECKING:
    from kvantile_optimizer.calibration import Engine
    from kvantile_optimizer.plan import StepTime

COEFFICIENTS = {
    "alpha": "per step",
    "beta": "per sequence",
    "gamma": "per context token",
    "delta": "per prefill token",
}
NANOSECONDS = 1e9


@click.command("calibrate")
@click.argument("run", metavar="RUN.csv|URL")
@click.option("--kv-tokens", type=click.IntRange(1), help="KV cache of the engine; what it says or logs unless set.")
@click.option(
    "--engine-log",
    type=click.Path(path_type=Path, dir_okay=False),
    help='The engine\'s log, for its line "GPU KV cache size: ... tokens".',
)
@click.option("--max-num-seqs", type=click.IntRange(1), default=256, show_default=True)
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=2048, show_default=True)
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens of a KV block.")
@click.option(
    "--gpu", help="A name of the GPU table: with --model, decides what a run cannot tell, and is shown beside it."
)
@click.option("--model", help="A name of the model catalogue.")
@click.option("--tensor-parallel", type=click.IntRange(1), default=1, show_default=True, help="GPUs of the engine.")
@click.option("--served-model", help="URL: the model to ask, the first that the server lists unless set.")
@click.option(
    "--time-limit",
    type=FiniteRange(0, min_open=True),
    default=120.0,
    show_default=True,
    help="URL: seconds after which no more is asked.",
)
@click.option(
    "--requests", type=click.IntRange(1), default=300, show_default=True, help="URL: the most requests to send."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="URL: seed of the prompts.")
@output_option
def command(
    run: str,
    kv_tokens: int | None,
    engine_log: Path | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
    gpu: str | None,
    model: str | None,
    tensor_parallel: int,
    served_model: str | None,
    time_limit: float,
    requests: int,
    seed: int,
    output: str,
) -> None:
    """Fit an engine's step time to a recorded run, or to probes of a running OpenAI-compatible server.

    RUN.csv has columns arrival_s, prompt_tokens, output_tokens, first_token_s and last_token_s, in seconds on one
    clock. The simulator replays the run until it agrees, and how well it does is measured by fitting on the first half
    of the requests and judging on the second. At a URL lone prompts and batches of requests are timed; the server
    should have nothing else to do. The result's `calibration` goes under a pool's `calibrations` in a ServingPlan.

    \b
    Examples:
      kvantile calibrate run.csv --engine-log vllm.log
      kvantile calibrate http://127.0.0.1:8000 --gpu L40S --model meta-llama/Llama-3.1-8B-Instruct
    """
    from kvantile_optimizer import calibration

    logged = calibration.kv_tokens_of_log(_lines(engine_log)) if engine_log else None
    if engine_log and logged is None and kv_tokens is None:
        raise InputError(f'{engine_log}: found no line "GPU KV cache size: ... tokens", allowed one, or --kv-tokens')
    expected = _prior(gpu, model, tensor_parallel)
    engine = calibration.Engine(kv_tokens or logged, max_num_seqs, max_num_batched_tokens, block_size)
    if run.startswith(("http://", "https://")):
        from kvantile_optimizer.local import runner

        result = runner.run(
            _probed(run.rstrip("/").removesuffix("/v1"), served_model, engine, time_limit, requests, seed)
        )
    else:
        result = _replayed(Path(run), engine, expected)
    result["expected"] = expected.model_dump() if expected else None
    result["calibration"] = _for_a_pool(result, engine, tensor_parallel)
    if output == "table":
        _print(result)
    else:
        write(result, output)


def _replayed(run: Path, engine: Engine, expected: StepTime | None) -> dict[str, Any]:
    from kvantile_optimizer import calibration, runs

    recorded = runs.read(None if str(run) == "-" else run)
    found = calibration.calibrate(recorded, engine, expected)
    return {
        "stepTime": found.step_time.model_dump(),
        "kvTokens": engine.kv_tokens,
        "requests": len(recorded),
        "preemptions": found.preemptions,
        "errors": found.errors,
    }


async def _probed(
    url: str, model: str | None, engine: Engine, time_limit_s: float, requests: int, seed: int
) -> dict[str, Any]:
    from rich.console import Console

    from kvantile_optimizer import probing
    from kvantile_optimizer.local import engine_probe, progress

    console = Console(stderr=True)
    server = await engine_probe.look(url, model)
    if server.busy:
        console.print("The server has requests of others: what it answers will look slower than it is.")
    kv_tokens = engine.kv_tokens or server.kv_tokens
    limits = probing.Limits(
        server.max_model_len or engine.max_num_batched_tokens,
        kv_tokens,
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
    )
    bounds = engine_probe.Bounds(time_limit_s, requests)
    round_ = probing.probes(limits)
    per_round = sum(probe.count for probe in round_)
    total = per_round * engine_probe.rounds_within(round_, requests)
    with progress.shown(console, f"asking {server.model}", total) as tell:
        rounds = await engine_probe.measure(url, server.model, limits, bounds, seed, tell)
    found = probing.fitted(rounds)
    return {
        "model": server.model,
        "stepTime": found.step_time.model_dump(),
        "overheadSeconds": found.overhead_s,
        "kvTokens": kv_tokens,
        "blockSize": server.block_size,
        "requests": len(rounds) * per_round,
        "errors": found.errors,
    }


def _for_a_pool(result: dict[str, Any], engine: Engine, tensor_parallel: int) -> dict[str, Any]:
    """What a ServingPlan takes of it."""
    nanoseconds = {f"{name}Nanoseconds": f"{seconds * NANOSECONDS:.6f}" for name, seconds in result["stepTime"].items()}
    return {
        "tensorParallel": tensor_parallel,
        **nanoseconds,
        **({"kvTokens": result["kvTokens"]} if result["kvTokens"] else {}),
        "maxNumSeqs": engine.max_num_seqs,
        "maxNumBatchedTokens": engine.max_num_batched_tokens,
    }


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
    if "preemptions" in result:
        console.print(f"Fitted on the first half and judged on the second: {errors}.", highlight=False, soft_wrap=True)
        console.print(f"Simulated preemptions: {result['preemptions']}.", highlight=False)
    else:
        console.print(
            f"Outside of the engine a request spends {result['overheadSeconds'] * 1e3:.1f} ms.", highlight=False
        )
        if errors:
            console.print(f"Fitted on the first round and judged on the second: {errors}.", highlight=False)
    if result["kvTokens"]:
        console.print(f"KV cache: {result['kvTokens']:,} tokens.", highlight=False)
    else:
        console.print("KV cache: not known; --kv-tokens or --engine-log would tell.", highlight=False)
    console.print("In a ServingPlan, under the pool of these GPUs:\n\ncalibrations:", highlight=False)
    for name, value in result["calibration"].items():
        shown = f'"{value}"' if isinstance(value, str) else value
        console.print(f"{'-' if name == 'tensorParallel' else ' '} {name}: {shown}", highlight=False)
