"""Each format is read as its source writes it, and a broken row is named by file and line."""

from __future__ import annotations

import gzip
import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from kvantile_optimizer import traces
from kvantile_optimizer.errors import InputError

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,12,0,12,Conversation log
61,GPT-4,417,276,693,API log
"""
BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
100.0,ab-1,43,GPT-4,906,446,1352,Conversation log
161.0,,2,ChatGPT,36,29,65,API log
"""
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
)
SHAREGPT_LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n290,905,1195,0.32\n"
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
{"timestamp": 3000, "input_length": 1500, "output_length": 7, "hash_ids": [1, 2, 9]}
{"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}
"""
UNIFORM = """arrival_s,prompt_tokens,output_tokens,class,session,prefix_tokens
2.5,100,20,chat,s1,60
0.5,50,10,,,
"""


def log_line(**changes: object) -> str:
    line = {
        "created": 1_700_000_000,
        "model": "llama",
        "usage": {"prompt_tokens": 30, "completion_tokens": 12},
        "choices": [{"finish_reason": "stop"}],
    }
    return json.dumps(line | changes)


def test_burstgpt_skips_and_counts_failed_requests() -> None:
    trace = traces.parse(BURSTGPT, "b.csv")
    assert trace.prompt.tolist() == [472, 417]
    assert trace.output.tolist() == [18, 276]
    assert trace.arrival_s.tolist() == [5, 61]
    assert trace.labels.tolist() == ["ChatGPT/Conversation log", "GPT-4/API log"]
    assert trace.skipped == 1


def test_burstgpt_with_sessions_keeps_them() -> None:
    trace = traces.parse(BURSTGPT_3, "b.csv")
    assert trace.sessions.tolist() == ["ab-1", ""]
    assert trace.output.tolist() == [446, 29]


def test_azure_times_count_from_the_first_row() -> None:
    trace = traces.parse(AZURE, "a.csv")
    assert trace.arrival_s == pytest.approx([0, 4.314579], abs=1e-6)
    assert trace.prompt.tolist() == [374, 396]


def test_azure_times_may_name_their_zone() -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5+00:00,3,4\n2024-05-10 02:00:01+02:00,3,4\n"
    assert traces.parse(text, "a.csv").arrival_s == pytest.approx([0, 0.5])


def test_length_files_have_no_arrivals() -> None:
    trace = traces.parse(SHAREGPT_LENGTHS, "s.csv")
    assert (trace.prompt[0], trace.output[0]) == (290, 905)
    assert np.isnan(trace.arrival_s).all()
    assert trace.arrivals() == (None, None, 0.0)


def test_dialogues_count_four_characters_a_token_and_everything_said_before() -> None:
    turns = [("human", "a" * 40), ("gpt", "b" * 9), ("human", "c" * 8), ("gpt", "d" * 4)]
    dialogue = {"id": "x", "conversations": [{"from": who, "value": said} for who, said in turns]}
    greeting = {"id": "y", "conversations": [{"from": "gpt", "value": "hello"}]}
    trace = traces.parse(json.dumps([dialogue, greeting], indent=1), "s.json")
    assert trace.prompt.tolist() == [10, 15]
    assert trace.output.tolist() == [3, 1]
    assert trace.prefix_tokens.tolist() == [0, 13]
    assert trace.sessions.tolist() == ["x", "x"]


def test_mooncake_prefixes_are_the_leading_blocks_seen_before() -> None:
    trace = traces.parse(MOONCAKE, "m.jsonl")
    assert trace.arrival_s.tolist() == [0, 3, 3]
    assert trace.prefix_tokens.tolist() == [0, 1024, 700]


def test_mooncake_prompts_keep_the_ids_of_their_blocks() -> None:
    hash_ids = traces.parse(MOONCAKE, "m.jsonl").hash_ids
    assert hash_ids is not None
    assert hash_ids.tokens == 512
    prompts = [
        hash_ids.ids[begin : begin + count].tolist()
        for begin, count in zip(hash_ids.begin, hash_ids.count, strict=True)
    ]
    assert prompts == [[0, 1, 2], [0, 1, 3], [0, 1]]
    later = hash_ids.only(np.array([False, False, True]))
    assert (later.begin.tolist(), later.count.tolist()) == ([6], [2])


def test_a_source_that_lacks_some_prompts_ids_keeps_none() -> None:
    assert traces.parse(MOONCAKE.replace("[1, 2, 9]", "[]"), "m.jsonl").hash_ids is None
    assert traces.parse(UNIFORM, "u.csv").hash_ids is None


def test_a_log_tells_which_answers_were_cut_off() -> None:
    lines = [
        log_line(),
        log_line(created=1_700_000_003, choices=[{"finish_reason": "length"}]),
        log_line(usage={"prompt_tokens": 5, "completion_tokens": 0}),
        log_line(choices=[{"finish_reason": "stop"}] * 4),
        json.dumps({"custom_id": "1", "response": {"body": json.loads(log_line(created=1_700_000_007))}}),
    ]
    trace = traces.parse("\n".join(lines), "log.jsonl")
    assert trace.censored.tolist() == [False, False, True, False]
    assert trace.arrival_s.tolist() == [0, 0, 3, 7]
    assert trace.output.tolist() == [12, 3, 12, 12]
    assert trace.labels.tolist() == ["llama"] * 4
    assert trace.skipped == 1


def test_a_log_may_carry_iso_times_or_none() -> None:
    line = json.loads(log_line())
    del line["created"]
    later = json.dumps(line | {"timestamp": "2024-01-01T00:00:05Z"})
    first = json.dumps(line | {"timestamp": "2024-01-01T00:00:00Z"})
    trace = traces.parse(f"{first}\n{later}\n{json.dumps(line)}\n", "log.jsonl")
    assert trace.arrival_s[:2].tolist() == [0, 5]
    assert math.isnan(trace.arrival_s[2])


def test_the_uniform_format_may_leave_fields_empty_and_is_put_in_order() -> None:
    trace = traces.parse(UNIFORM, "u.csv")
    assert trace.arrival_s.tolist() == [0.5, 2.5]
    assert trace.labels.tolist() == ["", "chat"]
    assert trace.sessions.tolist() == ["", "s1"]
    assert trace.prefix_tokens.tolist() == [0, 60]


def test_blank_lines_before_the_header_are_left_out() -> None:
    assert len(traces.parse("\n \n" + UNIFORM, "f")) == len(traces.parse(UNIFORM, "f"))


def test_arrivals_give_rate_and_burstiness() -> None:
    rows = "".join(f"{when},10,10\n" for when in (0, 1, 2, 6))
    rate, burstiness, span = traces.parse(f"arrival_s,prompt_tokens,output_tokens\n{rows}", "u.csv").arrivals()
    assert (rate, span) == (0.5, 6)
    assert burstiness == pytest.approx(np.std([1, 1, 4]) / 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BURSTGPT.replace("472", "4x2"), 'f:2: Request tokens: found "4x2", allowed a whole number from 0 to 10000000'),
        (BURSTGPT.replace(",276", ",-1"), 'f:4: Response tokens: found "-1", allowed a whole number from 0'),
        (BURSTGPT.replace("45,", "nan,"), 'f:3: Timestamp: found "nan", allowed seconds of at least 0'),
        (BURSTGPT.replace("61,GPT-4", "61"), "f:4: row: found 5, allowed 6 fields as in the header"),
        (AZURE.replace("2023-11-16 18:15:50.9951690", "noon"), 'f:3: TIMESTAMP: found "noon", allowed an ISO time'),
        (SHAREGPT_LENGTHS.replace("905", "0"), 'f:2: num_decode_tokens: found "0", allowed a whole number from 1'),
        (MOONCAKE.replace("1500", '"a"'), 'f:2: input_length: found "a", allowed a whole number from 1'),
        (MOONCAKE.replace("[1, 2, 9]", "7"), "f:2: hash_ids: found 7, allowed a list of block ids"),
        (MOONCAKE + "{\n", 'f:4: row: found "{", allowed a JSON object on each line'),
        (UNIFORM.replace(",60", ",101"), "f:2: prefix_tokens: found 101, allowed at most the prompt's 100"),
        (UNIFORM.replace(",20,", ",1.5,"), 'f:2: output_tokens: found "1.5", allowed a whole number from 1'),
        (UNIFORM.replace(",20,", ",1e999,"), 'f:2: output_tokens: found "1e999", allowed a whole number from 1'),
        (UNIFORM.replace("chat", '"chat'), "f:"),
        ("\n" + UNIFORM.replace("session", "class"), 'f:2: header: found "class", allowed columns of different names'),
        (log_line() + "\n" + log_line(usage=3), "f:2: usage: found 3, allowed an object with prompt_tokens"),
        (log_line(choices="a"), 'f:1: choices: found "a", allowed a list of objects'),
        (log_line(created=True), "f:1: created: found true, allowed seconds of at least 0"),
        ('[{"conversations": [{"from": "gpt"}]}]', "f:1: [0].conversations[0].value: found null, allowed text"),
        ("[3]", "f:1: [0].conversations: found null, allowed a list of turns"),
        ("[", 'f:1: document: found "no JSON list", allowed a JSON list of dialogues'),
        ("a,b\n1,2\n", 'f:1: header: found "a,b", allowed one of the formats uniform, burstgpt'),
        ("", "f: found nothing, allowed a trace with at least one request"),
        (" \n\n", "f: found nothing, allowed a trace with at least one request"),
        (BURSTGPT.splitlines()[0], "f: found no answered request, allowed a trace with at least one"),
    ],
)
def test_a_broken_trace_is_refused_with_file_line_and_field(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        traces.parse(text, "f")
    assert str(caught.value).startswith(message)


def test_a_given_format_must_fit_the_columns() -> None:
    with pytest.raises(InputError, match=r"f:1: header: found .*allowed the column contexttokens"):
        traces.parse(BURSTGPT, "f", "azure")


def test_gzip_plain_byte_order_mark_and_standard_input_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.write_bytes(b"\xef\xbb\xbf" + UNIFORM.encode())
    packed.write_bytes(gzip.compress(UNIFORM.encode()))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(UNIFORM.encode()))))
    for path in (plain, packed, Path("-")):
        assert traces.read(path).prompt.tolist() == [50, 100]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gone: cannot be read: No such file"):
        traces.read(tmp_path / "gone")
    (tmp_path / "cut").write_bytes(gzip.compress(UNIFORM.encode())[:20])
    with pytest.raises(InputError, match="cut: found a broken gzip file"):
        traces.read(tmp_path / "cut")
    (tmp_path / "junk").write_bytes(gzip.compress(UNIFORM.encode()) + b"junk")
    with pytest.raises(InputError, match="broken gzip file"):
        traces.read(tmp_path / "junk")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(InputError, match="latin: found a byte that is not UTF-8"):
        traces.read(tmp_path / "latin")


def test_the_bundled_trace_holds_both_sources_in_order() -> None:
    trace = traces.bundled()
    assert set(trace.labels.tolist()) == {"burstgpt", "azure-conversation"}
    assert np.all(np.diff(trace.arrival_s) >= 0)
    for label in ("burstgpt", "azure-conversation"):
        part = trace.only(trace.labels == label)
        assert len(part) == 5000
        assert part.arrival_s[0] == 0
