"""`kvantile plan SPEC`: solve a ServingPlan file and print the plan."""

from __future__ import annotations

from pathlib import Path

import click

from kvantile_optimizer.cli.output import output_option, write
from kvantile_optimizer.ranges import FiniteRange


@click.command("plan")
@click.argument("spec", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--method", type=click.Choice(["exact"]), default="exact", show_default=True, help="Solver.")
@click.option("--time-limit", type=FiniteRange(min=0.1), default=30.0, show_default=True, help="Seconds.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Same seed, same plan.")
@click.option("--current", type=click.Path(path_type=Path), help="The plan that runs (JSON): changes cost.")
@output_option
def command(spec: Path, method: str, time_limit: float, seed: int, current: Path | None, output: str) -> None:  # noqa: ARG001 - one method so far
    """Solve the ServingPlan in SPEC (YAML, several documents allowed; - for stdin) and print the plan.

    \b
    Examples:
      kvantile plan examples/chat.yaml
      kvantile plan examples/chat.yaml -o json > plan.json
    """
    from rich.console import Console

    from kvantile_optimizer import explain, planner, specfile, workload

    file = specfile.load(None if str(spec) == "-" else spec)
    running = specfile.load_plan(current) if current else None
    plans = []
    for serving_plan in file.plans:
        workloads = workload.of_plan(serving_plan, file.config_maps)
        # Nothing is shown where stderr is not a terminal.
        with Console(stderr=True).status(f"planning {serving_plan.metadata.name}, {time_limit:g} s at most"):
            plan = planner.make_plan(serving_plan, workloads, time_limit_s=time_limit, seed=seed, current=running)
        plans.append(plan)
    if output == "table":
        console = Console()
        for plan in plans:
            explain.render(plan, console)
    else:
        documents = [plan.to_json() for plan in plans]
        write(documents[0] if len(documents) == 1 else documents, output)
