"""What a plan's classes and groups will see, measured in replays: medians over the seeds, means of shares of time.

A class that several groups serve sees all of them, each by its share of the class's requests, however many of them
were replayed. Latencies are at the class's own percentile, KV use is of one replica.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvantile_optimizer.plan import GroupPrediction, PlanClass, Prediction
from kvantile_optimizer.rehearsal.scene import Scene, Take
from kvantile_optimizer.simulator.state import Floats

STEADY = 0.03
"""Standard error of a mean latency over the seeds, relative to it, that is good enough: a third of a tenth."""

Played = Sequence[tuple[Scene, list[Take]]]
"""Scenes with their replays, one for each seed; what some have more of than others is left out."""


def are_steady(scene: Scene, takes: list[Take]) -> bool:
    """Whether more seeds would hardly move the TTFT that is predicted for any class of a scene, its shakiest figure."""
    for place, part in enumerate(scene.parts):
        tails = [
            np.percentile(mine, part.item.slo.percentile)
            for take in takes
            if len(mine := take.ttft_s[take.class_index == place])
        ]
        if len(tails) > 1 and np.std(tails, ddof=1) / math.sqrt(len(tails)) > STEADY * np.mean(tails):
            return False
    return True


def of_group(scene: Scene, takes: list[Take]) -> GroupPrediction:
    """How the replicas of a group are used."""
    tokens = scene.group.kv_tokens
    return GroupPrediction(
        group=scene.group.name,
        utilisation=float(np.mean([take.utilisation for take in takes])),
        kv_mean_tokens=tokens * float(np.median([take.kv_mean_share for take in takes])),
        kv_p99_tokens=tokens * float(np.median([take.kv_p99_share for take in takes])),
        busy_fraction=float(np.mean([take.busy_fraction for take in takes])),
    )


def of_class(item: PlanClass, played: Played) -> Prediction | None:
    """What a class gets from all its groups, whose scenes `played` has; None when none of its answers decodes."""
    seeds = min(len(takes) for _, takes in played)
    seen = [_seen(item.name, [(scene, takes[seed]) for scene, takes in played]) for seed in range(seeds)]
    ttft_s, tpot_s, preempted, weights = zip(*seen, strict=True)
    decoded = [~np.isnan(values) for values in tpot_s]
    if not all(mask.any() for mask in decoded):
        return None
    percent, pairs = item.slo.percentile, list(zip(tpot_s, weights, decoded, strict=True))
    ttft = [_percentile(values, weight, percent) for values, weight in zip(ttft_s, weights, strict=True)]
    tpot = [_percentile(values[mask], weight[mask], percent) for values, weight, mask in pairs]
    mean = [np.average(values[mask], weights=weight[mask]) for values, weight, mask in pairs]
    share = [np.average(values, weights=weight) for values, weight in zip(preempted, weights, strict=True)]
    return Prediction.model_validate(
        {
            "class": item.name,
            "ttftSeconds": float(np.median(ttft)),
            "tpotSeconds": float(np.median(tpot)),
            "tpotMeanSeconds": float(np.median(mean)),
            "percentile": percent,
            "preemptionProbability": min(1.0, float(np.median(share))),
        }
    )


def _seen(name: str, played: Sequence[tuple[Scene, Take]]) -> tuple[Floats, Floats, Floats, Floats]:
    """TTFT, TPOT, whether preempted, and weight, each (N,), of a class's requests in one replay of each group."""
    columns = []
    for scene, take in played:
        place = next(index for index, part in enumerate(scene.parts) if part.item.name == name)
        mine = np.flatnonzero(take.class_index == place)
        weight = np.full(len(mine), scene.parts[place].route.fraction / max(1, len(mine)))
        columns.append((take.ttft_s[mine], take.tpot_s[mine], take.preempted[mine].astype(float), weight))
    ttft_s, tpot_s, preempted, weights = (np.concatenate(values) for values in zip(*columns, strict=True))
    return ttft_s, tpot_s, preempted, weights


def _percentile(values: Floats, weights: Floats, percent: float) -> float:
    """Of weighted `values` (N,), joined linearly between the middles of their weights."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(percent / 100 * weights.sum(), reached, values[order]))
