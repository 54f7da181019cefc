"""`kvantile validate SPEC`: check a ServingPlan file without a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click

from kvantile_optimizer.errors import InputError
from kvantile_optimizer.spec import ServingPlan
from kvantile_optimizer.specfile import ConfigMapKeys, load


@click.command("validate")
@click.argument("spec", type=click.Path(path_type=Path, allow_dash=True))
def command(spec: Path) -> None:
    """Check the ServingPlans in SPEC (YAML; - for stdin) without a cluster.

    Every fault is one line with its path, what was found and what is allowed, and the exit code is then 2.

    \b
    Example:
      kvantile validate examples/chat.yaml
    """
    file = load(spec)
    faults = [line for plan in file.plans for line in _faults(plan, file.config_maps)]
    if faults:
        raise InputError("\n".join(faults))
    for plan in file.plans:
        parts = f"{_counted(plan.spec.classes, 'class', 'classes')}, {_counted(plan.spec.node_pools, 'pool', 'pools')}"
        click.echo(f"{plan.metadata.namespace}/{plan.metadata.name} is valid: {parts}")


def _faults(plan: ServingPlan, config_maps: ConfigMapKeys) -> list[str]:
    """What the document alone cannot tell: unknown models and GPUs, recorded lengths that are broken."""
    from kvantile_optimizer import candidates, geometry

    checks: list[Callable[[], object]] = [
        lambda: geometry.of_model(plan.spec.model),
        lambda: candidates.pools(plan.spec.node_pools),
        *(partial(_lengths, plan, index, config_maps) for index in range(len(plan.spec.classes))),
    ]
    lines = []
    for check in checks:
        try:
            check()
        except InputError as error:
            lines += str(error).splitlines()
    return lines


def _lengths(plan: ServingPlan, index: int, config_maps: ConfigMapKeys) -> None:
    """Recorded lengths may wait in the cluster: their absence is worth a note, not a fault."""
    from kvantile_optimizer import workload

    try:
        found = workload.of_plan_class(plan, index, config_maps)
    except workload.MissingSamplesError as error:
        click.echo(f"not checked: {error}", err=True)
    else:
        for warning in found.warnings:
            click.echo(f"warning: {warning}", err=True)


def _counted(items: Sequence[object], one: str, many: str) -> str:
    return f"{len(items)} {one if len(items) == 1 else many}"
