"""The real engine with less KV cache than its requests want: stock, watermarks, and reservations.

One server of each kind runs throughout, and they take turns: what else the machine does meets all of them. All get the
same requests at the same moments. The KV cache is 8,192 tokens and the model random (`tests.support.tiny_model`); what
is compared is who is let in when. Reservations are by what is known of a class, its P90, never by a request's own
length.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from tests.support import real_vllm
from tests.support.tiny_model import make_model
from tests.support.vllm_server import BLOCK_SIZE, VllmServer, vllm_server

from benchmarks.engine.load import Answer, Ask, Hints, play
from benchmarks.engine.overhead import NoVllmError
from benchmarks.optimizer.row import Row, Run, Setting, Target
from kvantile_optimizer.local.bursts import Wave

WARM_UP = 20
"""Requests."""
LONGEST = 2048
"""Tokens of a prompt and its answer."""
WATERMARKS = (0.02, 0.05, 0.1)
STOCK, OURS = "stock", "kvantile"
KINDS = (STOCK, *(f"watermark {share:g}" for share in WATERMARKS), OURS)
ROUNDS, QUICK_ROUNDS = 5, 1
STREAM_INTERVAL = 16
"""Tokens a chunk, for all kinds alike: each chunk costs time of the two cores that the engine computes on. The first
and the last token come when they would anyway."""
QUANTILE, POOLING = 0.9, 0.25
KNOWN = 20_000
"""Answers of a class that have been seen before."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one kind of server did in one round."""

    answers: Sequence[Answer]
    preemptions: float

    @property
    def tokens_per_second(self) -> float:
        """Of all answers, until the last of them ended."""
        return sum(answer.tokens for answer in self.answers) / max(answer.last_s for answer in self.answers)

    @property
    def misses(self) -> float:
        """The share of requests that missed a target."""
        return 1 - sum(answer.met for answer in self.answers) / len(self.answers)

    def ttft_p99_s(self) -> float:
        """Of all requests."""
        return float(np.nanpercentile([answer.ttft_s for answer in self.answers], 99))


@dataclass(frozen=True, slots=True)
class Engine:
    """A random model and the engine's sizes."""

    hidden: int
    layers: int
    kv_tokens: int = 8192
    most_running: int = 128
    most_batched: int = 2048

    def arguments(self) -> list[str]:
        """Of the server, for all kinds alike."""
        return [
            *("--max-num-seqs", str(self.most_running), "--max-num-batched-tokens", str(self.most_batched)),
            *("--max-model-len", str(LONGEST), "--stream-interval", str(STREAM_INTERVAL)),
        ]


SMALL, LARGER = Engine(hidden=64, layers=2), Engine(hidden=256, layers=6)


@contextmanager
def servers(kinds: Sequence[str], engine: Engine) -> Iterator[dict[str, VllmServer]]:
    """A server of each kind by its name, which have answered something. Raises NoVllmError without vLLM."""
    if real_vllm.python() is None:
        raise NoVllmError(real_vllm.MISSING)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = make_model(folder / "model", hidden=engine.hidden, layers=engine.layers)
        running = {}
        for kind in kinds:
            place, (_, _, share) = folder / kind, kind.partition(" ")
            place.mkdir()
            arguments = [*engine.arguments(), *(["--watermark", share] if share else [])]
            blocks = engine.kv_tokens // BLOCK_SIZE
            running[kind] = stack.enter_context(
                vllm_server(place, model, *arguments, kv_blocks=blocks, plugin=kind == OURS)
            )
            # What only the first requests pay for.
            measured(running[kind], _crowd(np.random.default_rng(0), WARM_UP), {}, 0)
        yield running


def measured(server: VllmServer, asks: Sequence[Ask], hints: Hints, seed: int) -> Measured:
    """One round on one server."""
    return counted(server, lambda: play(server.url, asks, LONGEST, hints, seed))


def counted(server: VllmServer, played: Callable[[], list[Answer]]) -> Measured:
    """One round, and what the server preempted meanwhile."""
    before = server.metric("vllm:num_preemptions_total")
    answers = played()
    return Measured(answers, server.metric("vllm:num_preemptions_total") - before)


