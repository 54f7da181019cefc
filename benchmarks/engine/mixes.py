"""The whole way on a real engine: calibrate it, learn two traces' lengths, plan, and serve through the gateway.

Nobody sets a quantile: what the engine can do is probed, the classes are fitted on the first half of each trace, and
the plan for one replica decides form, quantile and order of each, and the sizes of its engine. The second half then
comes in bursts, at the largest rate that the plan says one replica holds. Stock vLLM and watermarks get the same
requests, without a gateway between.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tests.support.gateways import eventually
from tests.support.servers import served
from tests.support.vllm_server import BLOCK_SIZE, MODEL, VllmServer

from benchmarks.engine import load, pressure
from benchmarks.engine.load import Ask
from benchmarks.engine.pressure import KINDS, OURS, TPOT_S, WAVE, Engine, Measured
from benchmarks.optimizer.row import Row, Run, Setting
from kvantile_optimizer import planner, probing, traces, workload
from kvantile_optimizer.errors import WorkError
from kvantile_optimizer.local import bursts, engine_probe
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.spec import ServingPlan
from kvantile_optimizer.traces import Trace
from kvantile_optimizer.workload import Workload

MIXES = {"burstgpt": "burstgpt.csv.gz", "conversation": "azure_conv_2023.csv.gz"}
TTFT_S = {"burstgpt": 1.0, "conversation": 2.0}
PERCENTILE = 95
ENGINE = Engine(hidden=64, layers=2, kv_tokens=16_384)
PROBES = engine_probe.Bounds(seconds=180.0, requests=200)
SECONDS, QUICK_SECONDS = 48.0, 5.0
RATES = np.geomspace(0.5, 32, 25)
"""Requests per second that are tried."""
PLAN_LIMIT_S = 60.0


def mixes(setting: Setting, seed: int) -> Run:
    """Misses and preemptions of what the plan makes of a real engine, against stock and watermarks."""
    halves = {name: _halves(traces.read(setting.trace(file)), name) for name, file in MIXES.items()}
    fitted = {name: first for name, (first, _) in halves.items()}
    later = {name: second for name, (_, second) in halves.items()}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        running = stack.enter_context(pressure.servers(KINDS[:-1], ENGINE))
        step_time = asyncio.run(_probed(running[pressure.STOCK].url))
        plan, rate = _planned(step_time, fitted)
        group = plan.groups[0]
        sizes = replace(ENGINE, most_running=group.max_num_seqs, most_batched=group.max_num_batched_tokens)
        running |= stack.enter_context(pressure.servers([OURS], sizes))
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(plan.to_json()), encoding="utf-8")
        seconds = QUICK_SECONDS if setting.quick else SECONDS

        def served_by(kind: str, asks: Sequence[Ask], number: int) -> Measured:
            if kind == OURS:
                return _through_gateway(path, group.name, running[kind], asks, number)
            return pressure.measured(running[kind], asks, {}, number)

        found = pressure.in_turns(setting, running, lambda n: _asks(later, rate, seconds, seed + n), served_by)
    notes = pressure.table(found)
    notes["plan"] = f"{rate:.1f} requests/s, " + "; ".join(
        f"{route.class_} {route.form} {route.reserve_tokens} tokens, phi {route.pooling_fraction:g}, {route.order}"
        for route in plan.routes
    )
    return Run(pressure.of_bursts(found), notes)


def _halves(trace: Trace, name: str) -> tuple[Trace, Trace]:
    """What the model can hold of it, all of one class: to fit on, and to replay."""
    trace = replace(trace, labels=np.full(len(trace), name, dtype=trace.labels.dtype))
    return bursts.split(trace.only(trace.prompt + trace.output <= pressure.LONGEST), 0.5)


async def _probed(url: str) -> dict[str, str]:
    """What a ServingPlan takes of the engine's step time."""
    limits = probing.Limits(pressure.LONGEST, ENGINE.kv_tokens, ENGINE.most_running, ENGINE.most_batched)
    rounds = await engine_probe.measure(url, MODEL, limits, PROBES, 0, lambda _: None)
    found = probing.fitted(rounds).step_time.model_dump()
    return {f"{name}Nanoseconds": f"{max(1e9 * seconds, 1e-6):.6f}" for name, seconds in found.items()}


