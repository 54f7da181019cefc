"""`python -m benchmarks.optimizer`: prints the table and writes it to build/bench-optimizer as markdown and JSON.

A folder of the public traces has burstgpt.csv.gz, azure_code_2023.csv.gz, azure_conv_2023.csv.gz and
mooncake_conversation.csv.gz (columns arrival_s, prompt_tokens, output_tokens, class) and engine_runs/ with recorded
runs. Rows that need none of them run without the folder. Exit 1 says that a figure was not reached, 2 that the
command was wrong.
"""

from __future__ import annotations

import signal
from pathlib import Path

import click
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.optimizer import harness, report, table
from benchmarks.optimizer.row import Row, Run

DEFAULT_BUILD = Path("build/bench-optimizer")
NEEDED = ("burstgpt", "azure_code_2023", "azure_conv_2023", "mooncake_conversation")


@click.command()
@click.option("--rows", default="", help="Keys with commas; all rows unless set.")
@click.option("--traces", type=click.Path(path_type=Path, file_okay=False), help="Folder of the public traces.")
@click.option("--build", type=click.Path(path_type=Path), default=DEFAULT_BUILD, show_default=True)
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True, help="Processes for untimed rows.")
@click.option("--quick", is_flag=True, help="As little as shows that every row works: seconds, not evidence.")
def main(rows: str, traces: Path | None, build: Path, workers: int, quick: bool) -> None:
    """Measure the figures that the optimizer is held to.

    \b
    Example:
      python -m benchmarks.optimizer --traces /data/traces --rows ambiguity,heldout
    """
    wanted = _wanted(rows)
    _check_traces(wanted, traces)
    options = harness.Options.of(traces, build, quick=quick, workers=workers)
    found = _measured(wanted, options)
    text = report.write(wanted, found, build, quick=quick)
    Console().print(Markdown(text)) if Console().is_terminal else click.echo(text)
    if not quick and not all(line.met for line in report.lines(wanted, found)):
        raise SystemExit(1)


def _wanted(rows: str) -> list[Row]:
    try:
        return table.chosen(rows)
    except KeyError as error:
        raise click.UsageError(f"--rows: {error.args[0]}") from None


def _check_traces(rows: list[Row], traces: Path | None) -> None:
    needing = [row.key for row in rows if row.needs_traces]
    if not needing:
        return
    missing = [name for name in NEEDED if traces is None or not (traces / f"{name}.csv.gz").exists()]
    if missing:
        found = "no folder" if traces is None else f"no {missing[0]}.csv.gz in {traces}"
        without = ",".join(row.key for row in rows if not row.needs_traces)
        raise click.UsageError(
            f"--traces: found {found}, allowed a folder of the public traces (make bench-optimizer TRACES=FOLDER), "
            f"which {', '.join(needing)} need" + (f"; --rows {without} need none" if without else "")
        )


def _measured(rows: list[Row], options: harness.Options) -> dict[str, list[Run]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = {row.key: progress.add_task(row.key, total=options.runs(row)) for row in rows}
        return harness.measure(rows, options, lambda row: progress.advance(tasks[row.key]))


def _end(signum: int, _frame: object) -> None:
    """Leaves like Ctrl-C does, through every `with`: no worker outlives the command."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    main()
