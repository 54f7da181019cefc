"""Reading along with streams."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvantile_router.stream import EventReader, Outcome, read_answer

END = b"\n\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}' + END
TOKEN = (
    b'data: {"choices":[{"index":0,"delta":{"content":"say \\"usage\\" or \\"error\\" [DONE]"}}],"usage":null}' + END
)
LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}' + END
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}' + END
ERROR = b'data: {"error":{"message":"no"}}' + END
DONE = b"data: [DONE]" + END
STREAM = [ROLE, TOKEN, TOKEN, LAST, USAGE, DONE]


def read(chunks: list[bytes], *, strip_usage: bool = True) -> tuple[bytes, Outcome]:
    outcome = Outcome()
    reader = EventReader(outcome, strip_usage=strip_usage)
    passed = b"".join(reader.feed(chunk) for chunk in chunks)
    return passed + reader.flush(), outcome


@given(st.lists(st.integers(0, sum(map(len, STREAM))), max_size=12), st.booleans())
def test_however_a_stream_is_cut_into_chunks_the_same_passes(cuts: list[int], strip_usage: bool) -> None:
    whole = b"".join(STREAM)
    edges = [0, *sorted(cuts), len(whole)]
    chunks = [whole[start:end] for start, end in pairwise(edges)]
    passed, outcome = read(chunks, strip_usage=strip_usage)
    assert passed == (whole.replace(USAGE, b"") if strip_usage else whole)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cut_by_length) == (7, 3, True)
    assert not outcome.failed


def test_whole_events_pass_as_the_same_bytes_at_once() -> None:
    reader = EventReader(Outcome(), strip_usage=True)
    assert [reader.feed(chunk) for chunk in (ROLE, TOKEN, LAST)] == [ROLE, TOKEN, LAST]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_both_kinds_of_line_ends_are_understood(end: bytes) -> None:
    passed, outcome = read([chunk.replace(END, end) for chunk in STREAM])
    assert passed == b"".join([ROLE, TOKEN, TOKEN, LAST, DONE]).replace(END, end)
    assert outcome.output_tokens == 3


def test_nothing_passes_after_an_error() -> None:
    passed, outcome = read([TOKEN + ERROR + DONE, DONE])
    assert passed == TOKEN + ERROR
    assert outcome.failed


def test_without_usage_events_stand_for_tokens() -> None:
    _, outcome = read([TOKEN, TOKEN, TOKEN])
    assert (outcome.output_tokens, outcome.seen_tokens) == (None, 3)


def test_a_stream_without_an_end_still_passes() -> None:
    assert read([TOKEN, b"data: half"])[0] == TOKEN + b"data: half"


@pytest.mark.parametrize("body", [b"", b"no json", b"[]", b'{"usage": 3, "choices": null}', b'{"choices": [1]}'])
def test_an_answer_of_another_shape_teaches_nothing(body: bytes) -> None:
    outcome = Outcome()
    read_answer(body, outcome)
    assert outcome == Outcome()


def test_an_answer_in_one_piece_tells_its_length() -> None:
    outcome = Outcome()
    body = {"choices": [{"finish_reason": "length"}], "usage": {"prompt_tokens": 4, "completion_tokens": 9}}
    read_answer(json.dumps(body).encode(), outcome)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cut_by_length) == (4, 9, True)
