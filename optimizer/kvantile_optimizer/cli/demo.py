"""`kvantile demo`: Kvantile's plan against two usual policies, on a real trace over HTTP."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

from kvantile_optimizer import explain, planner, report, traces
from kvantile_optimizer.local import atomic, demo, metrics, policies, progress, runner
from kvantile_optimizer.ranges import FiniteRange


@click.command("demo")
@click.option(
    "--speed",
    type=FiniteRange(0, 1000, min_open=True),
    default=6.0,
    show_default=True,
    help="How many times faster than real time everything runs.",
)
@click.option(
    "--seconds",
    type=FiniteRange(1, 36000),
    default=240.0,
    show_default=True,
    help="Length of the replay in the trace's time; divided by the speed it is how long you wait for each policy.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Chooses the rows and the bursts.")
@click.option(
    "-o", "output_format", type=click.Choice(["table", "json", "yaml"]), default="table", help="How to print the rows."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("kvantile-report.html"),
    show_default=True,
    help="Where the HTML page goes.",
)
def command(speed: float, seconds: float, seed: int, output_format: str, output: Path) -> None:
    """Plans for a real trace and replays its held-out rest against stock and fixed-quantile reservation.

    One process per replica and the gateway run on this machine, in accelerated time. It ends by itself, with a table
    and an HTML page.

    \b
    Example:
      kvantile demo --seconds 120 --output report.html
    """
    console = Console(stderr=True)
    atomic.check(output)
    shared = demo.scene(traces.bundled())
    plan = planner.make_plan(shared.spec, list(shared.workloads), seed=seed)
    explain.render(plan, console)
    settings = demo.DemoSettings(speed, seconds, seed)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    outcomes = runner.run(demo.compare(plan, shared, settings, say, partial(progress.shown, console)))
    rows = [metrics.row(outcome.run) for outcome in outcomes]
    atomic.write(output, report.page(demo.report(plan, shared, outcomes, rows)))
    _print({"scenario": demo.scenario(plan, settings, shared.rates), "rows": rows}, rows, output_format)
    for line in [metrics.verdict(rows, policies.TITLES) + ".", *demo.notes(rows)]:
        say(line)
    say(f"The page with the plots: {output.resolve()}")


def _print(result: dict[str, object], rows: list[metrics.Row], output_format: str) -> None:
    if output_format == "json":
        click.echo(json.dumps(result, indent=2))
    elif output_format == "yaml":
        YAML(typ="safe", pure=True).dump(result, sys.stdout)
    else:
        Console().print(_table(rows))


def _table(rows: list[metrics.Row]) -> Table:
    """Policies side by side, a figure a line: it fits a narrow terminal."""
    table = Table(title="The same requests on the same GPUs (engine seconds)", title_justify="left")
    table.add_column("")
    for row in rows:
        table.add_column(policies.TITLES[str(row["policy"])], justify="right")
    for column in report.shown_columns(rows):
        table.add_row(column.heading, *(column.text(row) for row in rows))
    return table
