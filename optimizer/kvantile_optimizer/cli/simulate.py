"""`kvantile simulate PLAN TRACE`: what each class would have seen if the plan had served a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvantile_optimizer.cli.output import output_option, write
from kvantile_optimizer.ranges import FiniteRange
from kvantile_optimizer.traces import FORMATS

if TYPE_CHECKING:
    from rich.table import Table

    from kvantile_optimizer.plan import Plan
    from kvantile_optimizer.simulator.rows import Row


@click.command("simulate")
@click.argument("plan", type=click.Path(path_type=Path, allow_dash=True))
@click.argument("trace", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--engine-form", type=click.Choice(["none", "held", "pooled"]), help="Reserve in this form; the plan's unless set."
)
@click.option(
    "--order", type=click.Choice(["fcfs", "deadline", "slack"]), help="Admit in this order; the plan's unless set."
)
@click.option("--format", "trace_format", type=click.Choice(["auto", *FORMATS]), default="auto", show_default=True)
@click.option(
    "--speed",
    type=FiniteRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="How many times faster than recorded the requests come.",
)
@click.option(
    "--prefix-cache/--no-prefix-cache",
    default=True,
    show_default=True,
    help="Whether replicas cache prefixes. Without hash ids in the trace nothing that it has seen is evicted.",
)
@click.option(
    "--gateway/--no-gateway",
    default=True,
    show_default=True,
    help="Whether the gateway's rules route, and its queue holds what finds every replica full.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Same seed, same output.")
@output_option
def command(
    plan: Path,
    trace: Path,
    engine_form: str | None,
    order: str | None,
    trace_format: str,
    speed: float,
    prefix_cache: bool,
    gateway: bool,
    seed: int,
    output: str,
) -> None:
    """Replay TRACE through PLAN, which is what `kvantile plan -o json` printed, in a simulated fleet.

    \b
    Examples:
      kvantile plan examples/chat.yaml -o json > plan.json
      kvantile simulate plan.json trace.csv.gz
      kvantile simulate plan.json trace.csv.gz --engine-form none --order fcfs -o json
    """
    from rich.console import Console

    from kvantile_optimizer import specfile, traces
    from kvantile_optimizer.simulator import arrivals, fleet, rows
    from kvantile_optimizer.simulator.lobby import Lobby

    chosen = _with(specfile.load_plan(None if str(plan) == "-" else plan), engine_form, order)
    recorded = traces.read(trace, trace_format)  # type: ignore[arg-type]  # click allows no other
    requests, classes = arrivals.of_trace(chosen, recorded, speed=speed, prefix_cache=prefix_cache, seed=seed)
    found = fleet.simulate_plan(chosen, requests, classes, seed, lobby=Lobby() if gateway else None)
    total, of_classes, of_groups = rows.plan_row(found), rows.class_rows(found), rows.group_rows(found)
    if output != "table":
        scenario = {"plan": chosen.plan.name, "requests": len(requests), "speed": speed, "seed": seed}
        write({"scenario": scenario, "rows": [total], "classes": of_classes, "groups": of_groups}, output)
        return
    console = Console()
    for table in (_class_table(of_classes), _group_table(of_groups), _total_table(total)):
        console.print(table)


def _with(plan: Plan, form: str | None, order: str | None) -> Plan:
    """The plan with another form or order on every route."""
    changed = {key: value for key, value in (("form", form), ("order", order)) if value is not None}
    return plan.model_copy(update={"routes": [route.model_copy(update=changed) for route in plan.routes]})


def _class_table(class_rows: list[Row]) -> Table:
    names = ("class", "requests", "TTFT/SLO", "TPOT/SLO", "good/s", "missed", "preempted")
    table = _table("What each class saw at its percentile", names)
    for row in class_rows:
        table.add_row(
            str(row["class"]),
            f"{row['requests']:,}",
            f"{_seconds(row['ttftSeconds'])}/{_seconds(row['ttftTargetSeconds'])}",
            f"{_seconds(row['tpotSeconds'])}/{_seconds(row['tpotTargetSeconds'])}",
            f"{row['goodputRequestsPerSecond']:.2f}",
            f"{row['sloViolationFraction']:.1%}",
            f"{row['preemptionProbability']:.1%}",
        )
    return table


def _group_table(group_rows: list[Row]) -> Table:
    table = _table(
        "How each group was used", ("group", "replicas", "requests", "busy", "KV mean", "KV P99", "prefix hits")
    )
    for row in group_rows:
        table.add_row(
            str(row["group"]),
            str(row["replicas"]),
            f"{row['requests']:,}",
            f"{row['busyFraction']:.0%}",
            f"{row['kvMeanTokens']:,.0f}",
            f"{row['kvP99Tokens']:,.0f}",
            f"{row['prefixHitFraction']:.0%}",
        )
    return table


def _total_table(row: Row) -> Table:
    table = _table("In all", ("figure", "value"))
    for key, value in row.items():
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    return table


def _table(title: str, columns: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _seconds(value: float | int | str | None) -> str:
    if value is None or isinstance(value, str):
        return "-"
    return f"{value * 1000:.0f}ms" if value < 1 else f"{value:.1f}s"
