"""Random scripts for schedulers: who comes when, with which lengths, hints and prefixes, and who goes before the end.

The same script drives vLLM's own scheduler (`real_scheduler`) and the emulator's; both say in every step whom they
admitted and preempted, who got a token and how many blocks are free.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from kvantile_engine.emulator.scheduler import Limits, Scheduler, Sequence, State
from kvantile_optimizer.admission import FORMS
from kvantile_optimizer.waiting import Order

STEP_S = 0.05
Kind = Literal["stock", "stepwise", "ahead"]
Shape = Literal["plain", "hybrid", "priority", "lora", "speculative", "loading"]
"""What else the engine does: layers with a window beside full ones, classes of priority, adapters of which one fits at
a time, drafts of two tokens, prompts whose KV is loaded. The emulator does the plain one only."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request; lengths in tokens, moments in steps."""

    arrival_step: int
    prompt: int
    output: int
    max_tokens: int
    form: str = "none"
    reserve: int = 0
    per_mille: int = 1000
    budget_s: float | None = None
    prefix_id: int = 0
    prefix_tokens: int = 0
    abort_step: int | None = None


@dataclass(frozen=True, slots=True)
class Script:
    """What comes to one engine, and how large that is."""

    sequences: tuple[Item, ...]
    total_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark: float
    order: Order
    prefix_caching: bool
    kind: Kind = "stepwise"
    shape: Shape = "plain"
    lags: bool = False
    """Whether a step is asked for before the tokens of the last one are there; the emulator's never is."""

    @property
    def is_stock(self) -> bool:
        """Whether nothing in it asks for more than vLLM does by itself."""
        return all(item.form == "none" and item.budget_s is None for item in self.sequences)

    def to_json(self) -> dict[str, Any]:
        """As `real_scheduler` reads it."""
        return asdict(self)


def make_script(seed: int, *, prefix_caching: bool | None = None) -> Script:
    """A random script, tight in memory more often than not."""
    rng = random.Random(seed)
    size = rng.choice((1, 4, 16))
    # In a cache of many tokens a script is mostly steps in which nothing is decided.
    blocks = rng.randint(6, min(80, 400 // size))
    longest = blocks * size
    kind: Kind = rng.choice(("stepwise", "ahead"))
    caching = rng.random() < 0.5 if prefix_caching is None else prefix_caching
    plain = rng.random() < 0.25
    prefixes = [rng.randint(1, max(1, longest // 3)) for _ in range(3)]
    span = rng.choice((5, 40, 150))
    most_seqs = rng.choice((1, 4, 16, 64))
    items = []
    for _ in range(rng.randint(1, 40)):
        prompt = rng.randint(1, max(1, longest // rng.choice((2, 4, 8))))
        output = rng.randint(1, max(1, min(longest - prompt, longest // rng.choice((2, 4)))))
        arrival, name = rng.randint(0, span), rng.randrange(3)
        shared = min(prefixes[name], prompt) if caching and rng.random() < 0.6 else 0
        item = Item(
            arrival_step=arrival,
            prompt=prompt,
            output=output,
            max_tokens=output + rng.choice((0, 3, 1000)),
            prefix_id=name,
            prefix_tokens=shared,
            abort_step=arrival + rng.randint(1, 60) if rng.random() < 0.1 else None,
        )
        if not plain:
            item = replace(
                item,
                form=rng.choice(("none", "held", "pooled", "pooled")),
                reserve=rng.randint(0, max(1, longest // 2)),
                per_mille=rng.choice((0, 50, 100, 250, 1000)),
                budget_s=rng.choice((None, 0.0, 0.2, 1.0, 5.0)),
            )
        items.append(item)
    return Script(
        sequences=tuple(sorted(items, key=lambda item: item.arrival_step)),
        total_blocks=blocks,
        block_size=size,
        max_num_seqs=most_seqs,
        max_num_batched_tokens=max(most_seqs, rng.choice((4, 64, 512))),
        watermark=rng.choice((0.0, 0.0, 0.05, 0.2)),
        order="fcfs" if plain else rng.choice(("slack", "deadline", "fcfs")),
        prefix_caching=caching,
        kind=kind,
    )


def emulated(script: Script) -> list[dict[str, Any]]:
    """What the emulator's scheduler does with it."""
    scheduler = Scheduler(
        Limits(
            total_blocks=script.total_blocks,
            block_size=script.block_size,
            max_num_seqs=script.max_num_seqs,
            max_num_batched_tokens=script.max_num_batched_tokens,
            watermark=script.watermark,
            order=script.order,
            prefix_caching=script.prefix_caching,
        )
    )
    names: dict[Sequence, str] = {}
    steps: list[dict[str, Any]] = []
    last = max(item.arrival_step for item in script.sequences)
    while len(steps) <= last or scheduler.busy:
        now = len(steps) * STEP_S
        for place, item in enumerate(script.sequences):
            if item.arrival_step == len(steps):
                sequence = _sequence(item, now, script)
                names[sequence] = str(place)
                scheduler.submit(sequence)
        for sequence, name in list(names.items()):
            if script.sequences[int(name)].abort_step == len(steps) and sequence.state is not State.FINISHED:
                scheduler.abort(sequence)
        step = scheduler.begin(now)
        got = scheduler.end(step)
        steps.append(
            {
                "admitted": [names[item] for item in step.admitted],
                "preempted": sorted(names[item] for item in step.preempted),
                "tokens": sorted(names[item] for item in got),
                "free": scheduler.pool.free,
                "soft": scheduler.soft,
            }
        )
    return steps


def _sequence(item: Item, now: float, script: Script) -> Sequence:
    shared = item.prefix_tokens // script.block_size if script.prefix_caching else 0
    return Sequence(
        item.prompt,
        item.output,
        now,
        None if item.budget_s is None else now + item.budget_s,
        FORMS[item.form],
        item.max_tokens,
        item.reserve if item.form != "none" else 0,
        item.per_mille if item.form == "pooled" else 1000,
        tuple(1000 * (item.prefix_id + 1) + place for place in range(shared)),
    )
