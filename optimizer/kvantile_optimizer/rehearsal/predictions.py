"""What a plan's classes and groups will see, measured in replays: medians over the seeds.

A class that several groups serve sees all of them, each by its share of the class's requests, however many of them
were replayed. Latencies are at the class's own percentile, KV use is of one replica.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvantile_optimizer.plan import GroupPrediction, PlanClass, Prediction
from kvantile_optimizer.rehearsal.scene import Scene, Take
from kvantile_optimizer.simulator.state import Floats

Played = Sequence[tuple[Scene, list[Take]]]
"""Scenes with their replays, one for each seed, the same number everywhere."""


def of_group(scene: Scene, takes: list[Take]) -> GroupPrediction:
    """How the replicas of a group are used."""
    tokens = scene.group.kv_tokens
    outcomes = [take.outcome for take in takes]
    return GroupPrediction(
        group=scene.group.name,
        utilisation=float(np.median([take.utilisation for take in takes])),
        kv_mean_tokens=tokens * float(np.median([outcome.kv_mean_share() for outcome in outcomes])),
        kv_p99_tokens=tokens * float(np.median([outcome.kv_share(99) for outcome in outcomes])),
        busy_fraction=float(np.median([outcome.utilisation.mean() for outcome in outcomes])),
    )


def of_class(item: PlanClass, played: Played) -> Prediction | None:
    """What a class gets from all its groups, whose scenes `played` has; None when none of its answers decodes."""
    seen = [_seen(item.name, [(scene, takes[seed]) for scene, takes in played]) for seed in range(len(played[0][1]))]
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
        preempted = (take.outcome.preemptions[mine] > 0).astype(float)
        columns.append((take.answers.ttft_s[mine], take.answers.tpot_s[mine], preempted, weight))
    ttft_s, tpot_s, preempted, weights = (np.concatenate(values) for values in zip(*columns, strict=True))
    return ttft_s, tpot_s, preempted, weights


def _percentile(values: Floats, weights: Floats, percent: float) -> float:
    """Of weighted `values` (N,), joined linearly between the middles of their weights."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(percent / 100 * weights.sum(), reached, values[order]))
