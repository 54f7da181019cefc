"""`kvantile reserve LENGTHS`: what to reserve for recorded output lengths."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from kvantile_optimizer import radius as radii
from kvantile_optimizer import reservation, traces
from kvantile_optimizer.ambiguity import Losses, Order, worst_case_loss
from kvantile_optimizer.cli.output import output_option, write
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.radius import Ball
from kvantile_optimizer.ranges import FiniteRange
from kvantile_optimizer.reservation import Reservation
from kvantile_optimizer.workload import Array, Lengths, Record

LEAST_COST, MOST_COST = 1e-9, 1e9
"""Costs further apart than this only meet rounding."""
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
@click.option(
    "--fixed",
    type=FiniteRange(min=0),
    default=0.0,
    show_default=True,
    help="Cost of any shortage at all.",
)
@click.option("--order", type=click.Choice(["1", "2"]), default="2", show_default=True, help="Of the Wasserstein ball.")
@click.option(
    "--radius",
    metavar="R|auto",
    callback=_radius,
    default="auto",
    show_default=True,
    help="Tokens; auto is validated on later windows of LENGTHS, in the order given, or sd / sqrt(N) for few.",
)
@click.option("--upper", type=click.IntRange(min=1), help="Longest answer possible; no limit by default.")
@click.option("--block", type=click.IntRange(min=1), default=1, show_default=True, help="Reserve multiples of this.")
@click.option(
    "--at", metavar="r1,r2,...", callback=_places, help="Also print the worst-case cost of these reservations."
)
@output_option
def command(
    lengths: Path,
    under: float,
    over: float,
    fixed: float,
    order: str,
    radius: str,
    upper: int | None,
    block: int,
    at: list[int],
    output: str,
) -> None:
    """Say how many output tokens to reserve for the lengths in LENGTHS (- for stdin).

    LENGTHS holds one number a line, with a trailing + where the answer was cut off, or a trace that `kvantile fit`
    reads. Costs are in any one unit; only their ratios move the reservation. Without --upper answers may be of any
    length, and those that were cut off with nothing longer beside them count as long as the longest one.

    \b
    Examples:
      kvantile reserve lengths.txt --under 9 --over 1
      kvantile reserve BurstGPT_1.csv --under 4 --fixed 200 --radius 20 --upper 2048 --block 16 --at 256,512 -o json
    """
    for name, cost in (("--under", under), ("--over", over), ("--fixed", fixed)):
        if cost and not LEAST_COST <= cost <= MOST_COST:
            raise InputError(
                f"{name}: found {cost:g}, allowed 0 or from {LEAST_COST:g} to {MOST_COST:g}; any unit will do"
            )
    if under + over + fixed == 0:
        raise InputError("--under, --over, --fixed: found 0, 0 and 0, allowed at least one above 0")
    if over == 0 and upper is None:
        raise InputError("--over: found 0 without --upper, allowed above 0, or the longest answer that is possible")
    record, losses = _record(lengths, upper), Losses(over, under, fixed)
    order_: Order = 1 if order == "1" else 2
    ball = radii.automatic(record, losses, order_) if radius == "auto" else _asked(record, float(radius))
    best = reservation.robust_reservation(ball.center, losses, order_, ball.radius, block)
    plain = record.lengths()
    sample = reservation.robust_reservation(plain, losses, order_, 0.0, block)
    costs = worst_case_loss(ball.center, losses, order_, ball.radius, at) if at else np.zeros(0)
    result = _result(best, sample, plain, ball, costs)
    if output == "table":
        click.echo(_table(result, at, "quantile" if fixed == 0 else "average's"))
    else:
        write(result, output)


def _asked(record: Record, radius: float) -> Ball:
    return Ball(record.lengths(), radius, "as asked")


def _result(best: Reservation, sample: Reservation, lengths: Lengths, ball: Ball, costs: Array) -> dict[str, Any]:
    return {
        "reserveTokens": best.tokens,
        "worstCaseCost": best.worst_case_loss,
        "sampleAverage": {"reserveTokens": sample.tokens, "cost": sample.sample_loss},
        "fractile": float(lengths.cdf(best.tokens)),
        "radius": best.radius,
        "radiusRule": ball.rule,
        "order": best.order,
        "isSampleQuantile": best.tokens == sample.tokens,
        "samples": lengths.samples,
        "meanTokens": lengths.mean,
        "upperTokens": lengths.upper if math.isfinite(lengths.upper) else None,
        "costsAt": [float(cost) for cost in costs],
    }


def _table(result: dict[str, Any], at: list[int], sample: str) -> str:
    plain, upper = result["sampleAverage"], result["upperTokens"]
    ball = f"order {result['order']}, radius {result['radius']:.6g}, {result['radiusRule']}"
    limit = "no limit" if upper is None else f"limit {upper:.0f}"
    lines = [
        f"reserve         {result['reserveTokens']} tokens (F = {result['fractile']:.4f})",
        f"worst-case cost {result['worstCaseCost']:.6g} a request ({ball})",
        f"sample average  {plain['reserveTokens']} tokens, cost {plain['cost']:.6g}",
        f"lengths         {result['samples']}, mean {result['meanTokens']:.1f}, {limit}",
    ]
    if result["isSampleQuantile"]:
        lines.append(f"The robust reservation is the sample {sample}: this radius changes nothing.")
    lines += [f"at {tokens:<12} {cost:.6g}" for tokens, cost in zip(at, result["costsAt"], strict=True)]
    return "\n".join(lines)


def _record(path: Path, upper: int | None) -> Record:
    """The recorded lengths in their order. Raises InputError."""
    tokens, censored = _recorded(path)
    longest = float(tokens.max())
    if upper is not None and upper < longest:
        raise InputError(f"--upper: found {upper}, allowed at least the longest recorded answer, {longest:.0f}")
    return Record(tokens, censored, math.inf if upper is None else float(upper))


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