def lengths(rng: np.random.Generator, count: int, median: float, spread: float, most: int) -> np.ndarray:
    """Lognormal answers, tokens, at least 2."""
    return np.clip(rng.lognormal(np.log(median), spread, count), 2, most).astype(int)


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of requests: how its lengths are drawn, and its target."""

    name: str
    prompt: tuple[int, int]
    median: float
    spread: float
    most: int
    ttft_s: float

    def hint(self) -> dict[str, float | str]:
        """What is known of it: the quantile of answers seen before, and the target."""
        known = lengths(np.random.default_rng(12345), KNOWN, self.median, self.spread, self.most)
        reserve = int(np.quantile(known, QUANTILE, method="inverted_cdf"))
        hint: dict[str, float | str] = {"kv_reserve_tokens": reserve, "kv_pooling": POOLING, "kv_class": self.name}
        return hint | ({"kv_ttft_budget": self.ttft_s} if np.isfinite(self.ttft_s) else {})

    def asks(self, rng: np.random.Generator, moments_s: np.ndarray, tpot_s: float) -> list[Ask]:
        """Requests at these moments."""
        prompts = rng.integers(*self.prompt, len(moments_s))
        answers = lengths(rng, len(moments_s), self.median, self.spread, self.most)
        return [
            Ask(float(at), self.name, int(prompt), int(answer), self.ttft_s, tpot_s)
            for at, prompt, answer in zip(moments_s, prompts, answers, strict=True)
        ]


CROWD = Kind("crowd", (30, 100), 130, 0.6, 800, float("inf"))
AT_ONCE, QUICK_AT_ONCE = 120, 30
FEW = 24
"""Requests whose answers fit the cache together."""
PLAIN_ROUNDS = 30


def tight(setting: Setting, seed: int) -> Run:
    """All requests at once: preemptions and tokens per second."""
    count = QUICK_AT_ONCE if setting.quick else AT_ONCE
    with servers(KINDS, SMALL) as running:
        found = _hinted(setting, seed, running, [CROWD], lambda rng: _crowd(rng, count))
    return Run(_of_tight(found), table(found))


def plain(setting: Setting, seed: int) -> Run:
    """No hints, and room for all: ours against stock."""
    ratios = []
    with servers((STOCK, OURS), SMALL) as running:
        for number in setting.watch.within(range(QUICK_ROUNDS if setting.quick else PLAIN_ROUNDS)):
            asks = _crowd(np.random.default_rng([seed, number]), FEW)
            found = {kind: measured(running[kind], asks, {}, number) for kind in _turns(list(running), number)}
            ratios.append(found[OURS].tokens_per_second / found[STOCK].tokens_per_second)
    ratio = statistics.median(ratios)
    return Run({"difference": abs(ratio - 1)}, {"tokens a second over stock's": _spread(ratios, ".3f")})


def in_turns(
    setting: Setting,
    running: Mapping[str, VllmServer],
    drawn: Callable[[int], Sequence[Ask]],
    served: Callable[[str, Sequence[Ask], int], Measured],
) -> list[dict[str, Measured]]:
    """What each kind did in each round, in turns: `drawn` gives a round's requests, `served` has a kind serve them."""
    found = []
    for number in setting.watch.within(range(QUICK_ROUNDS if setting.quick else ROUNDS)):
        asks, of_round = drawn(number), {}
        for kind in _turns(list(running), number):
            of_round[kind] = served(kind, asks, number)
            click.echo(f"  round {number + 1}, {kind}: {_described([of_round[kind]])}", err=True)
        found.append(of_round)
    return found


def _hinted(
    setting: Setting,
    seed: int,
    running: Mapping[str, VllmServer],
    classes: Sequence[Kind],
    drawn: Callable[[np.random.Generator], list[Ask]],
) -> list[dict[str, Measured]]:
    """Rounds in which ours is told what is known of the classes."""
    hints = {kind.name: kind.hint() for kind in classes}
    return in_turns(
        setting,
        running,
        lambda number: drawn(np.random.default_rng([seed, number])),
        lambda kind, asks, number: measured(running[kind], asks, hints if kind == OURS else {}, number),
    )


def _crowd(rng: np.random.Generator, count: int) -> list[Ask]:
    return CROWD.asks(rng, np.zeros(count), float("inf"))


def _turns(kinds: list[str], number: int) -> list[str]:
    """The kinds in another order each round."""
    shift = number % len(kinds)
    return kinds[shift:] + kinds[:shift]


def _of_tight(rounds: Sequence[dict[str, Measured]]) -> dict[str, float]:
    speed = {kind: [found[kind].tokens_per_second for found in rounds] for kind in rounds[0]}
    marks = [kind for kind in speed if kind not in (STOCK, OURS)]
    best = max(marks, key=lambda kind: statistics.median(speed[kind]))
    return {
        "preemptions": _share(rounds),
        "stock": statistics.median(ours / other for ours, other in zip(speed[OURS], speed[STOCK], strict=True)),
        "watermark": statistics.median(ours / other for ours, other in zip(speed[OURS], speed[best], strict=True)),
    }


