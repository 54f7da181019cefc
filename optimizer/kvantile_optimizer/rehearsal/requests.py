"""Makes up the requests that a plan is rehearsed with, from its workloads.

Minutes of too many arrivals decide whether a plan holds, not its mean load. So a class with a recorded trace gets the
trace's own rows: cut into blocks where it is quiet, the blocks shuffled, the clock scaled to the planned rate. Lengths
stay with their arrivals, and each pass through the record uses every row once. A class that was described, or whose
record has no times, gets a renewal process with gamma gaps of its burstiness, and lengths spread over its samples as
evenly as their weights allow. Each class has exactly the requests that its rate asks for, so that seeds differ in how
requests come and not in how many. A class's draws depend on the seed and its name alone.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvantile_optimizer.plan import Plan
from kvantile_optimizer.simulator.replica import Requests
from kvantile_optimizer.simulator.state import Ints
from kvantile_optimizer.workload import MIN_ANSWERS, Array, Record, Workload

BLOCKS = 4
"""Pieces of a record. Of eight, calm and busy minutes lie closer together than they came: replicas of BurstGPT were
busy for 94 % of the time and not for 90 % (4: 92 %). Seeds still differ in where the cuts are and in their order."""
STEADIEST = 1e-3
"""Burstiness below which gaps are all the same anyway."""
MOST_PASSED = 4_000_000
"""Recorded arrivals that are passed by at most for a thinned stream, 32 MB; more is as good as a random choice."""


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """What is drawn of one class."""

    workload: Workload
    share: float = 1.0
    """Of the class's requests; each is taken or left by chance, as a route's fraction does it."""
    ttft_s: float = math.inf
    """Target for the first token."""
    resident_share: float = 0.0
    """Share of the replicas that keep the class's prefix."""

    @property
    def per_second(self) -> float:
        """Requests taken."""
        return self.workload.requests_per_second * self.share


def synthesise(plan: Plan, workloads: list[Workload], seed: int, count: int) -> tuple[Requests, Ints]:
    """About `count` requests (N,) in order of arrival for all of `plan`, and their classes (N,) as places in it.

    `workloads` has one entry for each class of the plan, in its order. The same seed gives the same requests. All of
    each class is drawn, whatever the plan leaves unserved.
    """
    resident = {(prefix.class_, prefix.group) for prefix in plan.resident_prefixes}
    streams = []
    for item, workload in zip(plan.classes, workloads, strict=True):
        routes = plan.routes_of(item.name)
        kept = sum(route.fraction for route in routes if (route.class_, route.group) in resident)
        served = sum(route.fraction for route in routes)
        streams.append(Stream(workload, 1.0, item.slo.ttft_seconds, kept / served if served else 0.0))
    return draw(streams, seed, count)


def draw(streams: list[Stream], seed: int, count: int) -> tuple[Requests, Ints]:
    """About `count` requests (N,) of `streams` in order of arrival, and their streams (N,); each has at least one.

    Streams without a rate have none.
    """
    span_s = count / sum(stream.per_second for stream in streams)
    parts = [_of_stream(stream, span_s, seed) for stream in streams]
    arrival_s, prompt, output, cached = (np.concatenate(values) for values in zip(*parts, strict=True))
    sizes = [len(part[0]) for part in parts]
    places = np.repeat(np.arange(len(streams)), sizes)
    order = np.argsort(arrival_s, kind="stable")
    targets = np.array([stream.ttft_s for stream in streams])[places]
    requests = Requests(
        arrival_s=arrival_s[order],
        prompt=prompt[order].astype(np.int64),
        output=output[order].astype(np.int64),
        ttft_s=targets[order],
        cached=cached[order].astype(np.int64),
    )
    return requests, places[order]


def _of_stream(stream: Stream, span_s: float, seed: int) -> tuple[Array, Array, Array, Array]:
    """Arrivals in [0, span_s] and prompt, output and cached tokens of a stream, each (n,)."""
    workload, count = stream.workload, 0
    if stream.per_second > 0:
        count = max(1, round(stream.per_second * span_s))
    rng = np.random.default_rng([seed, zlib.crc32(workload.name.encode())])
    share = min(1.0, stream.share)
    if (timed := _timed(workload)) is not None:
        moments, prompt, output = _recorded(timed, count, share, rng)
    else:
        moments = _renewal(workload.burstiness, count, share, rng)
        rows = _evenly(workload.weight, count, rng)
        prompt, output = workload.prompt[rows], workload.output[rows]
    arrival_s = moments * (span_s / moments[-1]) if count and moments[-1] > 0 else np.linspace(0, span_s, count)
    carried = rng.random(count) < workload.prefix_share * stream.resident_share
    cached = np.where(carried, np.minimum(workload.prefix_tokens, prompt), 0)
    return arrival_s, np.maximum(1.0, np.rint(prompt)), np.maximum(1.0, np.rint(output)), cached


