"""`python -m benchmarks.engine`: prints the table and writes it to build/bench-engine as markdown and JSON.

A folder of the public traces has engine_runs/ with recorded runs. Rows that need none run without the folder. Runs go
one after the other, since most rows measure time. Exit 1 says that a figure was not reached, 2 that the command was
wrong.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.engine import table
from benchmarks.optimizer import report
from benchmarks.optimizer.row import Row, Run, Setting, Watch
from kvantile_optimizer.errors import KvantileError

DEFAULT_BUILD = Path("build/bench-engine")
QUICK_LIMIT_S = 5.0


@click.command()
@click.option("--rows", default="", help="Keys with commas; all rows unless set.")
@click.option("--traces", type=click.Path(path_type=Path, file_okay=False), help="Folder of the public traces.")
@click.option("--build", type=click.Path(path_type=Path), default=DEFAULT_BUILD, show_default=True)
@click.option("--quick", is_flag=True, help="As little as shows that every row works: seconds, not evidence.")
def main(rows: str, traces: Path | None, build: Path, quick: bool) -> None:
    """Measure the figures that the engine's part is held to.

    \b
    Example:
      python -m benchmarks.engine --traces /data/traces --rows recorded
    """
    wanted = _wanted(rows, traces)
    build.mkdir(parents=True, exist_ok=True)
    found = {row.key: [_measured(row, seed, traces, build, quick) for seed in _seeds(row, quick)] for row in wanted}
    text = report.write(wanted, found, build, quick=quick)
    click.echo(text)
    if not quick and not all(line.met for line in report.lines(wanted, found)):
        raise SystemExit(1)


def _wanted(rows: str, traces: Path | None) -> list[Row]:
    try:
        wanted = table.chosen(rows)
    except KeyError as error:
        raise click.UsageError(f"--rows: {error.args[0]}") from None
    needing = [row.key for row in wanted if row.needs_traces]
    if needing and (traces is None or not (traces / "engine_runs").is_dir()):
        found = "no folder" if traces is None else f"no engine_runs in {traces}"
        raise click.UsageError(
            f"--traces: found {found}, allowed a folder with engine_runs/ in it (make bench-engine TRACES=FOLDER), "
            f"which {', '.join(needing)} need"
        )
    return wanted


def _seeds(row: Row, quick: bool) -> range:
    return range(1 if quick else row.runs)


def _measured(row: Row, seed: int, traces: Path | None, build: Path, quick: bool) -> Run:
    """One run; one that failed has no figures."""
    click.echo(f"{row.key}, run {seed + 1}", err=True)
    watch = Watch(QUICK_LIMIT_S if quick else row.limit_s / row.runs)
    began = time.perf_counter()
    try:
        run = row.run(Setting(traces, build, quick, watch), seed)
    except KvantileError as error:
        run = Run({}, {"failed": str(error)})
    return replace(run, seconds=time.perf_counter() - began, left_out=watch.left_out)


if __name__ == "__main__":
    main()