def _share(rounds: Sequence[dict[str, Measured]]) -> float:
    """Our preemptions over stock's, all rounds together."""
    ours, stock = (sum(found[kind].preemptions for found in rounds) for kind in (OURS, STOCK))
    return ours / stock if stock else float("nan")


def table(rounds: Sequence[dict[str, Measured]]) -> dict[str, str]:
    """What each kind did, over all rounds."""
    return {kind: _described([found[kind] for found in rounds]) for kind in sorted(rounds[0])}


def _described(found: Sequence[Measured]) -> str:
    """Medians and spread."""
    return (
        f"{_spread([item.tokens_per_second for item in found], '.0f')} tokens/s, "
        f"{_spread([item.preemptions for item in found], '.0f')} preemptions, "
        f"{_spread([item.misses for item in found], '.3f')} missed, "
        f"TTFT P99 {_spread([item.ttft_p99_s() for item in found], '.2f')} s"
    )


def _spread(values: Sequence[float], show: str) -> str:
    if len(values) == 1:
        return f"{values[0]:{show}}"
    return f"{statistics.median(values):{show}} ({min(values):{show}} to {max(values):{show}})"


CODE = Kind("code", (300, 600), 25, 0.5, 80, 1.0)
CHAT = Kind("chat", (30, 100), 200, 0.6, 800, 2.0)
REQUESTS, QUICK_REQUESTS = 400, 40
RATE = 8.5
"""Requests a second."""
WAVE = Wave(period_s=24.0, burst_s=8.0, factor=2.0)
TPOT_S = 0.1


def bursts(setting: Setting, seed: int) -> Run:
    """Two classes in bursts: who misses targets."""
    count = QUICK_REQUESTS if setting.quick else REQUESTS
    with servers(KINDS, LARGER) as running:
        found = _hinted(setting, seed, running, [CODE, CHAT], lambda rng: _mixed(rng, count))
    return Run(of_bursts(found), table(found))


def _mixed(rng: np.random.Generator, count: int) -> list[Ask]:
    moments_s = WAVE.bend(np.cumsum(rng.exponential(1 / RATE, count)), float(rng.uniform(0, WAVE.period_s)))
    is_code = rng.random(count) < 0.5
    asks = [*CODE.asks(rng, moments_s[is_code], TPOT_S), *CHAT.asks(rng, moments_s[~is_code], TPOT_S)]
    return sorted(asks, key=lambda ask: ask.arrival_s)


def of_bursts(rounds: Sequence[dict[str, Measured]]) -> dict[str, float]:
    """Our misses over those of whichever other was best, seed by seed, and our preemptions over stock's."""
    ratios = []
    for found in rounds:
        best = min(item.misses for kind, item in found.items() if kind != OURS)
        ratios.append(found[OURS].misses / best if best else float(found[OURS].misses > 0))
    return {"worst": max(ratios), "median": statistics.median(ratios), "preemptions": _share(rounds)}


OF_BURSTS = (
    Target("worst", 0.5, "at most", "{:.2f}", what="misses over the best other's, worst seed"),
    Target("preemptions", 0.05, "at most", "{:.1%}", what="preemptions over stock's"),
)
ROWS = (
    Row(
        "tight",
        f"real vLLM, {AT_ONCE} requests at once, {SMALL.kv_tokens:,} tokens of KV cache, {ROUNDS} rounds",
        (
            Target("preemptions", 0.05, "at most", "{:.1%}", what="preemptions over stock's"),
            Target("stock", 1.1, "at least", "{:.3f}", what="tokens a second over stock's"),
            Target("watermark", 1.0, "at least", "{:.3f}", what="over the best watermark's"),
        ),
        tight,
        limit_s=1200,
        alone=True,
        runs=1,
    ),
    Row(
        "plain",
        f"real vLLM, {FEW} requests without hints, room for all, {PLAIN_ROUNDS} rounds",
        (Target("difference", 0.01, "at most", "{:.2%}", what="tokens a second, away from stock's"),),
        plain,
        limit_s=900,
        alone=True,
        runs=1,
    ),
    Row(
        "bursts",
        f"real vLLM, two classes in bursts, {SMALL.kv_tokens:,} tokens of KV cache, {ROUNDS} seeds",
        OF_BURSTS,
        bursts,
        limit_s=3600,
        alone=True,
        runs=1,
    ),
)
