"""The emulator over real sockets, as clients, gateways and Prometheus see it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.integration.engine.process import MODEL, Emulator, emulator

ALPHA, BETA, GAMMA, DELTA = 0.02, 0.001, 1e-5, 1e-4
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "How long will this take?"}]}
ENDLESS: dict[str, Any] = {"model": MODEL, "prompt": "on and on", "max_tokens": 10_000, "ignore_eos": True}
PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def fast() -> Iterator[Emulator]:
    """A replica a hundred times faster than life."""
    times = {"alpha": ALPHA, "beta": BETA, "gamma": GAMMA, "delta": DELTA}
    with emulator(speed=100, kv_tokens=16_000, max_num_seqs=512, **times) as running:
        yield running


@pytest.fixture(scope="module")
def slow() -> Iterator[Emulator]:
    """A replica whose long answers do not end within a test, with room for one of them."""
    with emulator(alpha=0.01, beta=0, gamma=0, delta=0, max_num_seqs=1, enable_request_id_headers=True) as running:
        yield running


@pytest.fixture
def client(fast: Emulator) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fast.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether it holds before patience ends; asks again, since HTTP has no event for it."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.02)
    return False


def events(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def test_half_a_surrogate_pair_in_a_refusal_is_still_a_refusal(fast: Emulator) -> None:
    refused = httpx.post(f"{fast.url}/v1/completions", content=b'{"model": "\\ud800", "prompt": "a"}')
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == "The model `\ud800` does not exist."


def test_the_openai_client_gets_a_whole_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT, max_tokens=6, extra_body={"ignore_eos": True})
    (choice,) = answer.choices
    assert answer.model == MODEL
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
    assert choice.message.content is not None
    assert len(choice.message.content.split()) == 6
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


def test_a_stream_gives_the_same_answer_in_pieces_and_the_usage_last(client: openai.OpenAI) -> None:
    length = {"vllm_xargs": {"emulator_output_tokens": 9}}
    whole = client.chat.completions.create(**CHAT, extra_body=length)
    stream = client.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}, extra_body=length
    )
    chunks = list(stream)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_stream_several_answers_to_several_prompts(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt=["first", "second"],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"vllm_xargs": {"emulator_output_tokens": 4, "emulator_prompt_tokens": 50}},
    )
    texts = dict.fromkeys(range(4), "")
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [len(text.split()) for text in texts.values()] == [4] * 4
    assert chunk.usage is not None
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (100, 16)


def test_a_second_request_finds_the_first_ones_prompt_in_the_cache(client: openai.OpenAI) -> None:
    cached = []
    for _ in range(2):
        answer = client.completions.create(model=MODEL, prompt="p" * 4 * 100, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 96]


def test_models_say_how_long_a_request_may_be(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.model_dump()["max_model_len"] == 16_384


def test_health_version_and_ping_answer(fast: Emulator) -> None:
    for path in ("/health", "/ping", "/version"):
        assert httpx.get(fast.url + path).status_code == 200


def test_a_lone_request_takes_what_the_model_says() -> None:
    times = {"alpha": ALPHA, "beta": BETA, "gamma": GAMMA, "delta": DELTA}
    with emulator(speed=20, **times) as lone:
        xargs = {"emulator_prompt_tokens": 500, "emulator_output_tokens": 41}
        began = time.monotonic()
        httpx.post(f"{lone.url}/v1/completions", json={"prompt": "x", "vllm_xargs": xargs}).raise_for_status()
        took_s = 20 * (time.monotonic() - began)
        first_s = ALPHA + DELTA * 500
        whole_s = first_s + 40 * (ALPHA + BETA + GAMMA * (500 + 41 / 2))
        assert lone.metric("vllm:time_to_first_token_seconds_sum") == pytest.approx(first_s)
        assert lone.metric("vllm:e2e_request_latency_seconds_sum") == pytest.approx(whole_s)
        assert lone.metric("vllm:inter_token_latency_seconds_sum") == pytest.approx(whole_s - first_s)
        assert lone.metric("vllm:inter_token_latency_seconds_count") == 40
        assert took_s >= whole_s


def test_the_chosen_version_decides_which_metrics_there_are() -> None:
    newer = {"request_num_preemptions": "0.30.0", "admission_rejections": "0.32.0"}
    for version in ("0.25.1", "0.30.0", "0.32.0"):
        with emulator(speed=1000, vllm_version=version) as running:
            httpx.post(f"{running.url}/v1/completions", json={"prompt": "x" * 400, "max_tokens": 3, "n": 2})
            text = httpx.get(f"{running.url}/metrics").text
            for name, since in newer.items():
                assert (f"vllm:{name}" in text) == (version >= since)
            assert running.metric("vllm:request_prompt_tokens_sum") == 200
            assert running.metric("vllm:request_params_n_sum") == 4
            phases = [running.metric(f"vllm:request_{phase}_time_seconds_sum") for phase in ("prefill", "decode")]
            assert sum(phases) == pytest.approx(running.metric("vllm:request_inference_time_seconds_sum"))
            assert running.metric("vllm:prompt_tokens_by_source_total") == 200


def test_metrics_have_vllms_names(fast: Emulator) -> None:
    names = {
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
        "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket", "request_success_total",
    }  # fmt: skip
    text = httpx.get(f"{fast.url}/metrics").text
    for name in names:
        assert f"vllm:{name}{{" in text
    assert f'model_name="{MODEL}"' in text
    assert 'num_gpu_blocks="1000"' in text
    assert "kvantile:reserved_blocks{" in text


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"no json", 400),
        (b'{"prompt": NaN}', 400),
        (b'{"prompt": "x", "temperature": 1e999}', 400),
        (b'{"messages": "x"}', 400),
        (b'{"prompt": "x", "model": "another"}', 404),
        (b'{"prompt": "x", "vllm_xargs": {"emulator_prompt_tokens": 16384}}', 400),
        (b'{"prompt": "x", "vllm_xargs": {"emulator_prompt_tokens": 16001}}', 400),
    ],
)
def test_a_bad_request_is_refused_in_openais_shape(fast: Emulator, content: bytes, status: int) -> None:
    answer = httpx.post(f"{fast.url}/v1/completions", content=content)
    assert answer.status_code == status
    assert {"message", "type", "param", "code"} == set(answer.json()["error"])


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)])
def test_a_wrong_address_is_refused_in_openais_shape(fast: Emulator, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, fast.url + path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == status


def test_a_broken_hint_is_served_and_counted(fast: Emulator) -> None:
    before = fast.metric("kvantile:broken_hints_total")
    body = {"prompt": "x", "max_tokens": 1, "vllm_xargs": {"kv_reserve_tokens": "lots", "kv_odd": 1}}
    assert httpx.post(f"{fast.url}/v1/completions", json=body).status_code == 200
    assert fast.metric("kvantile:broken_hints_total") == before + 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks_at_once(slow: Emulator, stream: bool) -> None:
    with httpx.Client(base_url=slow.url, timeout=PATIENCE_S) as http:
        request = http.build_request("POST", "/v1/completions", json={**ENDLESS, "stream": stream})
        if stream:
            response = http.send(request, stream=True)
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            assert slow.metric("vllm:num_requests_running") == 1
            response.close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.send(http.build_request("POST", "/v1/completions", json=ENDLESS, timeout=0.2))
    assert eventually(lambda: slow.metric("vllm:num_requests_running") == 0)
    assert slow.metric("vllm:kv_cache_usage_perc") == 0


def test_a_client_that_goes_away_while_it_waits_leaves_the_queue(slow: Emulator) -> None:
    with (
        httpx.Client(base_url=slow.url, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as first,
    ):
        lines = first.iter_lines()
        assert next(lines)
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=ENDLESS, timeout=0.2)
        assert eventually(lambda: slow.metric("vllm:num_requests_waiting") == 0)
        assert slow.metric("vllm:num_requests_running") == 1


def test_the_trace_shows_memory_over_time_and_a_reset_begins_anew(slow: Emulator) -> None:
    assert eventually(lambda: slow.metric("vllm:num_requests_running") == 0)
    with httpx.Client(base_url=slow.url, timeout=PATIENCE_S) as http:
        with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            assert http.post("/emulator/reset").status_code == 409
            trace = http.get("/emulator/trace").json()
            assert trace["columns"][:3] == ["engineSeconds", "kvUsedTokens", "kvCommittedTokens"]
            assert max(sample[1] for sample in trace["samples"]) >= 16
        assert eventually(lambda: http.post("/emulator/reset").status_code == 200)
        after = http.get("/emulator/trace").json()
        assert after["samples"] == []
        assert after["engineSecondsNow"] < PATIENCE_S
        assert slow.metric("vllm:generation_tokens_total") == 0


def test_the_request_id_comes_back(slow: Emulator) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    answer = httpx.post(f"{slow.url}/v1/completions", json=body, headers={"x-request-id": "abc"})
    assert answer.headers["x-request-id"] == "abc"
    assert answer.json()["id"] == "cmpl-abc"
    assert httpx.post(f"{slow.url}/v1/completions", json=body).headers["x-request-id"]


def test_with_a_stream_interval_the_first_token_comes_alone() -> None:
    with (
        emulator(speed=20, stream_interval=10) as running,
        httpx.stream(
            "POST", f"{running.url}/v1/completions", json={**ENDLESS, "max_tokens": 25, "stream": True}
        ) as stream,
    ):
        *chunks, done = events(stream)
    sizes = [len(json.loads(chunk)["choices"][0]["text"].split()) for chunk in chunks]
    assert done == "[DONE]"
    assert (sizes[0], sum(sizes)) == (1, 25)
    assert all(size >= 10 for size in sizes[1:-1])


@pytest.mark.parametrize(("xargs", "preempts"), [({}, True), ({"kv_reserve_tokens": 100}, False)])
def test_reserving_what_is_used_avoids_preemption(xargs: dict[str, int], preempts: bool) -> None:
    body = {"prompt": "x", "vllm_xargs": {"emulator_prompt_tokens": 16, "emulator_output_tokens": 100, **xargs}}

    async def burst(url: str) -> None:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            answers = await asyncio.gather(*(http.post(f"{url}/v1/completions", json=body) for _ in range(6)))
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [100] * 6

    with emulator(speed=100, kv_tokens=320) as running:
        asyncio.run(burst(running.url))
        assert (running.metric("vllm:num_preemptions_total") > 0) == preempts
        assert running.metric("kvantile:reserved_blocks") == 0
        assert running.metric("vllm:request_success_total") == 6


async def test_five_hundred_streams_at_once_are_served(fast: Emulator) -> None:
    address = urlsplit(fast.url)
    body = json.dumps({**ENDLESS, "max_tokens": 20, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"

    async def one() -> bytes:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write((head + body).encode())
        answer = await reader.read(-1)
        writer.close()
        await writer.wait_closed()
        return answer

    answers = await asyncio.gather(*(one() for _ in range(500)))
    assert all(b"[DONE]" in answer for answer in answers)
