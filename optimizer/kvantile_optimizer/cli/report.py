"""`kvantile report`: a plan as one HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvantile_optimizer import report, specfile
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.local import atomic, policies


@click.command("report")
@click.argument("plan", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--simulation",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Rows of a comparison, as `kvantile demo -o json` prints them.",
)
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The page to write.")
def command(plan: Path, simulation: Path | None, output: Path) -> None:
    """Writes a plan as one self-contained HTML page with plots. PLAN is what `kvantile plan -o json` printed.

    \b
    Example:
      kvantile plan examples/chat.yaml -o json > plan.json
      kvantile report plan.json -o plan.html
    """
    rows = _rows(simulation) if simulation else []
    found = report.Report(plan=specfile.load_plan(plan), rows=rows, titles=policies.TITLES)
    atomic.write(output, report.page(found))
    click.echo(f"wrote {output}", err=True)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a comparison's JSON. Raises InputError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: found {error}, allowed JSON") from None
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and isinstance(row.get("policy"), str) for row in rows
    ):
        raise InputError(f"{path}: rows: found none, allowed a list of rows with a policy each")
    return rows
