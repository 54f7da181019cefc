"""Random planning problems of a given size, the same for the same seed."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvantile_optimizer import workload
from kvantile_optimizer.problem import Problem, pose
from kvantile_optimizer.spec import ServingPlan
from tests.support.specs import make_class, make_pool, make_serving_plan

GPUS = ("L4", "L40S", "A10G", "A100-80", "H100-80", "RTX4090")
TARGETS_MS = ((500, 40), (1000, 50), (3000, 100), (15000, 300))


def random_serving_plan(
    classes: int, pools: int, seed: int, *, gpus: int = 16, prefix_share: float = 0.3
) -> ServingPlan:
    """A ServingPlan of an 8B model: classes of all targets and lengths, pools of `gpus` to three times as many GPUs."""
    rng = np.random.default_rng(seed)
    return make_serving_plan(
        classes=[_random_class(rng, number, prefix_share) for number in range(classes)],
        pools=[
            make_pool(f"pool{number}", GPUS[number % len(GPUS)], per_node=8, maxGPUs=int(gpus * rng.integers(1, 4)))
            for number in range(pools)
        ],
    )


def _random_class(rng: np.random.Generator, number: int, prefix_share: float) -> dict[str, Any]:
    ttft, tpot = TARGETS_MS[rng.integers(len(TARGETS_MS))]
    prompt, output = int(rng.integers(100, 1200)), int(rng.integers(30, 600))
    shared = {"sharedPrefix": {"tokens": 200, "share": "0.8"}} if rng.random() < prefix_share else {}
    return make_class(
        f"class{number}",
        round(float(rng.lognormal(0.7, 0.8)), 4),
        default=number == 0,
        ttft=ttft,
        tpot=tpot,
        burstiness=float(rng.choice([1.0, 2.0])),
        prompt={"p50": prompt, "p90": 2 * prompt, "p99": 3 * prompt, "max": 4 * prompt},
        output={"p50": output, "p90": 2 * output, "p99": 3 * output, "max": 5 * output},
        **shared,
    )


def random_problem(classes: int, pools: int, seed: int, **options: Any) -> Problem:
    """The same, posed."""
    serving_plan = random_serving_plan(classes, pools, seed, **options)
    return pose(serving_plan, workload.of_plan(serving_plan, {}))
