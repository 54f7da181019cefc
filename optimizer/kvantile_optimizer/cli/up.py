"""`kvantile up`: plan, start, serve until Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import click
from rich.console import Console

from kvantile_optimizer import explain, planner, specfile, workload
from kvantile_optimizer.errors import InputError, WorkError
from kvantile_optimizer.local import runner, up, vllm
from kvantile_optimizer.local.flags import FleetSettings, Vllm
from kvantile_optimizer.plan import Plan, PlanStatus
from kvantile_optimizer.ranges import FiniteRange
from kvantile_optimizer.spec import ServingPlan
from kvantile_optimizer.specfile import SpecFile
from kvantile_optimizer.workload import Workload

HOST = "127.0.0.1"
START_DEADLINES_S = {"emulator": 60.0, "vllm": 1800.0}
"""An emulator starts in a second or two; vLLM may have to fetch the model's weights first. A process that ends is not
waited for, so only one that hangs takes so long."""


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
@click.option(
    "--engine",
    type=click.Choice(["emulator", "vllm"]),
    default="emulator",
    show_default=True,
    help="What serves: emulators, or real vLLM servers with Kvantile's scheduler.",
)
@click.option(
    "--vllm-python",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    envvar="KVANTILE_VLLM_PYTHON",
    show_envvar=True,
    metavar="PATH",
    help="The Python interpreter of the environment that has vLLM; the one that runs this unless given.",
)
@click.option(
    "--start-deadline",
    type=FiniteRange(0, min_open=True),
    metavar="SECONDS",
    help="How long a replica may take until it listens: loading a model takes its time.  [default: 60; 1800 with vllm]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the plan and of the emulated answers.")
def command(
    spec: Path,
    port: int,
    speed: float,
    engine: Literal["emulator", "vllm"],
    vllm_python: Path | None,
    start_deadline: float | None,
    seed: int,
) -> None:
    """Runs the whole loop on this machine: plan, replicas, gateway, and planning anew from what is seen.

    SPEC is a ServingPlan file. Ctrl-C leaves nothing behind.

    \b
    Examples:
      kvantile up examples/chat.yaml --port 8000
      kvantile up my.yaml --engine vllm --vllm-python /opt/vllm/bin/python
    """
    console = Console(stderr=True)
    if engine == "vllm" and speed != 1:
        raise InputError(f"--speed: found {speed:g}, allowed 1 with --engine vllm: a real engine has no virtual time")
    up.check_port(HOST, port)
    found = specfile.load(None if str(spec) == "-" else spec)
    with _engine(engine, vllm_python, _only(found, spec)) as real:
        loop = _loop(found, seed)
        explain.render(loop.plan, console)
        settings = FleetSettings(
            host=HOST,
            port=port,
            speed=speed,
            seed=seed,
            start_deadline_s=start_deadline or START_DEADLINES_S[engine],
            vllm=real,
        )
        _serve(loop, settings, console)


def _engine(name: str, python: Path | None, spec: ServingPlan) -> AbstractContextManager[Vllm | None]:
    """The real engine while the body runs, None for the emulator."""
    if name == "emulator":
        return nullcontext()
    return vllm.prepared(str(python or sys.executable), spec.spec.engine)


def _serve(loop: up.Loop, settings: FleetSettings, console: Console) -> None:
    serving = False

    def ready(url: str) -> None:
        nonlocal serving
        serving = True
        _welcome(console, url, loop.plan)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if settings.vllm is not None:
        say("vLLM is starting; loading a model takes its time")
    try:
        runner.run(up.serve(loop, settings, say, ready))
    except KeyboardInterrupt:
        if not serving:
            raise
        console.print("stopped")


def _only(found: SpecFile, path: Path) -> ServingPlan:
    if len(found.plans) != 1:
        raise InputError(f"{path}: found {len(found.plans)} ServingPlans, allowed one")
    return found.plans[0]


def _loop(found: SpecFile, seed: int) -> up.Loop:
    (spec,) = found.plans
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