def _timed(workload: Workload) -> Record | None:
    """The class's record, if it has enough rows and their times."""
    record = workload.record
    if record is None or record.arrival_s is None or len(record) < MIN_ANSWERS:
        return None
    return record if np.ptp(record.arrival_s) > 0 else None


def _renewal(burstiness: float, count: int, share: float, rng: np.random.Generator) -> Array:
    """Moments (count,) of a renewal process with gamma gaps, on a clock of its own.

    Of a process thinned by chance a gap is the sum of a geometric number of gaps, which for gamma gaps is a gamma gap
    of as many times the shape: what is passed by need not be drawn.
    """
    shape = 1 / max(burstiness, STEADIEST) ** 2
    return np.cumsum(rng.gamma(shape * rng.geometric(share, count)))


def _evenly(weight: Array, count: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """`count` samples, shuffled; each is there as often as its weight says, up to one.

    That is systematic resampling (Kitagawa 1996).
    """
    reached = np.cumsum(weight)
    rows = np.searchsorted(reached / reached[-1], (np.arange(count) + rng.random()) / max(1, count))
    return rng.permutation(np.minimum(rows, len(weight) - 1))


def _recorded(record: Record, count: int, share: float, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Moments, prompts and outputs (count,) of a record's rows in shuffled blocks, thinned to `share` by chance."""
    assert record.arrival_s is not None  # noqa: S101 - the caller looked
    rows = np.cumsum(rng.geometric(max(share, count / MOST_PASSED), count)) - 1
    gaps_s = _gaps_s(record.arrival_s)
    blocks = _blocks(gaps_s, int(rng.integers(len(record))))
    passes = 1 + (int(rows[-1]) // len(record) if count else 0)
    order = np.concatenate([blocks[place] for _ in range(passes) for place in rng.permutation(len(blocks))])
    moments = np.cumsum(gaps_s[order])
    taken = order[rows]
    prompt = record.tokens[taken] if record.prompt is None else record.prompt[taken]
    return moments[rows], prompt, _uncensored(record, taken, rng)


def _blocks(gaps_s: Array, start: int) -> list[npt.NDArray[np.intp]]:
    """The rows of a record in BLOCKS pieces, cut at the longest gap of each stretch as counted from row `start`.

    Cut anywhere, the halves of two bursts could meet and make a longer one than was ever seen.
    """
    stretches = np.array_split(np.roll(np.arange(len(gaps_s)), -start), BLOCKS)
    cuts = np.sort([stretch[np.argmax(gaps_s[stretch])] for stretch in stretches])
    return np.split(np.roll(np.arange(len(gaps_s)), -cuts[0]), cuts[1:] - cuts[0])


def _gaps_s(arrival_s: Array) -> Array:
    """The gap (N,) before each row, the first one's the mean; rows of one moment are spread over the clock's tick."""
    moments, first, counts = np.unique(arrival_s, return_index=True, return_counts=True)
    tick_s = float(np.diff(moments).min()) if len(moments) > 1 else 0.0
    behind = np.arange(len(arrival_s)) - np.repeat(first, counts)
    spread_s = arrival_s + tick_s * behind / np.repeat(counts, counts)
    gaps_s = np.diff(spread_s, prepend=spread_s[0])
    gaps_s[0] = gaps_s[1:].mean()
    return gaps_s


def _uncensored(record: Record, rows: npt.NDArray[np.intp], rng: np.random.Generator) -> Array:
    """Outputs of `rows`; for one that was cut off, a draw from the lengths beyond it."""
    output, chance = record.tokens[rows], rng.random(len(rows))
    cut = record.censored[rows]
    if cut.any():
        lengths = record.lengths()
        below = lengths.cdf(output[cut])
        places = np.searchsorted(np.cumsum(lengths.weights), below + chance[cut] * (1 - below))
        longer = lengths.values[np.minimum(places, len(lengths.values) - 1)]
        output[cut] = np.maximum(output[cut], longer)
    return output
