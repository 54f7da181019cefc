"""Makes up the requests that a plan is rehearsed with, from its workloads.

Minutes of too many arrivals decide whether a plan holds, not its mean load. So a class with a recorded trace gets the
trace's own rows: cut into blocks where it is quiet, the blocks shuffled, the clock scaled to the planned rate. Lengths
stay with their arrivals, and each pass through the record uses every row once. Classes that were recorded together are
shuffled together: where one burst brings requests of all of them, bursts of their own would even each other out. Of
one that is planned at less than its part of the record, rows are left out by chance. A class that was described, or
whose record has no times, gets a renewal process with gamma gaps of its burstiness, and lengths spread over its samples
as evenly as their weights allow. Each class has exactly the requests that its rate asks for, so that seeds differ in
how requests come and not in how many. Such draws depend on the seed and the names of the classes alone.
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
SAME_TIME = 0.8
"""Share of the time of two records, from the first arrival to the last, that they have in common if they were recorded
together: a rare class's first and last request are not the trace's."""
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
    drawn: dict[int, tuple[Array, Array, Array, Array]] = {}
    for members in _together(streams):
        drawn |= dict(zip(members, _of_streams([streams[place] for place in members], span_s, seed), strict=True))
    parts = [drawn[place] for place in range(len(streams))]
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


def _together(streams: list[Stream]) -> list[list[int]]:
    """The places of the streams, those whose records ran at the same time together."""
    groups: list[tuple[tuple[float, float] | None, list[int]]] = []
    for place, stream in enumerate(streams):
        record = _timed(stream.workload)
        time_s = (float(record.moments[0]), float(record.moments[-1])) if record else None
        known = next((places for other, places in groups if time_s and other and _same(time_s, other)), None)
        if known is None:
            groups.append((time_s, [place]))
        else:
            known.append(place)
    return [places for _, places in groups]


def _same(one: tuple[float, float], other: tuple[float, float]) -> bool:
    common_s = min(one[1], other[1]) - max(one[0], other[0])
    return common_s >= SAME_TIME * (max(one[1], other[1]) - min(one[0], other[0]))


def _of_streams(streams: list[Stream], span_s: float, seed: int) -> list[tuple[Array, Array, Array, Array]]:
    """Arrivals in [0, span_s] and prompt, output and cached tokens, each (n,), of streams that belong together."""
    counts = [max(1, round(stream.per_second * span_s)) if stream.per_second > 0 else 0 for stream in streams]
    rngs = [np.random.default_rng([seed, zlib.crc32(stream.workload.name.encode())]) for stream in streams]
    timed = [record for stream in streams if (record := _timed(stream.workload))]
    if timed:
        rates = [stream.workload.requests_per_second for stream in streams]
        made = _recorded(timed, rates, counts, span_s, rngs)
    else:
        made = [_described(streams[0], counts[0], span_s, rngs[0])]
    parts = []
    for stream, (arrival_s, prompt, output), rng in zip(streams, made, rngs, strict=True):
        carried = rng.random(len(prompt)) < stream.workload.prefix_share * stream.resident_share
        cached = np.where(carried, np.minimum(stream.workload.prefix_tokens, prompt), 0)
        parts.append((arrival_s, np.maximum(1.0, np.rint(prompt)), np.maximum(1.0, np.rint(output)), cached))
    return parts


def _described(stream: Stream, count: int, span_s: float, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Arrivals, prompts and outputs (count,) of a class without a record."""
    workload = stream.workload
    moments = _renewal(workload.burstiness, count, min(1.0, stream.share), rng)
    rows = _evenly(workload.weight, count, rng)
    arrival_s = moments * (span_s / moments[-1]) if count and moments[-1] > 0 else np.linspace(0, span_s, count)
    return arrival_s, workload.prompt[rows], workload.output[rows]


@dataclass(frozen=True, slots=True, eq=False)
class _Timed:
    """A record with times."""

    record: Record
    moments: Array
    """(N,) when its rows came; rows of one moment are spread over the clock's tick."""

    def __len__(self) -> int:
        return len(self.moments)


def _timed(workload: Workload) -> _Timed | None:
    """The class's record, if it has enough rows and their times."""
    record = workload.record
    if record is None or record.arrival_s is None or len(record) < MIN_ANSWERS:
        return None
    return _Timed(record, _spread(record.arrival_s)) if np.ptp(record.arrival_s) > 0 else None


def _spread(arrival_s: Array) -> Array:
    moments, first, counts = np.unique(arrival_s, return_index=True, return_counts=True)
    tick_s = float(np.diff(moments).min()) if len(moments) > 1 else 0.0
    behind = np.arange(len(arrival_s)) - np.repeat(first, counts)
    return np.asarray(arrival_s + tick_s * behind / np.repeat(counts, counts))


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


def _recorded(
    timed: list[_Timed], rates: list[float], counts: list[int], span_s: float, rngs: list[np.random.Generator]
) -> list[tuple[Array, Array, Array]]:
    """Arrivals in [0, span_s], prompts and outputs (count,) of each record, all in the same shuffled blocks.

    `rates` are those of the classes before a stream's thinning. The first generator shuffles.
    """
    order = np.argsort(np.concatenate([one.moments for one in timed]), kind="stable")
    gaps_s = np.diff(np.concatenate([one.moments for one in timed])[order], prepend=0.0)
    gaps_s[0] = gaps_s[1:].mean()
    sizes = np.array([len(one) for one in timed])
    of_record = np.repeat(np.arange(len(timed)), sizes)[order]
    row = np.concatenate([np.arange(size) for size in sizes])[order]
    # The clock runs as fast as the class needs that is planned at most for its rows; of the others some are left out.
    passes = min(max(span_s * rate / size for rate, size in zip(rates, sizes, strict=True)), MOST_PASSED / len(order))
    wanted = [max(count, round(passes * size)) if count else 0 for count, size in zip(counts, sizes, strict=True)]
    blocks = _blocks(gaps_s, int(rngs[0].integers(len(order))))
    rounds = math.ceil(max(number / size for number, size in zip(wanted, sizes, strict=True)))
    played = np.concatenate([blocks[at] for _ in range(max(1, rounds)) for at in rngs[0].permutation(len(blocks))])
    moments, of_played = np.cumsum(gaps_s[played]), of_record[played]
    places = [np.flatnonzero(of_played == place) for place in range(len(timed))]
    end_s = max((moments[mine[number - 1]] for mine, number in zip(places, wanted, strict=True) if number), default=1.0)
    found = []
    for one, mine, count, rng in zip(timed, places, counts, rngs, strict=True):
        passed = int(np.searchsorted(moments[mine], end_s, side="right"))
        taken = mine[np.sort(rng.choice(passed, count, replace=False, shuffle=False))]
        rows = row[played[taken]]
        prompt = one.record.tokens[rows] if one.record.prompt is None else one.record.prompt[rows]
        found.append((moments[taken] * (span_s / end_s), prompt, _uncensored(one.record, rows, rng)))
    return found


def _blocks(gaps_s: Array, start: int) -> list[npt.NDArray[np.intp]]:
    """The rows of a record in BLOCKS pieces, cut at the longest gap of each stretch as counted from row `start`.

    Cut anywhere, the halves of two bursts could meet and make a longer one than was ever seen.
    """
    stretches = np.array_split(np.roll(np.arange(len(gaps_s)), -start), BLOCKS)
    cuts = np.sort([stretch[np.argmax(gaps_s[stretch])] for stretch in stretches])
    return np.split(np.roll(np.arange(len(gaps_s)), -cuts[0]), cuts[1:] - cuts[0])


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
