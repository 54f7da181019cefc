"""`kvantile up`: OpenAI requests are served until Ctrl-C, on this machine, from a ServingPlan file."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.command import Running, kvantile, outcome

SPEC = """
apiVersion: kvantile.dev/v1alpha1
kind: ServingPlan
metadata: {name: small, namespace: default}
spec:
  model: {name: meta-llama/Llama-3.1-8B-Instruct, servedName: llama, maxModelLen: 4096}
  nodePools:
    - {name: l40s, gpu: {type: L40S, perNode: 4}, maxGPUs: 4}
  replan: {interval: %s, window: 1h}
  classes:
    - name: chat
      default: true
      slo: {ttftMilliseconds: 3000, tpotMilliseconds: 100}
      demand:
        requestsPerSecond: "2"
        promptTokens: {p50: 300, p99: 1500, max: 2000}
        outputTokens: {p50: 200, p99: 600, max: 1000}
"""


LONG = {
    "model": "llama",
    "messages": [{"role": "user", "content": "Hello"}],
    "vllm_xargs": {"emulator_output_tokens": 900},
}


def make_spec(tmp_path: Path, *, interval: str = "10m") -> str:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC % interval, encoding="utf-8")
    return str(path)


async def url_of(running: Running) -> str:
    found = re.search(r"(http://\S+)/v1", await running.until("serving at"))
    assert found
    return found[1]


async def test_curl_and_the_openai_client_are_served_until_ctrl_c(tmp_path: Path) -> None:
    async with kvantile("up", make_spec(tmp_path), "--port", "0", "--speed", "20") as running:
        url = await url_of(running)
        body = {"model": "llama", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.post(f"{url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kvantile-class"] == "chat"
        async with (
            openai.DefaultAsyncHttpxClient(trust_env=False) as http2,
            openai.AsyncOpenAI(api_key="none", base_url=f"{url}/v1", http_client=http2, max_retries=0) as client,
        ):
            stream = await client.chat.completions.create(
                model="llama", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, stream=True
            )
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert len("".join(parts).split()) == 8
        assert await running.send(signal.SIGINT) == 0
    assert "curl " in running.text
    assert "Traceback" not in running.text


async def test_a_killed_replica_is_started_again(tmp_path: Path) -> None:
    async with kvantile("up", make_spec(tmp_path), "--port", "0") as running:
        await url_of(running)
        running.replicas()[0].kill()
        await running.until("is back")
        assert await running.send(signal.SIGTERM) == 0


@pytest.mark.slow
async def test_answers_that_get_longer_lead_to_a_new_plan_without_a_lost_request(tmp_path: Path) -> None:
    async with kvantile("up", make_spec(tmp_path, interval="60s"), "--port", "0", "--speed", "20") as running:
        url = await url_of(running)
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            while "serving plan 1" not in running.text and "still the one" not in running.text:
                answers = await asyncio.gather(*(http.post(f"{url}/v1/chat/completions", json=LONG) for _ in range(40)))
                assert {answer.status_code for answer in answers} == {200}
        assert "chat have changed in length" in running.text
        assert await running.send(signal.SIGINT) == 0
    assert "serving plan 1" in running.text


async def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = await outcome("up", make_spec(tmp_path), "--port", str(port))
    assert (code, out) == (1, "")
    assert f"port {port} on 127.0.0.1 is in use" in err
    assert "GPUs" not in err


async def test_a_missing_vllm_is_named_with_its_flag_before_anything_starts(tmp_path: Path) -> None:
    code, out, err = await outcome("up", make_spec(tmp_path), "--port", "0", "--engine", "vllm")
    assert (code, out) == (1, "")
    assert "vLLM is not installed" in err
    assert "--vllm-python" in err
    assert "GPUs" not in err


async def test_a_real_engine_keeps_real_time(tmp_path: Path) -> None:
    code, out, err = await outcome("up", make_spec(tmp_path), "--port", "0", "--engine", "vllm", "--speed", "2")
    assert (code, out) == (2, "")
    assert "--speed: found 2, allowed 1 with --engine vllm" in err


async def test_a_bad_spec_is_exit_2(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text((SPEC % "10m").replace("default: true", "defualt: true"), encoding="utf-8")
    code, out, err = await outcome("up", str(path), "--port", "0")
    assert (code, out) == (2, "")
    assert "defualt" in err


async def test_ctrl_c_in_mid_start_leaves_nothing(tmp_path: Path) -> None:
    async with kvantile("up", make_spec(tmp_path), "--port", "0") as running:
        await running.until("req/s")
        assert await running.send(signal.SIGINT) in {0, 130}
    assert "Traceback" not in running.text
