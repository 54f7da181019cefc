"""`kvantile reserve LENGTHS`: what to reserve for recorded output lengths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from kvantile_optimizer import reservation, traces
from kvantile_optimizer.ambiguity import Losses, Order, worst_case_loss
from kvantile_optimizer.cli.output import output_option, write
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.ranges import FiniteRange
from kvantile_optimizer.workload import Array, Lengths, kaplan_meier

_LENGTH = re.compile(r"\s*([0-9]{1,8})\s*(\+?)\s*")


def _radius(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """The text that the spec's `robustness.radius` takes."""
    if value != "auto" and not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        raise click.BadParameter(f"found {value}, allowed auto or tokens of at least 0, such as 20", ctx, param)
    return value


def _places(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int]:
    parts = value.split(",") if value else []
    if not all(re.fullmatch(r"\s*[0-9]{1,8}\s*", part) for part in parts):
        raise click.BadParameter(f"found {value}, allowed whole numbers separated by commas", ctx, param)
    return [int(part) for part in parts]


@click.command("reserve")
@click.argument("lengths", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--under", type=FiniteRange(min=0), default=1.0, show_default=True, help="Cost of a missing token.")
@click.option("--over", type=FiniteRange(min=0), default=1.0, show_default=True, help="Cost of an idle token.")
@click.option("--fixed", type=float, help="Cost of any shortage at all; not there yet.")
@click.option("--order", type=click.Choice(["1", "2"]), default="2", show_default=True, help="Of the Wasserstein ball.")
@click.option(
    "--radius",
    metavar="R|auto",
    callback=_radius,
    default="auto",
    show_default=True,
    help="Tokens; auto is sd / sqrt(N).",
)
@click.option("--upper", type=click.IntRange(min=1), help="Longest answer possible; the longest recorded by default.")
@click.option("--block", type=click.IntRange(min=1), default=1, show_default=True, help="Reserve multiples of this.")
@click.option(
    "--at", metavar="r1,r2,...", callback=_places, help="Also print the worst-case cost of these reservations."
)
@output_option
def command(
    lengths: Path,
    under: float,
    over: float,
    fixed: float | None,
    order: str,
    radius: str,
    upper: int | None,
    block: int,
    at: list[int],
    output: str,
) -> None:
    """Say how many output tokens to reserve for the lengths in LENGTHS (- for stdin).

    LENGTHS holds one number a line, with a trailing + where the answer was cut off, or a trace that `kvantile fit`
    reads. Costs are in any one unit; only their ratio moves the reservation.

    \b
    Examples:
      kvantile reserve lengths.txt --under 9 --over 1
      kvantile reserve BurstGPT_1.csv --under 4 --radius 20 --block 16 --at 256,512 -o json
    """
    if fixed is not None:
        raise click.UsageError("--fixed is not supported yet: leave it out")
    if under + over == 0:
        raise InputError("--under, --over: found 0 and 0, allowed at least one above 0")
    found = _lengths(lengths, upper)
    losses, ball = Losses(over, under), reservation.radius_of(found, radius)
    order_: Order = 1 if order == "1" else 2
    best = reservation.robust_reservation(found, losses, order_, ball, block)
    costs = worst_case_loss(found, losses, order_, ball, at) if at else np.zeros(0)
    result = _result(best, found, costs)
    if output == "table":
        click.echo(_table(result, at))
    else:
        write(result, output)


def _result(best: reservation.Reservation, lengths: Lengths, costs: Array) -> dict[str, Any]:
    return {
        "reserveTokens": best.tokens,
        "worstCaseCost": best.worst_case_loss,
        "sampleAverage": {"reserveTokens": best.sample_tokens, "cost": best.sample_loss},
        "fractile": best.fractile,
        "radius": best.radius,
        "order": best.order,
        "isSampleQuantile": best.is_sample_quantile,
        "samples": lengths.samples,
        "meanTokens": lengths.mean,
        "upperTokens": lengths.upper,
        "costsAt": [float(cost) for cost in costs],
    }


def _table(result: dict[str, Any], at: list[int]) -> str:
    plain, ball = result["sampleAverage"], f"order {result['order']}, radius {result['radius']:.6g}"
    lines = [
        f"reserve         {result['reserveTokens']} tokens (F = {result['fractile']:.4f})",
        f"worst-case cost {result['worstCaseCost']:.6g} a request ({ball})",
        f"sample average  {plain['reserveTokens']} tokens, cost {plain['cost']:.6g}",
        f"lengths         {result['samples']}, mean {result['meanTokens']:.1f}, limit {result['upperTokens']:.0f}",
    ]
    if result["isSampleQuantile"]:
        lines.append("The robust reservation is the sample quantile: this radius changes nothing.")
    lines += [f"at {tokens:<12} {cost:.6g}" for tokens, cost in zip(at, result["costsAt"], strict=True)]
    return "\n".join(lines)


def _lengths(path: Path, upper: int | None) -> Lengths:
    """The recorded lengths, weighted by Kaplan-Meier. Raises InputError."""
    tokens, censored = _recorded(path)
    longest = float(tokens.max())
    if upper is not None and upper < longest:
        raise InputError(f"--upper: found {upper}, allowed at least the longest recorded answer, {longest:.0f}")
    limit = float(upper or longest)
    values, weights = kaplan_meier(tokens, np.ones(len(tokens)), censored, np.full(len(tokens), limit))
    return Lengths.of(values, weights, limit, len(tokens))


def _recorded(path: Path) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Tokens (N,) and whether each was cut off, from numbers or from a trace."""
    text, where = traces.text_of(path), traces.name_of(path)
    first = next((line for line in text.split("\n") if line.strip()), "")
    if first and not _LENGTH.fullmatch(first) and not first.lstrip("+-. \t")[:1].isdigit():
        trace = traces.parse(text, where)
        return trace.output.astype(float), trace.censored
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        match = _LENGTH.fullmatch(line)
        if not match or not 1 <= int(match[1]) <= traces.MAX_TOKENS:
            allowed = f"a whole number from 1 to {traces.MAX_TOKENS}, with a + where it was cut off"
            raise InputError(f"{where}:{number}: found {line.strip()[:40]!r}, allowed {allowed}")
        found.append((int(match[1]), match[2] == "+"))
    if not found:
        raise InputError(f"{where}: found nothing, allowed at least one length")
    return np.array([length for length, _ in found], float), np.array([cut for _, cut in found])
