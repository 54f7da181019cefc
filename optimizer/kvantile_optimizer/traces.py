"""Recorded traffic: the formats that public traces and gateways' logs come in, read into arrays.

A format is recognised by its header or first line and read by one function of `_READERS`, which yields a row or, for a
request that failed in the source's own terms, None; such rows are skipped and counted. A broken row ends the reading
with its line number: a trace that is silently half read makes a wrong plan. Arrival times are absent from some sources
and stay NaN here. Lengths come from the source as they are; only dialogues without counts are estimated, at four
characters a token.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from kvantile_optimizer.errors import InputError

Format = Literal["uniform", "burstgpt", "azure", "sharegpt-lengths", "sharegpt", "mooncake", "openai"]
FORMATS: tuple[Format, ...] = get_args(Format)
MAX_TOKENS = 10_000_000
MOONCAKE_BLOCK_TOKENS = 512
"""Prompt tokens that one of Mooncake's hash ids stands for."""
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, eq=False)
class HashIds:
    """What the prompts of N requests consist of: an id for each stretch of `tokens` tokens, the last one maybe shorter.

    Equal ids mean equal tokens from the beginning of the prompt up to the end of the stretch.
    """

    ids: npt.NDArray[np.int64]
    """(I,) of all prompts one after the other, from 0."""
    begin: npt.NDArray[np.int64]
    """(N,) where each prompt's ids begin."""
    count: npt.NDArray[np.int64]
    """(N,) how many they are."""
    tokens: int

    def only(self, which: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> HashIds:
        """The prompts that `which` (N,) marks, or those at the places `which`; ids stay where they are."""
        return replace(self, begin=self.begin[which], count=self.count[which])


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in arrival order."""

    arrival_s: npt.NDArray[np.float64]
    """(N,) seconds, NaN where the source has none."""
    prompt: npt.NDArray[np.int64]
    """(N,) tokens, at least 1."""
    output: npt.NDArray[np.int64]
    """(N,) tokens, at least 1."""
    censored: npt.NDArray[np.bool_]
    """(N,) whether `max_tokens` cut the answer off."""
    labels: npt.NDArray[np.str_]
    """(N,) the source's class; empty where it has none."""
    sessions: npt.NDArray[np.str_]
    """(N,) the conversation; empty where unknown."""
    prefix_tokens: npt.NDArray[np.int64]
    """(N,) leading prompt tokens that were seen before; 0 where unknown."""
    skipped: int = 0
    """Rows of failed requests, left out."""
    hash_ids: HashIds | None = None
    """What the prompts consist of, where the source tells it of every one."""

    def __len__(self) -> int:
        return len(self.prompt)

    def only(self, which: npt.NDArray[np.bool_]) -> Trace:
        """The requests that `which` (N,) marks."""
        return Trace(
            self.arrival_s[which],
            self.prompt[which],
            self.output[which],
            self.censored[which],
            self.labels[which],
            self.sessions[which],
            self.prefix_tokens[which],
            hash_ids=self.hash_ids and self.hash_ids.only(which),
        )

    def arrivals(self) -> Arrivals:
        """How requests arrive, as far as the arrival times tell."""
        known = self.arrival_s[np.isfinite(self.arrival_s)]
        span = float(known[-1] - known[0]) if len(known) > 1 else 0.0
        if span <= 0:
            return Arrivals(None, None, 0.0)
        intervals = np.diff(known)
        return Arrivals(len(intervals) / span, float(intervals.std() / intervals.mean()), span)


class Arrivals(NamedTuple):
    """Rate, coefficient of variation of the intervals (None without times) and time from first to last."""

    per_second: float | None
    burstiness: float | None
    span_s: float


class _Row(NamedTuple):
    prompt: int
    output: int
    arrival_s: float = math.nan
    censored: bool = False
    label: str = ""
    session: str = ""
    prefix_tokens: int = 0
    hash_ids: Sequence[int | str] = ()


_Rows: TypeAlias = Iterator[_Row | None]


@dataclass(slots=True)
class _Source:
    """The text of a trace and the line being read, for messages."""

    where: str
    lines: list[str]
    line: int = 1

    def fault(self, field: str, found: object, allowed: str) -> InputError:
        shown = json.dumps(found, ensure_ascii=False, default=str)
        shown = shown if len(shown) <= 60 else shown[:60] + "…"
        return InputError(f"{self.where}:{self.line}: {field}: found {shown}, allowed {allowed}")

    def csv_rows(self) -> Iterator[dict[str, str]]:
        """Rows by lower-case column name, blank lines left out."""
        reader = csv.reader(self.lines, strict=True)
        try:
            names = next((found for row in reader if any(found := [name.strip().lower() for name in row])), [])
            if twin := next((name for name in names if name and names.count(name) > 1), ""):
                self.line = reader.line_num
                raise self.fault("header", twin, "columns of different names")
            for fields in reader:
                self.line = reader.line_num
                if not any(field.strip() for field in fields):
                    continue
                if len(fields) != len(names):
                    raise self.fault("row", len(fields), f"{len(names)} fields as in the header")
                yield dict(zip(names, fields, strict=True))
        except csv.Error as error:
            self.line = reader.line_num
            raise self.fault("row", str(error), "comma-separated fields") from None

    def json_rows(self) -> Iterator[dict[str, Any]]:
        """The JSON object of each line, blank lines left out."""
        for number, text in enumerate(self.lines, 1):
            self.line = number
            if not text.strip():
                continue
            row = _json(text)
            if not isinstance(row, dict):
                raise self.fault("row", text.strip(), "a JSON object on each line")
            yield row

    def tokens(self, field: str, value: object, least: int = 1) -> int:
        """A token count from text or JSON."""
        try:
            number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not (least <= number <= MAX_TOKENS and number == int(number)):
            raise self.fault(field, value, f"a whole number from {least} to {MAX_TOKENS}")
        return int(number)

    def seconds(self, field: str, value: object) -> float:
        """A time from text or JSON; NaN where it is empty."""
        if value is None or value == "":
            return math.nan
        try:
            number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise self.fault(field, value, "seconds of at least 0")
        return number

    def clock(self, field: str, value: object) -> float:
        """Seconds since 1970 of an ISO time with any number of decimals, UTC unless it says otherwise, or a number."""
        if not isinstance(value, str) or value.replace(".", "", 1).isdigit():
            return self.seconds(field, value)
        try:
            moment = datetime.fromisoformat(value.strip())
        except ValueError:
            raise self.fault(field, value, "an ISO time such as 2023-11-16 18:15:46.6805900") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def read(path: Path | None, format: Format | Literal["auto"] = "auto") -> Trace:  # noqa: A002 - the option's name
    """Reads a trace, gzip or plain; None or `-` is standard input.

    Raises InputError: an unreadable file, an unknown format, a broken row (`FILE:LINE: field: found ..., allowed ...`),
    no row at all.
    """
    return parse(text_of(path), name_of(path), format)


def name_of(path: Path | None) -> str:
    """What messages call the file."""
    return "standard input" if path is None or str(path) == "-" else str(path)


def text_of(path: Path | None) -> str:
    """The text of a file, gzip or plain; None or `-` is standard input. Raises InputError."""
    where = name_of(path)
    try:
        data = sys.stdin.buffer.read() if path is None or str(path) == "-" else path.read_bytes()
        return _decoded(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{where}: found a broken gzip file ({error}), allowed a whole one") from None
    except OSError as error:
        raise InputError(f"{where}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: found a byte that is not UTF-8 at {error.start}, allowed text") from None


def parse(text: str, where: str, format: Format | Literal["auto"] = "auto") -> Trace:  # noqa: A002 - the option's name
    """A trace from its text; `where` names it in messages. Raises InputError as `read` does."""
    source = _Source(where, [line.rstrip("\r") for line in text.split("\n")])
    if not text.strip():
        raise InputError(f"{where}: found nothing, allowed a trace with at least one request")
    rows = list(_READERS[_detected(source) if format == "auto" else format](source))
    kept = [row for row in rows if row is not None]
    if not kept:
        raise InputError(f"{where}: found no answered request, allowed a trace with at least one")
    return _arrays(kept, len(rows) - len(kept))


def bundled() -> Trace:
    """The trace that comes with Kvantile: see the README beside it."""
    data = resources.files("kvantile_optimizer") / "data" / "demo-trace.csv.gz"
    return parse(_decoded(data.read_bytes()), "demo-trace.csv.gz", "uniform")


def _decoded(data: bytes) -> str:
    plain = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    return plain.decode("utf-8-sig")


def _json(text: str) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _arrays(rows: Sequence[_Row], skipped: int) -> Trace:
    """Rows in arrival order; rows without a time keep their place behind the rest."""
    arrival = np.array([row.arrival_s for row in rows])
    trace = Trace(
        arrival,
        np.array([row.prompt for row in rows], np.int64),
        np.array([row.output for row in rows], np.int64),
        np.array([row.censored for row in rows], np.bool_),
        np.array([row.label for row in rows], np.str_),
        np.array([row.session for row in rows], np.str_),
        np.array([row.prefix_tokens for row in rows], np.int64),
        hash_ids=_hash_ids(rows),
    )
    order = np.argsort(arrival, kind="stable")
    ordered = trace.only(order)  # type: ignore[arg-type] # numpy takes an order where it takes a mask
    return replace(ordered, skipped=skipped)


def _hash_ids(rows: Sequence[_Row]) -> HashIds | None:
    """The rows' ids as dense numbers, None where some row has none."""
    if not all(row.hash_ids for row in rows):
        return None
    count = np.array([len(row.hash_ids) for row in rows], np.int64)
    numbers: dict[int | str, int] = {}
    ids = np.fromiter((numbers.setdefault(key, len(numbers)) for row in rows for key in row.hash_ids), np.int64)
    return HashIds(ids, np.cumsum(count) - count, count, MOONCAKE_BLOCK_TOKENS)


def _detected(source: _Source) -> Format:
    """The format by the first line that says something."""
    first = next(line for line in source.lines if line.strip()).strip()
    if first.startswith("["):
        return "sharegpt"
    if first.startswith("{"):
        keys = set(_json(first) or {})
        if {"input_length", "output_length"} <= keys:
            return "mooncake"
        if keys & {"usage", "response", "choices"}:
            return "openai"
    columns = {name.strip().lower() for name in first.split(",")}
    for format_, needed in _COLUMNS.items():
        if needed <= columns:
            return format_
    raise source.fault("header", first, f"one of the formats {', '.join(FORMATS)}")


_COLUMNS: dict[Format, set[str]] = {
    "uniform": {"prompt_tokens", "output_tokens"},
    "burstgpt": {"timestamp", "request tokens", "response tokens"},
    "azure": {"timestamp", "contexttokens", "generatedtokens"},
    "sharegpt-lengths": {"num_prefill_tokens", "num_decode_tokens"},
}


def _columns(source: _Source, format_: Format) -> Iterator[dict[str, str]]:
    """Rows of a CSV format whose header must name its columns."""
    header = next((line for line in source.lines if line.strip()), "")
    if missing := _COLUMNS[format_] - {name.strip().lower() for name in header.split(",")}:
        raise source.fault("header", header, f"the column {min(missing)}")
    return source.csv_rows()


def _uniform(source: _Source) -> _Rows:
    for row in _columns(source, "uniform"):
        prompt = source.tokens("prompt_tokens", row["prompt_tokens"])
        prefix = source.tokens("prefix_tokens", row.get("prefix_tokens") or 0, 0)
        if prefix > prompt:
            raise source.fault("prefix_tokens", prefix, f"at most the prompt's {prompt}")
        yield _Row(
            prompt,
            source.tokens("output_tokens", row["output_tokens"]),
            source.seconds("arrival_s", row.get("arrival_s")),
            label=row.get("class", ""),
            session=row.get("session", ""),
            prefix_tokens=prefix,
        )


def _burstgpt(source: _Source) -> _Rows:
    """Both variants, with and without `Session ID`; a request without tokens on either side is one that failed."""
    for row in _columns(source, "burstgpt"):
        prompt = source.tokens("Request tokens", row["request tokens"], 0)
        output = source.tokens("Response tokens", row["response tokens"], 0)
        arrival = source.seconds("Timestamp", row["timestamp"])
        if not prompt or not output:
            yield None
            continue
        label = "/".join(part for part in (row.get("model"), row.get("log type")) if part)
        yield _Row(prompt, output, arrival, label=label, session=row.get("session id", ""))


def _azure(source: _Source) -> _Rows:
    start: float | None = None
    for row in _columns(source, "azure"):
        moment = source.clock("TIMESTAMP", row["timestamp"])
        start = moment if start is None else start
        prompt = source.tokens("ContextTokens", row["contexttokens"], 0)
        output = source.tokens("GeneratedTokens", row["generatedtokens"], 0)
        yield _Row(prompt, output, moment - start) if prompt and output else None


def _sharegpt_lengths(source: _Source) -> _Rows:
    for row in _columns(source, "sharegpt-lengths"):
        yield _Row(
            source.tokens("num_prefill_tokens", row["num_prefill_tokens"]),
            source.tokens("num_decode_tokens", row["num_decode_tokens"]),
        )


def _sharegpt(source: _Source) -> _Rows:
    """Dialogues: each answer is a request whose prompt is everything said before it."""
    dialogues = _json("\n".join(source.lines))
    if not isinstance(dialogues, list):
        raise source.fault("document", "no JSON list", "a JSON list of dialogues")
    for number, dialogue in enumerate(dialogues):
        turns = dialogue.get("conversations") if isinstance(dialogue, dict) else None
        if not isinstance(turns, list):
            raise source.fault(f"[{number}].conversations", turns, "a list of turns")
        history, seen = 0, 0
        for place, turn in enumerate(turns):
            said = turn.get("value") if isinstance(turn, dict) else None
            if not isinstance(said, str):
                raise source.fault(f"[{number}].conversations[{place}].value", said, "text")
            tokens = -(-len(said) // CHARACTERS_PER_TOKEN)
            if turn.get("from") in ("gpt", "chatgpt", "assistant", "model") and history and tokens:
                yield _Row(history, tokens, session=str(dialogue.get("id", number)), prefix_tokens=seen)
                seen = history + tokens
            history += tokens


def _mooncake(source: _Source) -> _Rows:
    """The prefix is the leading blocks that any earlier request had: what a cache without end would hold."""
    seen: set[object] = set()
    for row in source.json_rows():
        prompt = source.tokens("input_length", row.get("input_length"))
        blocks = row.get("hash_ids", [])
        if not isinstance(blocks, list) or not all(isinstance(block, (int, str)) for block in blocks):
            raise source.fault("hash_ids", blocks, "a list of block ids")
        known = next((place for place, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
        yield _Row(
            prompt,
            source.tokens("output_length", row.get("output_length")),
            source.seconds("timestamp", row.get("timestamp")) / 1000,
            prefix_tokens=min(prompt, known * MOONCAKE_BLOCK_TOKENS),
            hash_ids=blocks[: -(-prompt // MOONCAKE_BLOCK_TOKENS)],
        )


def _openai(source: _Source) -> _Rows:
    """Logged responses, bare or as a batch result; the tokens of several choices are taken as equally many each."""
    start: float | None = None
    for line in source.json_rows():
        row = _response(line)
        usage, choices = row.get("usage"), row.get("choices", [])
        if not isinstance(usage, dict):
            raise source.fault("usage", usage, "an object with prompt_tokens and completion_tokens")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise source.fault("choices", choices, "a list of objects")
        prompt = source.tokens("usage.prompt_tokens", usage.get("prompt_tokens"), 0)
        output = source.tokens("usage.completion_tokens", usage.get("completion_tokens"), 0)
        moment = source.clock("created", row.get("created", row.get("timestamp")))
        start = moment if start is None and not math.isnan(moment) else start
        if not prompt or not output:
            yield None
            continue
        yield _Row(
            prompt,
            -(-output // max(1, len(choices))),
            moment - (start or 0.0),
            censored=any(choice.get("finish_reason") == "length" for choice in choices),
            label=str(row.get("model") or ""),
        )


def _response(line: dict[str, Any]) -> dict[str, Any]:
    inner = line.get("response")
    body = inner.get("body", inner) if isinstance(inner, dict) else line
    return {**line, **body} if isinstance(body, dict) else line


_READERS: dict[Format, Callable[[_Source], _Rows]] = {
    "uniform": _uniform,
    "burstgpt": _burstgpt,
    "azure": _azure,
    "sharegpt-lengths": _sharegpt_lengths,
    "sharegpt": _sharegpt,
    "mooncake": _mooncake,
    "openai": _openai,
}
