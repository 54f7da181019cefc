"""What the emulator reads out of a body, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvantile_engine.emulator import text
from kvantile_engine.emulator.fields import RequestError
from kvantile_engine.emulator.requests import CompletionRequest, parse
from kvantile_engine.emulator.settings import Settings
from kvantile_optimizer.admission import HELD, NONE, POOLED

SETTINGS = Settings(model="m", kv_tokens=1600, block_size=16, max_model_len=1000)


def read(settings: Settings = SETTINGS, /, *, chat: bool = False, **body: Any) -> CompletionRequest:
    fields = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
    return parse(json.dumps({**fields, **body}).encode(), chat=chat, settings=settings)


def lengths(request: CompletionRequest) -> tuple[int, int, bool]:
    (only,) = request.sequences
    return only.prompt, only.output, only.cut


def test_four_characters_are_a_token_and_ids_are_counted() -> None:
    assert read(prompt="x" * 17, max_tokens=1).sequences[0].prompt == 5
    assert read(prompt=[5, 6, 7]).sequences[0].prompt == 3
    assert [s.prompt for s in read(prompt=["x" * 8, [1, 2, 3]]).sequences] == [2, 3]


def test_the_text_parts_of_a_chat_count() -> None:
    parts = [{"type": "text", "text": "x" * 400}, {"type": "image_url", "image_url": {"url": "y" * 4000}}]
    tokens = read(chat=True, messages=[{"role": "user", "content": parts}]).sequences[0].prompt
    assert 100 <= tokens <= 104


def test_a_replay_says_how_long_prompt_and_answer_are() -> None:
    replay = {"emulator_prompt_tokens": 400, "emulator_output_tokens": 30}
    assert lengths(read(vllm_xargs=replay)) == (400, 30, False)
    assert lengths(read(vllm_xargs=replay, max_tokens=30)) == (400, 30, False)
    assert lengths(read(vllm_xargs=replay, max_tokens=29)) == (400, 29, True)


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert lengths(read(max_tokens=7, max_completion_tokens=3, ignore_eos=True))[1] == 3


def test_an_answer_ends_where_the_model_or_the_cache_does() -> None:
    endless: dict[str, Any] = {"vllm_xargs": {"emulator_prompt_tokens": 900}, "ignore_eos": True}
    assert lengths(read(**endless)) == (900, 100, True)
    small = SETTINGS.model_copy(update={"kv_tokens": 928})
    assert lengths(read(small, **endless)) == (900, 29, True)


def test_ignore_eos_gives_exactly_max_tokens_and_min_tokens_at_least_that() -> None:
    assert lengths(read(ignore_eos=True, max_tokens=321))[1:] == (321, True)
    assert lengths(read(min_tokens=900, vllm_xargs={"emulator_output_tokens": 2}))[1:] == (900, False)


def test_the_same_prompt_gets_the_same_length_and_another_seed_another() -> None:
    body: dict[str, Any] = {"prompt": "tell me", "max_tokens": 900}
    same = {lengths(read(**body))[1] for _ in range(3)}
    others = {lengths(read(SETTINGS.model_copy(update={"seed": seed}), **body))[1] for seed in range(20)}
    assert len(same) == 1
    assert len(others) > 10


def test_several_answers_to_one_prompt_are_several_sequences() -> None:
    request = read(n=3, prompt=["one", "two"])
    assert len(request.sequences) == 6
    assert request.per_prompt == 3


def test_equal_text_gives_equal_hashes_as_far_as_it_is_equal() -> None:
    shared = "s" * 64 * 3
    left, right = (read(prompt=shared + tail * 64).sequences[0].hashes for tail in "ab")
    assert left[:3] == right[:3]
    assert left[3] != right[3]


def test_a_named_prefix_is_shared_by_those_who_name_it() -> None:
    def named(name: str, tokens: int) -> tuple[int, ...]:
        xargs = {"emulator_prompt_tokens": 500, "emulator_prefix_id": name, "emulator_prefix_tokens": tokens}
        return read(vllm_xargs=xargs).sequences[0].hashes

    assert named("a", 160) == named("a", 175)[:10]
    assert len(named("a", 10_000)) == 31
    assert not set(named("a", 160)) & set(named("b", 160))
    nameless = {"emulator_prompt_tokens": 500, "emulator_prefix_tokens": 160}
    assert read(vllm_xargs=nameless).sequences[0].hashes == ()


@pytest.mark.parametrize(
    ("xargs", "form", "broken"),
    [
        (None, NONE, 0),
        ({"kv_reserve_tokens": 100}, HELD, 0),
        ({"kv_reserve_tokens": 100, "kv_pooling": 0.25, "kv_class": "chat", "kv_ttft_budget": 1.5}, POOLED, 0),
        ({"kv_pooling": 0.25}, NONE, 0),
        ({"kv_reserve_tokens": "many"}, NONE, 1),
        ({"kv_reserve_tokens": 100, "kv_pooling": 7, "kv_surprise": 1}, HELD, 2),
        ("nonsense", NONE, 1),
    ],
)
def test_a_broken_hint_is_counted_and_otherwise_ignored(xargs: object, form: int, broken: int) -> None:
    request = read(vllm_xargs=xargs)
    assert (request.hint.form, request.broken_hints) == (form, broken)


def test_phi_is_read_in_thousandths() -> None:
    assert read(vllm_xargs={"kv_reserve_tokens": 10, "kv_pooling": 0.25}).hint.pooling_per_mille == 250


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 2000}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 3}, "stream_options"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"model": 3}, "model"),
        ({"vllm_xargs": {"emulator_output_tokens": -1}}, "emulator_output_tokens"),
        ({"vllm_xargs": {"emulator_prompt_tokens": 1000}}, None),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(RequestError) as refused:
        read(**body)
    assert refused.value.status == 400
    assert refused.value.body["error"]["param"] == param


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'{"prompt": NaN}', b'{"prompt": "x", "temperature": 1e999}', b"\xff\xfe", b"[" * 100_000],
)
def test_what_is_not_json_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError):
        parse(raw, chat=False, settings=SETTINGS)


@pytest.mark.parametrize("messages", [None, [], "hello", [3], [{"content": "x"}], [{"role": "user", "content": 3}]])
def test_a_chat_needs_messages(messages: object) -> None:
    with pytest.raises(RequestError) as refused:
        read(chat=True, messages=messages)
    assert str(refused.value.body["error"]["param"]).startswith("messages")


def test_a_prompt_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(RequestError, match="more than the KV cache holds, 320"):
        read(SETTINGS.model_copy(update={"kv_tokens": 330}), vllm_xargs={"emulator_prompt_tokens": 321})


def test_another_model_is_not_found() -> None:
    with pytest.raises(RequestError) as refused:
        read(model="other")
    assert refused.value.status == 404


def test_text_that_is_no_unicode_is_served() -> None:
    assert parse(b'{"prompt": "\\ud800"}', chat=False, settings=SETTINGS).sequences[0].prompt == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": True}, "seed"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 3]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": ["a"] * 1000}, "stop"),
        ({"stop": "a" * 10_000}, "stop"),
        ({"tools": "hammer"}, "tools"),
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": 1}, "echo"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"n": 10**30}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_vllm_would_refuse_is_refused(body: dict[str, Any], param: str) -> None:
    test_a_wrong_value_is_refused_with_its_name(body, param)


def test_what_steers_sampling_is_taken() -> None:
    sampling: dict[str, Any] = {"temperature": 0.7, "top_p": 1, "top_k": -1, "seed": 3, "logit_bias": {"5": 1}}
    assert read(**sampling, logprobs=3).sequences
    tools = [{"type": "function"}]
    request = read(chat=True, **sampling, logprobs=True, top_logprobs=3, tools=tools, tool_choice="auto")
    assert request.sequences


def test_a_completion_has_16_tokens_unless_it_says_so_and_a_chat_as_many_as_it_gets() -> None:
    settings = SETTINGS.model_copy(update={"max_model_len": 100_000, "kv_tokens": 100_000})
    assert all(read(settings, prompt=f"{i}").sequences[0].output <= 16 for i in range(20))
    texts = [[{"role": "user", "content": f"{i}"}] for i in range(20)]
    assert max(read(settings, chat=True, messages=messages).sequences[0].output for messages in texts) > 100


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("stop", ["share", " of mem", "y for every answer because n", "later", "e", "later the plan"])
@pytest.mark.parametrize("least", [0, 3, 70, 200])
def test_a_stop_string_ends_the_answer_where_a_search_of_the_whole_text_finds_it(
    stop: str, least: int, kept: bool
) -> None:
    body: dict[str, Any] = {"ignore_eos": True, "max_tokens": 500, "min_tokens": least}
    whole = read(**body).sequences[0]
    plan = read(**body, stop=[stop, "no such words"], include_stop_str_in_output=kept).sequences[0]
    tokens = next(
        count
        for count in range(least, 500)
        if stop in text.words(whole.words_key, 0, count)[max(0, text.length(whole.words_key, least) - len(stop) + 1) :]
    )
    assert plan.stop is not None
    assert (plan.output, plan.stop.tokens, plan.cut) == (tokens, tokens, False)
    sent = text.words(whole.words_key, 0, tokens)[: plan.stop.characters]
    assert sent.endswith(stop) if kept else text.words(whole.words_key, 0, tokens)[len(sent) :].startswith(stop)


def test_a_stop_string_that_never_comes_changes_nothing() -> None:
    assert read(max_tokens=5, ignore_eos=True, stop="zebra") == read(max_tokens=5, ignore_eos=True)


def test_many_answers_with_many_stop_strings_are_read_in_no_time() -> None:
    stop = [f"{'a' * 990}{i}" for i in range(64)]
    assert len(read(n=1024, stop=stop, max_tokens=900, ignore_eos=True).sequences) == 1024


@pytest.mark.parametrize("prompt", ["", "hello there", "ä\u4e2d", "x"])
def test_ids_give_their_text_back_and_are_as_many_as_its_tokens(prompt: str) -> None:
    ids = text.token_ids(prompt)
    assert len(ids) == text.token_count(prompt)
    assert text.shown(ids) == prompt
