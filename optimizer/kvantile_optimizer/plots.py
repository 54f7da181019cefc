"""The report's plots, each a function from figures to SVG text that stands in a page as it is.

One palette for policies and classes throughout. Text and axes are drawn in one placeholder ink that becomes the page's
own colour, so that the plots follow a light or a dark page; text stays text, which keeps them small and searchable.
Drawn without pyplot, whose state would be shared, and without dates or random ids: the same figures give the same page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

INK = "#1b2a3a"
PALETTE = ("#2f7ed8", "#e07b39", "#8b6bb8", "#2a9d76", "#c8486b", "#7f8c8d")
WIDTH_IN = 9.2
# Any: matplotlib's types list its some 300 keys one by one.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvantile",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
}


@dataclass(frozen=True, slots=True)
class KvSeries:
    """KV cache of all replicas together over time (N,): engine seconds, tokens in use, tokens in use or reserved."""

    time_s: FloatArray
    used_tokens: FloatArray
    committed_tokens: FloatArray
    capacity_tokens: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One policy's replay: seconds to the first token (N,), and its memory."""

    title: str
    ttft_s: FloatArray
    kv: KvSeries


@dataclass(frozen=True, slots=True)
class ClassLengths:
    """Output tokens of a class: ascending values (N,), their weights (N,), and what is reserved."""

    name: str
    values: FloatArray
    weights: FloatArray
    marks: Sequence[Mark]


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """A reservation: the policy's place in the palette, its name, tokens and the share of answers that fit."""

    place: int
    name: str
    tokens: float
    fractile: float


def kv_over_time(policies: Sequence[Measured]) -> str:
    """KV use and reservations, a panel per policy above one time axis."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.6 + 1.75 * len(policies)), layout="constrained")
        panels = np.atleast_1d(figure.subplots(len(policies), 1, sharex=True, sharey=True))
        top = max((np.max(item.kv.committed_tokens, initial=item.kv.capacity_tokens) for item in policies), default=1)
        for axes, item, colour in zip(panels, policies, PALETTE, strict=False):
            _kv_panel(axes, item, colour)
            axes.set_ylim(0, min(top, 2 * item.kv.capacity_tokens) * 1.08)
        panels[-1].set_xlabel("time since the replay began, engine seconds")
        panels[len(panels) // 2].set_ylabel("KV cache, thousand tokens")
        return _svg(figure, "kv")


def _kv_panel(axes: Axes, item: Measured, colour: str) -> None:
    kv = item.kv
    axes.fill_between(kv.time_s, kv.used_tokens, color=colour, alpha=0.55, linewidth=0, label="in use")
    axes.plot(kv.time_s, kv.committed_tokens, color=colour, linewidth=1.1, label="in use or reserved")
    axes.axhline(kv.capacity_tokens, color=INK, linewidth=1, linestyle=(0, (4, 3)), label="capacity")
    axes.set_title(item.title)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=3, fontsize=8.5, borderaxespad=0)
    axes.margins(x=0)


def ttft_distributions(policies: Sequence[Measured], targets: Sequence[tuple[str, float]]) -> str:
    """Share of answers whose first token came within a time; `targets` are (class, seconds)."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, 3.4), layout="constrained")
        axes = figure.subplots()
        for item, colour in zip(policies, PALETTE, strict=False):
            ordered = np.sort(np.maximum(item.ttft_s, 1e-3))
            axes.step(
                ordered,
                100 * np.arange(1, len(ordered) + 1) / max(1, len(ordered)),
                where="post",
                color=colour,
                linewidth=1.8,
                label=item.title,
            )
        for name, seconds in targets:
            axes.axvline(seconds, color=INK, linewidth=1, linestyle=(0, (4, 3)), alpha=0.7)
            axes.annotate(
                f"target of {name}",
                (seconds, 3),
                (-4, 0),
                textcoords="offset points",
                rotation=90,
                fontsize=8.5,
                ha="right",
                va="bottom",
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(0, 101)
        axes.set_xlabel("time to first token, engine seconds (logarithmic)")
        axes.set_ylabel("share of answers, %")
        axes.legend(loc="upper left")
        return _svg(figure, "ttft")


def length_distributions(classes: Sequence[ClassLengths]) -> str:
    """Output lengths of each class with the reservations marked."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.4 + 2.1 * len(classes)), layout="constrained")
        panels = np.atleast_1d(figure.subplots(len(classes), 1))
        for axes, item in zip(panels, classes, strict=True):
            _length_panel(axes, item)
        panels[-1].set_xlabel("output length, tokens")
        return _svg(figure, "lengths")


def _length_panel(axes: Axes, item: ClassLengths) -> None:
    longest = float(item.values[np.searchsorted(np.cumsum(item.weights), 0.998).clip(0, len(item.values) - 1)])
    furthest = max([longest, *(mark.tokens for mark in item.marks)]) * 1.06
    edges = np.linspace(0, furthest, 61)
    axes.hist(item.values, bins=edges.tolist(), weights=100 * item.weights, color=PALETTE[-1], alpha=0.45)
    for mark in item.marks:
        label = f"{mark.name}: {mark.tokens:.0f} tokens, {100 * mark.fractile:.1f} % of answers fit"
        axes.axvline(mark.tokens, color=PALETTE[mark.place % len(PALETTE)], linewidth=1.8, ymax=0.72, label=label)
    axes.set_xlim(0, furthest)
    # Room for the legend, which the marks end below.
    axes.set_ylim(top=axes.get_ylim()[1] * 1.3)
    axes.set_title(item.name)
    axes.set_ylabel("share of answers, %")
    if item.marks:
        axes.legend(loc="upper right", fontsize=8.5)


def reservations(routes: Sequence[tuple[str, float, float, float]]) -> str:
    """(label, mean tokens, reserved tokens, fractile) of each route as a line from the mean to what is reserved."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.9 + 0.42 * len(routes)), layout="constrained")
        axes = figure.subplots()
        for place, (_, mean, reserve, fractile) in enumerate(routes):
            axes.plot([mean, reserve], [place, place], color=PALETTE[0], linewidth=2, alpha=0.5)
            axes.plot([reserve], [place], "o", color=PALETTE[0], label="reserved" if not place else None)
            axes.plot([mean], [place], "|", color=INK, markersize=13, label="mean" if not place else None)
            axes.annotate(
                f"{100 * fractile:.1f} % fit", (reserve, place), (7, 0), textcoords="offset points", va="center"
            )
        axes.set_yticks(range(len(routes)), [label for label, *_ in routes])
        axes.set_ylim(len(routes) - 0.5, -0.5)
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        axes.set_xlabel("output length, tokens")
        axes.legend(loc="lower right", ncols=2, bbox_to_anchor=(1, 1), borderaxespad=0)
        return _svg(figure, "reservations")


def costs(parts: Sequence[tuple[str, float]]) -> str:
    """(name, US dollars per hour) of each part of the objective."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.8 + 0.36 * len(parts)), layout="constrained")
        axes = figure.subplots()
        names, dollars = [name for name, _ in parts], [amount for _, amount in parts]
        bars = axes.barh(names, dollars, color=PALETTE[0], height=0.6)
        axes.bar_label(bars, labels=[f"{amount:,.2f}" for amount in dollars], padding=4)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.12)
        axes.set_xlabel("US dollars per hour")
        return _svg(figure, "costs")


def _svg(figure: Figure, name: str) -> str:
    """The figure's SVG element, its ids made unique in a page by `name`, its ink the page's."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
