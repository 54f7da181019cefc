"""Random planning problems of a given size, the same for the same seed: an 8B model, all kinds of classes and pools."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.optimizer.scenarios import pool, serving_plan
from kvantile_optimizer import coefficients, workload
from kvantile_optimizer.coefficients import Tables
from kvantile_optimizer.problem import Problem, pose
from kvantile_optimizer.program import Instance
from kvantile_optimizer.spec import ServingPlan

GPUS = ("L4", "L40S", "A10G", "A100-40", "A100-80", "H100-80", "H200", "B200", "MI300X", "RTX4090")
TARGETS_MS = ((500, 40), (1000, 50), (2000, 60), (3000, 100), (8000, 150), (15_000, 300))
"""TTFT and TPOT. Six pairs on up to four widths of a node are up to 24 candidates in a pool."""
PROMPTS, OUTPUTS = (150, 400, 1000, 2000), (40, 150, 400, 900)
"""Medians, tokens, before a random factor."""
USUAL_RATE = 3.0
"""Requests per second of the median class; rates are log-normal."""
MAX_MODEL_LEN = 16_384


def plan_of(classes: int, pools: int, seed: int, *, gpus: int = 16, prefix_share: float = 0.3) -> ServingPlan:
    """A ServingPlan; pools have `gpus` to three times as many GPUs, a share of the classes a prefix in common."""
    rng = np.random.default_rng(seed)
    return serving_plan(
        f"random-{classes}-{pools}-{seed}",
        [_class(rng, number, prefix_share) for number in range(classes)],
        [_pool(rng, number, gpus) for number in range(pools)],
        MAX_MODEL_LEN,
    )


def _class(rng: np.random.Generator, number: int, prefix_share: float) -> dict[str, Any]:
    ttft_ms, tpot_ms = TARGETS_MS[rng.integers(len(TARGETS_MS))]
    prompt, output = (int(rng.choice(medians) * rng.uniform(0.7, 1.4)) for medians in (PROMPTS, OUTPUTS))
    item: dict[str, Any] = {
        "name": f"c{number}",
        "default": number == 0,
        "slo": {"ttftMilliseconds": ttft_ms, "tpotMilliseconds": tpot_ms, "percentile": 99},
        "demand": {
            "requestsPerSecond": f"{rng.lognormal(np.log(USUAL_RATE), 0.8):.4f}",
            "burstiness": f"{rng.choice([1.0, 2.0]):.1f}",
            "promptTokens": _lengths(prompt, 4),
            "outputTokens": _lengths(output, 5),
        },
    }
    if rng.random() < prefix_share:
        item["sharedPrefix"] = {"tokens": int(rng.choice([200, 600])), "share": "0.8"}
    return item


def _lengths(median: int, most: int) -> dict[str, int]:
    return {"p50": median, "p90": 2 * median, "p99": 3 * median, "max": most * median}


def _pool(rng: np.random.Generator, number: int, gpus: int) -> dict[str, Any]:
    return {**pool(GPUS[number % len(GPUS)], maxGPUs=int(gpus * rng.integers(1, 4))), "name": f"p{number}"}


def posed(spec: ServingPlan) -> tuple[Problem, Tables, Instance]:
    """The plan's problem, and its program with the closed forms' first guess and no columns yet."""
    problem = pose(spec, workload.of_plan(spec, {}))
    return problem, coefficients.tables(problem), coefficients.first_instance(problem)
