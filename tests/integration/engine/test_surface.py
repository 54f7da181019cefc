"""What an OpenAI client expects of a vLLM replica beyond plain answers, and what attackers try."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest

from tests.integration.engine.process import MODEL, Emulator, emulator

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Go on"}], "max_tokens": 60}
EOS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def replica() -> Iterator[Emulator]:
    with emulator(speed=1000, vllm_version="0.29.0") as running:
        yield running


@pytest.fixture
def client(replica: Emulator) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{replica.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_a_chat_and_stays_out_of_it(client: openai.OpenAI, stream: bool) -> None:
    whole = client.chat.completions.create(**ASK, extra_body=EOS).choices[0].message.content
    assert whole is not None
    if stream:
        chunks = list(client.chat.completions.create(**ASK, stop=["memory for"], stream=True, extra_body=EOS))
        content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        last: Any = chunks[-1].choices[0]
    else:
        last = client.chat.completions.create(**ASK, stop=["memory for"], extra_body=EOS).choices[0]
        content = last.message.content
    assert content == whole[: whole.index("memory for")]
    assert (last.finish_reason, last.stop_reason) == ("stop", "memory for")


def test_logprobs_are_taken_and_null_and_tools_are_answered_with_text(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    answer = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2, tools=[tool], tool_choice="auto")
    assert answer.choices[0].logprobs is None
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


@pytest.mark.parametrize("stream", [True, False])
def test_echo_puts_the_prompt_first(replica: Emulator, stream: bool) -> None:
    body = {"prompt": ["one two", "three"], "n": 2, "echo": True, "max_tokens": 2, "stream": stream}
    answer = httpx.post(f"{replica.url}/v1/completions", json=body).text
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line and "[DONE]" not in line]
    texts = dict.fromkeys(range(4), "")
    for chunk in map(json.loads, lines):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    prompts = ["one two", "one two", "three", "three"]
    assert all(text.startswith(prompt) and text != prompt for text, prompt in zip(texts.values(), prompts, strict=True))


def test_continuous_usage_counts_up(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options=options, extra_body=EOS))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 60


def test_the_version_is_the_chosen_one(replica: Emulator) -> None:
    assert httpx.get(f"{replica.url}/version").json() == {"version": "0.29.0"}


def test_tokenize_and_detokenize_are_each_others_inverse(replica: Emulator) -> None:
    found = httpx.post(f"{replica.url}/tokenize", json={"model": MODEL, "prompt": "Hello, world"}).json()
    assert (found["count"], len(found["tokens"]), found["max_model_len"]) == (3, 3, 16_384)
    text = httpx.post(f"{replica.url}/detokenize", json={"tokens": found["tokens"]}).json()
    assert text == {"prompt": "Hello, world"}
    chat = httpx.post(f"{replica.url}/tokenize", json={"messages": ASK["messages"]}).json()
    answer = httpx.post(f"{replica.url}/v1/chat/completions", json={**ASK, "max_tokens": 1}).json()
    assert chat["count"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        ("/tokenize", b'{"prompt": 3}', "prompt"),
        ("/tokenize", b"[]", None),
        ("/tokenize", b'{"messages": 3}', "messages"),
        ("/detokenize", b'{"tokens": ["x"]}', "tokens"),
        ("/detokenize", b'{"tokens": [9223372036854775808]}', "tokens"),
        ("/detokenize", b"{}", "tokens"),
        ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', None),
        ("/v1/completions", b'{"prompt": "x", "n": 1e9}', "n"),
        ("/v1/completions", b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", None),
        ("/v1/completions", b'{"prompt": "x", "stop": ' + b"[" * 900 + b"]" * 900 + b"}", "stop"),
        ("/v1/completions", b'{"prompt": ' + b"[" * 200_000, None),
        ("/v1/completions", b"\xff\xfe\x00", None),
        ("/v1/chat/completions", b'{"messages": [{"role": {}, "content": "x"}]}', "messages.0.role"),
    ],
)
def test_bad_bodies_are_400_with_the_name_of_the_field(
    replica: Emulator, path: str, content: bytes, param: str | None
) -> None:
    answer = httpx.post(replica.url + path, content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_body_beyond_all_measure_is_refused(replica: Emulator) -> None:
    content = b'{"prompt": "' + b"x" * (33 * 2**20) + b'"}'
    with suppress(httpx.WriteError, httpx.RemoteProtocolError):  # refused before all of it was sent
        assert httpx.post(f"{replica.url}/v1/completions", content=content).status_code == 413
    assert httpx.get(f"{replica.url}/health").status_code == 200


ODD: tuple[Any, ...] = (None, True, -1, 0, 1e308, 10**40, "x", "\ud800", [], {}, [[]], [None], {"a": {"b": [1]}})
FIELDS = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stream",
    "stream_options",
    "stop",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "logprobs",
    "top_logprobs",
    "echo",
    "suffix",
    "user",
    "tools",
    "tool_choice",
    "response_format",
    "logit_bias",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "vllm_xargs",
    "priority",
    "include_stop_str_in_output",
    "presence_penalty",
    "repetition_penalty",
]


def test_no_value_of_any_field_is_more_than_a_refusal(replica: Emulator) -> None:
    with httpx.Client(base_url=replica.url) as http:
        for field, value in itertools.product(FIELDS, ODD):
            for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", ASK)):
                content = json.dumps({**body, "max_tokens": 2, field: value}).encode()
                answer = http.post(path, content=content)
                assert answer.status_code in {200, 400, 404}, (path, field, value)
    assert replica.metric("vllm:num_requests_running") == 0
