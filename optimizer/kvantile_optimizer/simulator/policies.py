"""The reservation policies that plans are compared with, by the names of the evaluation.

Each says what to set aside for a request, from the lengths that its class had before (`Past`); `oracle` looks at the
answer. `stock`, the watermarks, `new-token-ratio` and `past-future` reserve nothing and admit by a rule of their own.
Reservations can be held or pooled, and every policy can run in every order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvantile_optimizer.admission import blocks_for
from kvantile_optimizer.ambiguity import Losses
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.plan import Form
from kvantile_optimizer.reservation import robust_reservation
from kvantile_optimizer.simulator.replica import NO_LIMIT, Policy, Requests
from kvantile_optimizer.simulator.state import Ints
from kvantile_optimizer.waiting import Order
from kvantile_optimizer.workload import Lengths

WATERMARKS = (1, 2, 3, 5, 10, 20)
QUANTILES = (50, 75, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of a class before the replay: its lengths, what a wrong reservation costs, and the radius."""

    lengths: Lengths
    losses: Losses
    radius: float = 0.0
    """Of the Wasserstein ball, tokens."""
    block: int = 16


def _robust(order: int) -> Callable[[Past], float]:
    return lambda past: (
        robust_reservation(
            past.lengths,
            past.losses,
            order,  # type: ignore[arg-type]  # 1 or 2, below
            past.radius,
            past.block,
        ).tokens
    )


RESERVES: dict[str, Callable[[Past], float]] = {
    "max-tokens": lambda past: past.lengths.upper,
    **{f"p{percent}": lambda past, at=percent: past.lengths.quantile(at / 100) for percent in QUANTILES},  # type: ignore[misc]  # a lambda's default
    "mean": lambda past: past.lengths.mean,
    "mean-2sd": lambda past: past.lengths.mean + 2 * past.lengths.std,
    "saa": lambda past: past.lengths.quantile(past.losses.fractile),
    "dro-1": _robust(1),
    "dro-2": _robust(2),
}
"""Tokens to reserve for every request of a class, before rounding up to blocks."""

NOTHING: dict[str, tuple[float, str]] = {
    "stock": (0.0, "reservation"),
    **{f"watermark-{percent:02}": (percent / 100, "reservation") for percent in WATERMARKS},
    "past-future": (0.0, "past-future"),
    "new-token-ratio": (0.0, "new-token-ratio"),
}
"""Watermark and gate of the policies that reserve nothing."""

NAMES = (*NOTHING, *RESERVES, "oracle")


def named(
    name: str,
    requests: Requests,
    class_index: Ints,
    past: Sequence[Past],
    *,
    form: Form = "held",
    pooling: float = 1.0,
    order: Order = "fcfs",
) -> Policy:
    """The policy of that name for `requests` (N,) of the classes `class_index` (N,), whose past is `past` (C,).

    `form` and `pooling` are for policies that reserve. Raises InputError for a name that is none.
    """
    if name in NOTHING:
        watermark, gate = NOTHING[name]
        return Policy("none", order=order, watermark=watermark, gate=gate, history=_history(past))
    if name == "oracle":
        return Policy(form, requests.output, pooling, order)
    if name not in RESERVES:
        raise InputError(f"policy: found {name}, allowed {', '.join(NAMES)}")
    reserve = np.array([blocks_for(int(np.ceil(RESERVES[name](item))), item.block) * item.block for item in past])
    if name == "max-tokens":
        limits = np.broadcast_to(requests.max_tokens, len(requests))
        return Policy(form, np.where(limits < NO_LIMIT, limits, reserve[class_index]), pooling, order)
    return Policy(form, reserve[class_index], pooling, order)


def _history(past: Sequence[Past]) -> Ints:
    """Past lengths of all classes together, a thousand evenly chosen ones of each."""
    levels = (np.arange(1000) + 0.5) / 1000
    return np.array([item.lengths.quantile(float(level)) for item in past for level in levels], np.int64)
