"""`kvantile fit TRACE...`: read traces and write the classes of a ServingPlan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np

from kvantile_optimizer import classes, traces
from kvantile_optimizer.classes import Fitted
from kvantile_optimizer.cli.output import FORMATS, write
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.ranges import FiniteRange
from kvantile_optimizer.spec import MAX_CLASSES
from kvantile_optimizer.traces import Trace


def _count(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """`auto` is None."""
    if value == "auto":
        return None
    if not value.isdecimal() or not 1 <= int(value) <= MAX_CLASSES:
        raise click.BadParameter(f"found {value}, allowed auto or a number from 1 to {MAX_CLASSES}", ctx, param)
    return int(value)


@click.command("fit")
@click.argument("files", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--format",
    "format_",
    type=click.Choice(["auto", *traces.FORMATS]),
    default="auto",
    show_default=True,
    help="Format.",
)
@click.option(
    "--classes",
    "count",
    metavar="auto|N",
    callback=_count,
    default="auto",
    show_default=True,
    help="A class a label, or N by prompt.",
)
@click.option("--window", "window_s", type=FiniteRange(min=0, min_open=True), help="Only the last S seconds.")
@click.option(
    "-o", "--output", type=click.Choice(FORMATS), default="yaml", show_default=True, help="Form of the result."
)
def command(
    files: tuple[Path, ...],
    format_: traces.Format | Literal["auto"],
    count: int | None,
    window_s: float | None,
    output: str,
) -> None:
    """Read traces (plain or gzip; - for stdin) and write the `classes:` section of a ServingPlan.

    Formats: BurstGPT, Azure, ShareGPT (lengths or dialogues), Mooncake, an OpenAI-style log, and the uniform CSV with
    the columns arrival_s, prompt_tokens, output_tokens, class, session, prefix_tokens. Several traces count as recorded
    one after another.

    \b
    Examples:
      kvantile fit BurstGPT_1.csv > classes.yaml
      kvantile fit --classes 3 --window 3600 log.jsonl.gz -o table
    """
    sources = [(_stem(path), _recent(traces.read(path, format_), path, window_s)) for path in files]
    fitted = classes.by_label(sources) if count is None else classes.by_prompt(sources, count)
    for line in _notes(fitted, sources):
        click.echo(line, err=True)
    if output == "table":
        click.echo(_table(fitted))
        return
    data = {"classes": [_as_data(item) for item in fitted]}
    if output == "yaml":
        sys.stdout.write(
            f"# Fitted on {', '.join(str(path) for path in files)}. The targets (slo) are defaults: set yours.\n"
        )
    write(data, output)


def _stem(path: Path) -> str:
    return "requests" if str(path) == "-" else path.name.split(".")[0]


def _recent(trace: Trace, path: Path, window_s: float | None) -> Trace:
    if window_s is None:
        return trace
    if not np.isfinite(trace.arrival_s).any():
        raise InputError(f"--window: found {path} without arrival times, allowed traces that have them")
    return trace.only(trace.arrival_s >= np.nanmax(trace.arrival_s) - window_s)


def _notes(fitted: list[Fitted], sources: list[tuple[str, Trace]]) -> list[str]:
    notes = [f"{name}: {trace.skipped} failed requests left out" for name, trace in sources if trace.skipped]
    slo = classes.DEFAULT_SLO
    notes.append(
        f"slo: {slo.ttft_milliseconds} ms to the first token and {slo.tpot_milliseconds} ms a token by default"
    )
    for item in fitted:
        if not item.has_arrivals:
            notes.append(f"class {item.request_class.name}: no arrival times; 1 request/s, Poisson, by default")
        if item.censored:
            notes.append(f"class {item.request_class.name}: {item.censored} answers were cut off and count as longer")
    return notes


def _as_data(item: Fitted) -> dict[str, Any]:
    return item.request_class.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)


def _table(fitted: list[Fitted]) -> str:
    """The classes as aligned columns."""
    rows = [["class", "requests", "req/s", "burstiness", "prompt p50", "p99", "output p50", "p90", "p99", "max"]]
    for item in fitted:
        demand, name = item.request_class.demand, item.request_class.name
        prompt, output = demand.prompt_tokens, demand.output_tokens
        assert prompt is not None  # noqa: S101 - a fitted class has both
        assert output is not None  # noqa: S101
        lengths = [prompt.p50, prompt.p99, output.p50, output.p90, output.p99, output.max]
        shown = f"{name} (default)" if item.request_class.default else name
        rates = [demand.requests_per_second, demand.burstiness]
        rows.append([shown, str(item.requests), *rates, *(str(length) for length in lengths)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    ]
    return "\n".join("  ".join(line) for line in lines)
