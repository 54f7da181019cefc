"""Plans and workloads to rehearse: a class of bursts on replicas with little memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvantile_optimizer.plan import Plan
from kvantile_optimizer.workload import Record, Workload
from tests.support.plans import make_class, make_group, make_plan, make_route

STEP_TIME = {"alpha": 0.0075, "beta": 1e-4, "gamma": 5e-8, "delta": 1e-4}


def make_workload(name: str = "chat", rate: float = 8.0, burstiness: float = 2.0, **given: Any) -> Workload:
    """Some thousand log-normal prompts and answers."""
    rng = np.random.default_rng(7)
    prompt = np.clip(np.rint(rng.lognormal(6.2, 0.8, 2000)), 1, 3000)
    output = np.clip(np.rint(rng.lognormal(5.0, 0.8, 2000)), 1, 1000)
    usual: dict[str, Any] = {"prompt": prompt, "output": output, "weight": np.full(2000, 1 / 2000), "upper": 1000.0}
    return Workload(name, rate, burstiness, max_model_len=4096, **(usual | given))


def make_record(count: int = 6_000, period: int = 2_400, **given: Any) -> Record:
    """Rows at twice the mean rate for a third of each `period` and at half of it for the rest; mean gap 1 s."""
    rng = np.random.default_rng(3)
    even = np.cumsum(rng.exponential(1.0, count))
    corners = period * np.arange(int(even[-1] / period) + 2)
    reached = np.column_stack([corners, corners + 2 * period / 3]).ravel()
    moments = np.interp(even, reached, np.column_stack([corners, corners + period / 3]).ravel())
    rows, source = rng.integers(2000, size=count), make_workload()
    usual: dict[str, Any] = {
        "tokens": source.output[rows],
        "censored": np.zeros(count, bool),
        "upper": 1000.0,
        "arrival_s": moments,
        "prompt": source.prompt[rows],
    }
    return Record(**(usual | given))


def make_bursty_plan(
    replicas: int = 4, *, percentile: int = 97, kv_tokens: int = 20_000, ttft_s: dict[str, float] | None = None
) -> Plan:
    """One group, and the classes of `ttft_s` by their TTFT targets, all routed to it; `chat` alone unless set."""
    targets = ttft_s or {"chat": 1.5}
    guess = {"ttftSeconds": 1.0, "tpotSeconds": 0.1, "percentile": percentile, "preemptionProbability": 0.0}
    group = make_group(
        replicas=replicas, kvTokens=kv_tokens, maxNumSeqs=256, stepTime=STEP_TIME, priceUSDPerHour=2.0 * replicas
    )
    return make_plan(
        groups=[group],
        classes=[
            make_class(
                name,
                slo={"ttftSeconds": target_s, "tpotSeconds": 0.1, "percentile": percentile},
                default=name == "chat",
                requestsPerSecond=8.0,
            )
            for name, target_s in targets.items()
        ],
        routes=[make_route(name, reserveTokens=400) for name in targets],
        predictions=[guess | {"class": name} for name in targets],
        groupPredictions=[{"group": "g", "utilisation": 0.5, "kvMeanTokens": 1.0, "kvP99Tokens": 2.0}],
    )
