"""The table: each figure beside what it is to reach, as markdown for people and as JSON for machines."""

from __future__ import annotations

import json
import math
import platform
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.optimizer.row import Row, Run, Target


@dataclass(frozen=True, slots=True)
class Line:
    """A figure of a row over all runs."""

    key: str
    what: str
    reach: str
    value: str
    spread: str
    met: bool
    median: float
    least: float
    most: float


def write(rows: list[Row], found: dict[str, list[Run]], build: Path, *, quick: bool) -> str:
    """Writes the table into `build` in both forms; the one for people."""
    text = markdown(rows, found, quick=quick)
    (build / "table.md").write_text(text, encoding="utf-8")
    (build / "table.json").write_text(json.dumps(data(rows, found, quick=quick), indent=1), encoding="utf-8")
    return text


def lines(rows: list[Row], found: dict[str, list[Run]]) -> list[Line]:
    """One line for each target, in order."""
    return [_line(row, target, found[row.key]) for row in rows for target in row.targets]


def _line(row: Row, target: Target, runs: list[Run]) -> Line:
    figures = [run.figures.get(target.figure, math.nan) for run in runs]
    value = target.value(figures)
    whole = not any(run.left_out for run in runs) and not any(math.isnan(figure) for figure in figures)
    return Line(
        key=row.key,
        what=f"{row.what}: {target.what or target.figure}" if len(row.targets) > 1 else row.what,
        reach=f"{target.sense} {target.show.format(target.bound)}",
        value=target.show.format(value),
        spread=f"{target.show.format(min(figures))} to {target.show.format(max(figures))}",
        met=whole and target.is_met(value),
        median=statistics.median(figures),
        least=min(figures),
        most=max(figures),
    )


def markdown(rows: list[Row], found: dict[str, list[Run]], *, quick: bool) -> str:
    """The table, and below it each row's notes."""
    head = [machine(), *(["", "**Quick: too little of each row to be evidence.**"] if quick else []), ""]
    table = ["| row | what | reach | value | of the runs | met |", "| --- | --- | --- | --- | --- | --- |"]
    for line in lines(rows, found):
        met = "yes" if line.met else "NO"
        table.append(f"| {line.key} | {line.what} | {line.reach} | {line.value} | {line.spread} | {met} |")
    return "\n".join([*head, *table, *(_notes(row, found[row.key]) for row in rows), ""])


def _notes(row: Row, runs: list[Run]) -> str:
    """What the runs said: of each case the first remark, and how many runs had one."""
    remarks: dict[str, list[str]] = {}
    for run in runs:
        for case, remark in run.notes.items():
            remarks.setdefault(case, []).append(remark)
    said = [f"* {case} ({len(of_case)} of {len(runs)} runs): {of_case[0]}" for case, of_case in sorted(remarks.items())]
    if left_out := sum(run.left_out for run in runs):
        said.append(f"* There was no time for {left_out} cases.")
    seconds = f"{len(runs)} runs, {sum(run.seconds for run in runs):.0f} s"
    return "\n".join([f"\n### {row.key}: {seconds}\n", *(said or ["Nothing missed."])])


def data(rows: list[Row], found: dict[str, list[Run]], *, quick: bool) -> dict[str, Any]:
    """The same as JSON data, with every run."""
    return {
        "machine": machine(),
        "quick": quick,
        "lines": [_finite(asdict(line)) for line in lines(rows, found)],
        "runs": {row.key: [{**asdict(run), "figures": _finite(run.figures)} for run in found[row.key]] for row in rows},
    }


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """The same with null for what JSON has no number for."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }


def machine() -> str:
    """Where it was measured."""
    return f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
