"""The page escapes what people wrote, loads nothing, and is the same for the same figures."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np

from kvantile_optimizer import plots, report
from kvantile_optimizer.plan import PlanId
from kvantile_optimizer.report import Report
from tests.support.small_plan import make_plan


def make_report(name: str = "small") -> Report:
    plan = make_plan().model_copy(update={"plan": PlanId(name=name, namespace="default"), "warnings": [name]})
    time_s = np.linspace(0, 10, 20)
    kv = plots.KvSeries(time_s, 100 * time_s, 120 * time_s, 900.0)
    lengths = plots.ClassLengths(name, np.arange(1.0, 101.0), np.full(100, 0.01), [plots.Mark(0, name, 90, 0.9)])
    return Report(
        plan=plan,
        rows=[{"policy": name, "ttftP99Seconds": 1.234, "preemptions": 7}],
        titles={},
        verdict=f"{name} won",
        measured=[plots.Measured(name, np.linspace(0.1, 3, 30), kv)],
        lengths=[lengths],
    )


def test_the_same_figures_give_the_same_page() -> None:
    assert report.page(make_report()) == report.page(make_report())


def test_names_are_escaped_in_text_and_in_plots() -> None:
    html = report.page(make_report("<script>alert(1)</script>&"))
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 5


def test_the_page_loads_nothing() -> None:
    html = report.page(make_report())
    assert not re.findall(r'(?:src|href)="(?!#)', html)
    assert "@import" not in html


def test_ids_are_unique_to_their_plot() -> None:
    class Ids(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.prefixes: set[str] = set()

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
            self.prefixes |= {value.split("-")[0] for name, value in attrs if name == "id" and value}

    ids = Ids()
    ids.feed(report.page(make_report()))
    assert ids.prefixes == {"kv", "ttft", "lengths", "reservations", "costs"}


def test_figures_stand_in_the_table_with_their_unit() -> None:
    html = report.page(make_report())
    assert "P99 TTFT, s" in html
    assert "<td>1.23</td>" in html
    assert "P50 TTFT, s" not in html


def test_a_plan_alone_has_neither_comparison_nor_replay() -> None:
    html = report.page(Report(plan=make_plan()))
    assert "Policies side by side" not in html
    assert html.count("<svg") == 2
