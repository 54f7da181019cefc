"""`kvantile up`: plan, start, serve until Ctrl-C."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click
from rich.console import Console

from kvantile_optimizer import explain, planner, specfile, workload
from kvantile_optimizer.errors import InputError, WorkError
from kvantile_optimizer.local import runner, up
from kvantile_optimizer.local.flags import FleetSettings
from kvantile_optimizer.plan import Plan, PlanStatus
from kvantile_optimizer.ranges import FiniteRange
from kvantile_optimizer.workload import Workload

HOST = "127.0.0.1"


@click.command("up")
@click.argument("spec", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "-p", "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="The gateway's port."
)
@click.option(
    "--speed",
    type=FiniteRange(0, 1000, min_open=True),
    default=1.0,
    show_default=True,
    help="How many times faster than real time the emulated engines run.",
)
@click.option("--engine", type=click.Choice(["emulator"]), default="emulator", show_default=True, help="What serves.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the plan and of the emulated answers.")
def command(spec: Path, port: int, speed: float, engine: Literal["emulator"], seed: int) -> None:  # noqa: ARG001
    """Runs the whole loop on this machine: plan, replicas, gateway, and planning anew from what is seen.

    SPEC is a ServingPlan file. Ctrl-C leaves nothing behind.

    \b
    Example:
      kvantile up examples/chat.yaml --port 8000
    """
    console = Console(stderr=True)
    up.check_port(HOST, port)
    loop = _loop(spec, seed)
    explain.render(loop.plan, console)
    serving = False

    def ready(url: str) -> None:
        nonlocal serving
        serving = True
        _welcome(console, url, loop.plan)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    settings = FleetSettings(host=HOST, port=port, speed=speed, seed=seed)
    try:
        runner.run(up.serve(loop, settings, say, ready))
    except KeyboardInterrupt:
        if not serving:
            raise
        console.print("stopped")


def _loop(path: Path, seed: int) -> up.Loop:
    found = specfile.load(path)
    if len(found.plans) != 1:
        raise InputError(f"{path}: found {len(found.plans)} ServingPlans, allowed one")
    spec = found.plans[0]
    workloads = workload.of_plan(spec, found.config_maps)
    plan = planner.make_plan(spec, workloads, seed=seed)
    if plan.status is PlanStatus.INFEASIBLE or not plan.groups:
        remedies = "; ".join(f"{item.class_}: {item.remedy}" for item in plan.unserved)
        raise WorkError(f"no plan can serve any of it. {remedies}")

    def again(seen: Sequence[Workload], running: Plan) -> Plan:
        return planner.make_plan(spec, list(seen), seed=seed, current=running)

    return up.Loop(spec, workloads, plan, again)


def _welcome(console: Console, url: str, plan: Plan) -> None:
    body = f'{{"model": "{plan.model.served_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    console.print(f"serving at {url}/v1, try:", markup=False, highlight=False)
    console.print(
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    console.print("Ctrl-C ends it.", markup=False, highlight=False)
