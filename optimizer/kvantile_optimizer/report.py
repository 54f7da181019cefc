"""One self-contained HTML page about a plan, and about a replay of it where there was one.

Pure: figures in, text out. Everything that is text is escaped by the template; only the plots, drawn here from
numbers, are put in as they are. The page loads nothing, runs no script and follows the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jinja2
from markupsafe import Markup

from kvantile_optimizer import plots
from kvantile_optimizer.plan import Plan

Figure = float | int | str | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the comparison: the row's key, its heading with the unit, how a number is written."""

    key: str
    heading: str
    format: str = "{}"
    scale: float = 1.0

    def text(self, row: Mapping[str, Figure]) -> str:
        """The row's figure as it is shown."""
        value = row.get(self.key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return self.format.format(value * self.scale)
        return "–" if value is None else str(value)


COLUMNS = (
    Column("goodputRequestsPerSecond", "goodput, req/s", "{:.2f}"),
    Column("sloViolationFraction", "SLO misses, %", "{:.1f}", 100),
    Column("ttftP50Seconds", "P50 TTFT, s", "{:.2f}"),
    Column("ttftP99Seconds", "P99 TTFT, s", "{:.2f}"),
    Column("tpotP99Seconds", "P99 TPOT, ms", "{:.0f}", 1000),
    Column("e2eP99Seconds", "P99 whole answer, s", "{:.1f}"),
    Column("preemptions", "preemptions", "{:.0f}"),
    Column("requestsFailed", "failed", "{:.0f}"),
    Column("gpus", "GPUs", "{:.0f}"),
    Column("gpuUSDPerHour", "$/h", "{:.2f}"),
)


@dataclass(frozen=True, slots=True)
class Report:
    """What a page is made of; only the plan is a must. `rows` are the evaluation's, `titles` name their policies."""

    plan: Plan
    rows: Sequence[Mapping[str, Figure]] = ()
    titles: Mapping[str, str] = field(default_factory=dict)
    verdict: str = ""
    measured: Sequence[plots.Measured] = ()
    lengths: Sequence[plots.ClassLengths] = ()
    notes: Sequence[str] = ()


def page(report: Report) -> str:
    """The page's HTML."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvantile_optimizer", "data"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        report=report, plan=report.plan, columns=shown_columns(report.rows), plots=_plots(report)
    )


def shown_columns(rows: Sequence[Mapping[str, Figure]]) -> list[Column]:
    """The columns for which any row has a figure."""
    return [column for column in COLUMNS if any(row.get(column.key) is not None for row in rows)]


def _plots(report: Report) -> dict[str, Markup]:
    plan = report.plan
    # Markup: the plots are drawn here from numbers, and matplotlib escapes the names it writes.
    drawn: dict[str, str] = {}
    if report.measured:
        targets = [(item.name, item.slo.ttft_seconds) for item in plan.classes]
        drawn["kv"] = plots.kv_over_time(report.measured)
        drawn["ttft"] = plots.ttft_distributions(report.measured, targets)
    if report.lengths:
        drawn["lengths"] = plots.length_distributions(report.lengths)
    routes = [
        (f"{route.class_} on {route.group}", route.mean_tokens, float(route.reserve_tokens), route.fractile)
        for route in plan.routes
        if route.fraction > 0
    ]
    if routes:
        drawn["reservations"] = plots.reservations(routes)
    drawn["costs"] = plots.costs([(name, amount) for name, amount in _cost_parts(plan) if amount or name == "GPUs"])
    return {name: Markup(svg) for name, svg in drawn.items()}  # noqa: S704 - see above


def _cost_parts(plan: Plan) -> list[tuple[str, float]]:
    costs = plan.costs
    return [
        ("GPUs", costs.gpu),
        ("idle reserved memory", costs.memory),
        ("preemption", costs.preemption),
        ("switching", costs.switching),
        ("unserved", costs.unserved),
    ]
