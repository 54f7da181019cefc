"""How far the lengths of tomorrow may be from the recorded ones: what the radius `auto` means, from the record itself.

With enough answers in order of time, by rolling-origin validation: reserve from the past with each candidate radius,
pay what the next window would have made it cost, move on; of all radii within one standard error of the cheapest the
smallest is taken (the one-standard-error rule of Breiman et al., Classification and Regression Trees, 1984, 3.4.3), and
0 is always among them. The distance between two windows itself would be mostly sampling noise.

With fewer, the radius is the standard error of the mean. Below some fifty answers another ball is a strong competitor:
the one around their mean alone with their standard deviation as its radius, whose best reservation on the line is
Scarf's mean + multiplier * sd (Scarf 1958). Which of both is taken is decided by leaving each answer out once and
paying for it (Stone 1974). A class that small in a plan also borrows the answers of all classes together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from kvantile_optimizer.ambiguity import Losses, Order, expected_loss
from kvantile_optimizer.reservation import robust_reservation
from kvantile_optimizer.spec import ClassRobustness, Robustness
from kvantile_optimizer.workload import Array, Lengths, Record, Workload

PANEL = (Losses(1, 1), Losses(1, 4), Losses(1, 19))
"""Fractiles 0.5, 0.8 and 0.95: what prices usually come to. For a radius that is chosen before prices are known."""
FEW = 50
"""Answers below which Scarf's rule competes and a class borrows from its parent."""
WINDOWS = 5
"""Windows that are paid for; the answers before the first of them are as many as one holds."""
WINDOW_ANSWERS = 50
"""Fewer answers in a window say nothing about the fractiles that matter."""
_GRID = 32
"""Reservations in a standard deviation: finer ones cost the same."""
STEPS = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Candidate radii over the standard deviation. Radii of 1 sd and more never paid on recorded traffic."""


@dataclass(frozen=True, slots=True, eq=False)
class Ball:
    """The distributions to be safe against: those within `radius` tokens of `center`."""

    center: Lengths
    radius: float
    rule: str
    """How it was chosen, in words."""


def standard_error(lengths: Lengths) -> float:
    """sd / sqrt(N), tokens: the sampling error of the mean; 0 for a class that a person described."""
    return lengths.std / math.sqrt(lengths.samples) if lengths.samples else 0.0


def of_class(workload: Workload, robustness: Robustness, own: ClassRobustness | None = None) -> float:
    """The radius in tokens that a plan's `robustness` means for a class with `own` overriding it."""
    asked = own.radius if own else robustness.radius
    if asked != "auto":
        return float(asked)
    return validated(workload.record, robustness.order) if workload.record else standard_error(workload.lengths)


def validated(record: Record, order: Order, panel: Sequence[Losses] = PANEL) -> float:
    """The radius in tokens for the answers of `record`: by validation, or the standard error when they are too few."""
    lengths = record.lengths()
    if len(record) < (WINDOWS + 1) * WINDOW_ANSWERS:
        return standard_error(lengths)
    radii = [step * lengths.std for step in STEPS]
    edges = np.linspace(0, len(record), WINDOWS + 2).round().astype(int)
    windows = [(record.lengths(0, now), record.lengths(now, then)) for now, then in pairwise(edges[1:])]
    costs = np.zeros((WINDOWS, len(radii)))
    for losses in panel:
        paid = np.array([[_paid(*window, losses, order, radius) for radius in radii] for window in windows])
        costs += paid / max(paid[:, 0].mean(), np.finfo(float).tiny)
    return radii[smallest_within_one_standard_error(costs)]


def smallest_within_one_standard_error(costs: Array) -> int:
    """The first column of `costs` (windows, radii) whose mean is within one standard error of the least."""
    means = costs.mean(axis=0)
    best = int(np.argmin(means))
    error = float(costs[:, best].std(ddof=1)) / math.sqrt(len(costs))
    return int(np.argmax(means <= means[best] + error))


def _paid(past: Lengths, future: Lengths, losses: Losses, order: Order, radius: float) -> float:
    """What reserving from `past` costs in `future`."""
    reserve = robust_reservation(past, losses, order, radius, _coarse(past)).tokens
    return float(expected_loss(future, losses, reserve))


def _coarse(lengths: Lengths) -> int:
    """Tokens between the reservations that are compared: much less than the answers differ by."""
    return max(1, round(lengths.std / _GRID))


def automatic(record: Record, losses: Losses, order: Order) -> Ball:
    """The ball of the radius `auto` when the losses are known: Scarf's for few answers that say so.

    Both leave the record alone where they come to the same reservation; then the plain one is reported.
    """
    center = record.lengths()
    if len(record) >= (WINDOWS + 1) * WINDOW_ANSWERS:
        return Ball(center, validated(record, order, [losses]), f"validated on {WINDOWS} windows")
    plain, scarf = _around_all(center), around_mean(center)
    if order == 1 or not 2 < len(record) < FEW or _reserve(plain, losses, 1) == _reserve(scarf, losses, 1):
        return plain
    return scarf if _left_out(record, losses, around_mean) < _left_out(record, losses, _around_all) else plain


def _around_all(lengths: Lengths) -> Ball:
    return Ball(lengths, standard_error(lengths), "sd / sqrt(N)")


def around_mean(lengths: Lengths) -> Ball:
    """Every distribution of that mean and that deviation, and others: Scarf's rule as a ball of order 2."""
    return Ball(Lengths.of([lengths.mean], [1.0], lengths.upper, lengths.samples), lengths.std, "mean and sd (Scarf)")


def _left_out(record: Record, losses: Losses, rule: Callable[[Lengths], Ball]) -> float:
    """The mean loss of reserving for each answer that ended what the others say."""
    ended, numbers = np.flatnonzero(~record.censored), np.arange(len(record))
    total = 0.0
    for index in ended:
        others = numbers != index
        lengths = Record(record.tokens[others], record.censored[others], record.upper).lengths()
        total += float(
            losses.at(np.array(float(_reserve(rule(lengths), losses, _coarse(lengths)))), record.tokens[index])
        )
    return total / max(1, len(ended))


def _reserve(ball: Ball, losses: Losses, block: int) -> int:
    return robust_reservation(ball.center, losses, 2, ball.radius, block).tokens


def borrowed(workloads: list[Workload]) -> list[Workload]:
    """The workloads of a plan; recorded ones of fewer than FEW requests get answers of all recorded ones beside theirs.

    With N requests of its own a class keeps the weight N / (N + FEW) for them (Buehlmann's credibility formula with
    FEW as its constant); the rest goes to the others' requests, as far as they fit the class's L.
    """
    recorded = [workload for workload in workloads if workload.samples]
    if len(recorded) < 2:
        return workloads
    return [_borrowing(item, recorded) if 0 < item.samples < FEW else item for item in workloads]


def _borrowing(mine: Workload, recorded: list[Workload]) -> Workload:
    others = [other for other in recorded if other is not mine]
    share = np.concatenate([other.samples * other.weight for other in others])
    prompt = np.concatenate([other.prompt for other in others])
    output = np.minimum(np.concatenate([other.output for other in others]), mine.upper)
    fits = prompt + output <= mine.max_model_len
    if not share[fits].sum():
        return mine
    own = mine.samples / (mine.samples + FEW)
    return replace(
        mine,
        prompt=np.concatenate([mine.prompt, prompt[fits]]),
        output=np.concatenate([mine.output, output[fits]]),
        weight=np.concatenate([own * mine.weight, (1 - own) * share[fits] / share[fits].sum()]),
        borrowed_share=1 - own,
        record=None,
    )
