"""Makes the trace that comes with Kvantile from the public ones.

    python benchmarks/make_demo_trace.py BURSTGPT AZURE_CONVERSATION optimizer/kvantile_optimizer/data/demo-trace.csv.gz

Takes consecutive rows of each source (any format that `kvantile fit` reads), re-bases the arrival times of each to
zero, labels them and writes both, in order of arrival, in the uniform format. The BurstGPT excerpt keeps the
conversation log alone: the few API calls are another kind of traffic. The same sources give the same bytes.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from pathlib import Path

import numpy as np

from kvantile_optimizer import traces
from kvantile_optimizer.traces import Trace

ROWS = 5_000
"""Of each source: enough to fit on the first part and replay the rest, and well under a megabyte."""
HEADER = ("arrival_s", "prompt_tokens", "output_tokens", "class", "session", "prefix_tokens")


def rows_of(trace: Trace, label: str) -> list[tuple[float, int, int, str]]:
    """The first requests of a trace as (arrival, prompt, output, label)."""
    part = trace.only(np.arange(len(trace)) < ROWS)
    arrival = part.arrival_s - part.arrival_s[0]
    return [
        (float(when), int(prompt), int(output), label)
        for when, prompt, output in zip(arrival, part.prompt, part.output, strict=True)
    ]


def main(burstgpt: Path, azure: Path, target: Path) -> None:
    """Reads both sources and writes the excerpt."""
    log = traces.read(burstgpt)
    conversation = log.only(np.char.endswith(log.labels, "/Conversation log"))
    rows = rows_of(conversation, "burstgpt") + rows_of(traces.read(azure), "azure-conversation")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for when, prompt, output, label in sorted(rows):
        writer.writerow((f"{when:.6f}".rstrip("0").rstrip("."), prompt, output, label, "", ""))
    target.write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*(Path(argument) for argument in sys.argv[1:]))
