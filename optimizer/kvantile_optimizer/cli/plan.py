"""`kvantile plan SPEC`: solve a ServingPlan file and print the plan."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvantile_optimizer.cli.output import output_option, write
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.ranges import FiniteRange

if TYPE_CHECKING:
    from kvantile_optimizer.settle import Method
    from kvantile_optimizer.spec import ServingPlan


def _pool_count(text: str) -> tuple[str, int]:
    """A pool's name and a number of GPUs from `POOL=N`. Raises click.BadParameter with what is allowed."""
    found = re.fullmatch(r"([^=]+)=([0-9]{1,6})", text)
    if found is None:
        raise click.BadParameter(f"found {text!r}, allowed a pool and a whole number, such as h100=8")
    return found[1], int(found[2])


@click.command("plan")
@click.argument("spec", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--method",
    type=click.Choice(["bcd", "exact"]),
    default="bcd",
    show_default=True,
    help="Block coordinate descent, or the whole program at once.",
)
@click.option(
    "--rehearse/--no-rehearse",
    default=True,
    show_default=True,
    help="Replay the plan in simulation: to choose how engines admit, and how few replicas do.",
)
@click.option("--time-limit", type=FiniteRange(min=0.1), default=30.0, show_default=True, help="Seconds.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Same seed, same plan.")
@click.option(
    "--current",
    type=click.Path(path_type=Path),
    help="The plan that runs (JSON): changes cost, and the plan comes with the steps from there.",
)
@click.option(
    "--taken", type=_pool_count, metavar="POOL=N", multiple=True, help="GPUs of a pool that others use; repeatable."
)
@click.option(
    "--sensitivities",
    is_flag=True,
    help="Also plan for a GPU more, a dollar less, 10 ms more, 10 % of traffic; the time limit again for all of them.",
)
@output_option
def command(
    spec: Path,
    method: Method,
    rehearse: bool,
    time_limit: float,
    seed: int,
    current: Path | None,
    taken: tuple[tuple[str, int], ...],
    sensitivities: bool,
    output: str,
) -> None:
    """Solve the ServingPlan in SPEC (YAML, several documents allowed; - for stdin) and print the plan.

    \b
    Examples:
      kvantile plan examples/chat.yaml
      kvantile plan examples/chat.yaml -o json > plan.json
      kvantile plan examples/chat.yaml --current plan.json --taken l4=2
      kvantile plan examples/chat.yaml --sensitivities
    """
    from rich.console import Console

    from kvantile_optimizer import change, explain, planner, sensitivity, specfile, workload

    file = specfile.load(None if str(spec) == "-" else spec)
    running = specfile.load_plan(current) if current else None
    plans = []
    for serving_plan in _rest(file.plans, taken):
        workloads = workload.of_plan(serving_plan, file.config_maps)
        # Nothing is shown where stderr is not a terminal.
        with Console(stderr=True).status(f"planning {serving_plan.metadata.name}, {time_limit:g} s at most") as status:
            plan = planner.make_plan(
                serving_plan,
                workloads,
                time_limit_s=time_limit,
                seed=seed,
                current=running,
                method=method,
                rehearsed=rehearse,
            )
            if running:
                plan = change.with_steps(plan, running, serving_plan)
            if sensitivities:
                found = sensitivity.sensitivities(
                    plan,
                    serving_plan,
                    workloads,
                    time_limit_s=time_limit,
                    seed=seed,
                    current=running,
                    progress=lambda done, total, what: status.update(f"{done} of {total} sensitivities; now {what}"),
                )
                plan = plan.model_copy(update={"sensitivities": found})
        plans.append(plan)
    if output == "table":
        console = Console()
        for plan in plans:
            explain.render(plan, console)
    else:
        documents = [plan.to_json() for plan in plans]
        write(documents[0] if len(documents) == 1 else documents, output)


def _rest(plans: Sequence[ServingPlan], taken: tuple[tuple[str, int], ...]) -> list[ServingPlan]:
    """The plans without what others use. Raises InputError for a pool named twice or that no plan has."""
    from kvantile_optimizer import taken as others

    counts = dict(taken)
    names = {pool.name for plan in plans for pool in plan.spec.node_pools}
    unknown = [name for name in counts if name not in names]
    if unknown:
        raise InputError(f"--taken: found {unknown[0]}, allowed a pool of the plan: {', '.join(sorted(names))}")
    if len(counts) != len(taken):
        raise InputError("--taken: found a pool twice, allowed each once")
    return [
        others.without(plan, {pool.name: counts[pool.name] for pool in plan.spec.node_pools if pool.name in counts})
        for plan in plans
    ]
