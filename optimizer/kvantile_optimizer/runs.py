"""Recorded runs of an engine: a CSV with a request a line, and when its first and last token came.

Columns `arrival_s, prompt_tokens, output_tokens, first_token_s, last_token_s`, in any order and among others; times are
seconds on one clock. A broken row ends the reading with its line number, as in `traces`.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np

from kvantile_optimizer import traces
from kvantile_optimizer.calibration import RecordedRun
from kvantile_optimizer.errors import InputError

TOKENS = ("prompt_tokens", "output_tokens")
SECONDS = ("arrival_s", "first_token_s", "last_token_s")


def read(path: Path | None) -> RecordedRun:
    """Reads a run, gzip or plain, into order of arrival; None or `-` is standard input. Raises InputError."""
    where = traces.name_of(path)
    reader = csv.DictReader(traces.text_of(path).splitlines(), skipinitialspace=True)
    if missing := [name for name in (*SECONDS, *TOKENS) if name not in (reader.fieldnames or [])]:
        raise InputError(f"{where}:1: header: found no {missing[0]}, allowed {', '.join((*SECONDS, *TOKENS))}")
    rows = [_row(row, f"{where}:{reader.line_num}") for row in reader]
    if not rows:
        raise InputError(f"{where}: found no request, allowed at least one")
    arrival, first, last, prompt, output = (np.array(column) for column in zip(*sorted(rows), strict=True))
    return RecordedRun(arrival, prompt.astype(np.int64), output.astype(np.int64), first, last)


def _row(row: dict[str, str | None], where: str) -> tuple[float, ...]:
    numbers = [_number(row.get(name), f"{where}: {name}") for name in (*SECONDS, *TOKENS)]
    for name, value in zip(TOKENS, numbers[len(SECONDS) :], strict=True):
        if not 1 <= value <= traces.MAX_TOKENS or value != int(value):
            raise InputError(f"{where}: {name}: found {value:g}, allowed a whole number from 1 to {traces.MAX_TOKENS}")
    return tuple(numbers)


def _number(text: str | None, where: str) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{where}: found {text!r}, allowed a finite number")
    return number
