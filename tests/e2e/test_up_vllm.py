"""`kvantile up --engine vllm`: the real vLLM with the plug-in behind the gateway, served, killed, drained."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.support import real_vllm
from tests.support.command import Running, kvantile
from tests.support.gateways import eventually
from tests.support.tiny_model import make_model
from tests.support.vllm_server import BLOCK_SIZE, MODEL, metric_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),  # a server alone takes a minute to start
]

ENGINE = "vllm.entrypoints.openai.api_server"
START_DEADLINE_S = 300.0
SPEC = f"""
apiVersion: kvantile.dev/v1alpha1
kind: ServingPlan
metadata: {{name: tiny, namespace: default}}
spec:
  model:
    name: %s
    servedName: {MODEL}
    maxModelLen: 2048
    geometry: {{layers: 2, hiddenSize: 64, attentionHeads: 2, kvHeads: 2, headDim: 32, parametersMillions: 1}}
  engine:
    reservation: Pooled
    args: [--block-size={BLOCK_SIZE}, --num-gpu-blocks-override=257, --load-format=dummy, --enforce-eager]
    env:
      - {{name: HF_HUB_OFFLINE, value: "1"}}
      - {{name: VLLM_NO_USAGE_STATS, value: "1"}}
      - {{name: DO_NOT_TRACK, value: "1"}}
      - {{name: VLLM_CPU_KVCACHE_SPACE, value: "1"}}
      - {{name: VLLM_CPU_OMP_THREADS_BIND, value: nobind}}
      - {{name: OMP_NUM_THREADS, value: "1"}}
  nodePools:
    - name: cpu
      gpu: {{type: L4, perNode: 1}}
      maxGPUs: 1
  classes:
    - name: chat
      default: true
      slo: {{ttftMilliseconds: 10000, tpotMilliseconds: 500, percentile: 90}}
      demand:
        requestsPerSecond: "0.1"
        promptTokens: {{p50: 20, p99: 60, max: 100}}
        outputTokens: {{p50: 1600, p99: 1750, max: 1800}}
"""


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        openai.DefaultAsyncHttpxClient(trust_env=False) as http,
        openai.AsyncOpenAI(api_key="none", base_url=f"{url}/v1", http_client=http, max_retries=0) as client,
    ):
        yield client


def body(tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hello", "max_tokens": tokens, "extra_body": {"ignore_eos": True}}


async def an_answer_comes(client: openai.AsyncOpenAI) -> str:
    """From which replica."""
    answer = await client.completions.with_raw_response.create(**body(5))
    usage = answer.parse().usage
    assert usage is not None
    assert usage.completion_tokens == 5
    return str(answer.headers["x-kvantile-replica"])


async def a_killed_replica_comes_back(running: Running, client: openai.AsyncOpenAI) -> None:
    (replica,) = running.replicas(module=ENGINE)
    before, family = await an_answer_comes(client), [replica, *replica.children(recursive=True)]
    assert len(family) > 1
    replica.kill()
    await running.until("starting it again")
    assert not psutil.wait_procs(family, timeout=10.0)[1]
    with pytest.raises(openai.InternalServerError) as refused:
        await an_answer_comes(client)
    assert refused.value.status_code == 503
    assert refused.value.response.headers["x-kvantile-reason"] == "unready"
    await running.until("is back", START_DEADLINE_S)

    async def answers() -> bool:
        with suppress(openai.InternalServerError):
            return await an_answer_comes(client) == before
        return False

    await eventually(answers, "the replica served at its old address")


async def a_reservation_lasts_until_its_client_goes(client: openai.AsyncOpenAI) -> None:
    # Planned answers are longer than this one: a reservation that the answer outgrows in a second is one that the
    # engine's figures, shown twice a second, may never have told of.
    stream = await client.completions.create(**body(1500), stream=True)
    replica = stream.response.headers["x-kvantile-replica"]
    await anext(aiter(stream))

    async def is_reserved() -> bool:
        return metric_of(replica, "kvantile:pooled_blocks") > 0

    async def is_free() -> bool:
        names = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "kvantile:pooled_blocks")
        return not any(metric_of(replica, name) for name in names)

    await eventually(is_reserved, "the engine reserved")
    await stream.close()
    await eventually(is_free, "the engine was empty")
    assert metric_of(replica, "kvantile:broken_hints_total") == 0


async def a_stream_is_drained_to_its_end(running: Running, client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(**body(200), stream=True)
    chunks = aiter(stream)
    await anext(chunks)
    running.process.send_signal(signal.SIGTERM)
    last = [chunk.choices[0].finish_reason async for chunk in chunks if chunk.choices]
    assert last[-1] == "length"


async def test_a_real_engine_reserves_comes_back_and_drains(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC % make_model(tmp_path / "model"), encoding="utf-8")
    arguments = ("--port", "0", "--engine", "vllm", "--vllm-python", str(real_vllm.python()))
    async with kvantile("up", str(path), *arguments) as running:
        found = re.search(r"(http://\S+)/v1", await running.until("serving at", START_DEADLINE_S))
        assert found
        async with client_of(found[1]) as client:
            await a_reservation_lasts_until_its_client_goes(client)
            await a_killed_replica_comes_back(running, client)
            family = running.children()
            await a_stream_is_drained_to_its_end(running, client)
        assert await running.process.wait() == 0
        assert not psutil.wait_procs(family, timeout=10.0)[1]
    assert "Traceback" not in running.text