def _planned(step_time: Mapping[str, str], fitted: Mapping[str, Trace]) -> tuple[Plan, float]:
    """The plan for the largest rate that one replica holds, and that rate, requests per second of all classes."""
    held = [rate for rate in RATES if _serves_all(_made(step_time, fitted, float(rate), rehearsed=False))]
    for rate in reversed(held):
        plan = _made(step_time, fitted, float(rate), rehearsed=True)
        if _serves_all(plan):
            return plan, float(rate)
    raise WorkError(f"one replica of this engine holds no {RATES[0]} requests a second")


def _serves_all(plan: Plan) -> bool:
    return not plan.unserved and len(plan.groups) == 1


def _made(step_time: Mapping[str, str], fitted: Mapping[str, Trace], rate: float, *, rehearsed: bool) -> Plan:
    spec = ServingPlan.model_validate(_spec(step_time, rate))
    workloads: list[Workload] = [
        workload.of_class(item, pressure.LONGEST, fitted[item.name]) for item in spec.spec.classes
    ]
    return planner.make_plan(spec, workloads, rehearsed=rehearsed, time_limit_s=PLAN_LIMIT_S)


def _spec(step_time: Mapping[str, str], rate: float) -> dict[str, Any]:
    engine = {
        **step_time,
        "kvTokens": ENGINE.kv_tokens,
        "maxNumSeqs": ENGINE.most_running,
        "maxNumBatchedTokens": ENGINE.most_batched,
    }
    geometry = {
        "layers": ENGINE.layers,
        "hiddenSize": ENGINE.hidden,
        "attentionHeads": ENGINE.hidden // 32,
        "kvHeads": ENGINE.hidden // 32,
        "headDim": 32,
        "parametersMillions": 1,
    }
    blocks = ENGINE.kv_tokens // BLOCK_SIZE
    burstiness = float(np.sqrt(1 + WAVE.factor / 2))
    return {
        "apiVersion": "kvantile.dev/v1alpha1",
        "kind": "ServingPlan",
        "metadata": {"name": "mixes"},
        "spec": {
            "model": {"name": MODEL, "servedName": MODEL, "maxModelLen": pressure.LONGEST, "geometry": geometry},
            "engine": {"args": [f"--num-gpu-blocks-override={blocks}", f"--block-size={BLOCK_SIZE}"]},
            # Any GPU will do: all that is used of it has been measured.
            "nodePools": [
                {"name": "here", "gpu": {"type": "L4", "perNode": 1}, "maxGPUs": 1, "calibrations": [engine]}
            ],
            "classes": [
                {
                    "name": name,
                    "default": place == 0,
                    "slo": {
                        "ttftMilliseconds": round(1000 * TTFT_S[name]),
                        "tpotMilliseconds": round(1000 * TPOT_S),
                        "percentile": PERCENTILE,
                    },
                    "demand": {
                        "requestsPerSecond": f"{rate / len(MIXES):.4f}",
                        "burstiness": f"{burstiness:.2f}",
                        "samples": {"configMapRef": {"name": "trace", "key": name}},
                    },
                }
                for place, name in enumerate(MIXES)
            ],
            "router": {"allowClassHeader": True},
        },
    }


def _asks(later: Mapping[str, Trace], rate: float, seconds: float, seed: int) -> list[Ask]:
    found = [
        Ask(item.arrival_s, name, item.prompt_tokens, max(2, item.output_tokens), TTFT_S[name], TPOT_S)
        for name, trace in later.items()
        for item in bursts.arrivals(trace, {name: rate / len(later)}, seconds, WAVE, seed)
    ]
    return sorted(found, key=lambda ask: ask.arrival_s)


def _through_gateway(plan: Path, group: str, server: VllmServer, asks: Sequence[Ask], seed: int) -> Measured:
    """One round with the gateway before the engine."""

    async def played() -> list[load.Answer]:
        flags = ("--plan", str(plan), "--replica", f"{group}={server.url}", "--port", "0")
        async with served("kvantile_router", *flags) as gateway, httpx.AsyncClient(trust_env=False) as http:

            async def is_ready() -> bool:
                return (await http.get(f"{gateway.url}/readyz")).is_success

            await eventually(is_ready, "the gateway found its replica")
            return await load.answers(gateway.url, asks, pressure.LONGEST, {}, seed)

    return pressure.counted(server, lambda: asyncio.run(played()))


ROWS = (
    Row(
        "mixes",
        "real vLLM, gateway and plan, BurstGPT and Azure conversation lengths",
        pressure.OF_BURSTS,
        mixes,
        limit_s=3600,
        needs_traces=True,
        alone=True,
        runs=1,
    ),
)
