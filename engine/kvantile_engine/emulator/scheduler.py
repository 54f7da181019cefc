"""What a replica does in each step, after vLLM's V1 scheduler: no clock, no input or output, stepped from outside.

`begin` decides a step. First what runs: each sequence decodes one token or goes on with its chunked prefill, within
the token budget, taking blocks as it needs them; when none is free, the last one that runs is preempted (its blocks
are freed, its tokens kept, and all of them are prefilled again later). Then what waits, in the order of
`WaitingQueue`, while the rule of `admission` lets the first one in; a step that preempted admits nobody. `end` closes
the step: who has all tokens computed gets the next one. Sequences may be aborted between the two.

The sums of firm blocks and soft milli-tokens that admission asks for are kept up to date rather than added up each
step: soft ones fall with every token, firm ones move only where a sequence's block count does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count

from kvantile_engine.emulator.blocks import BlockPool
from kvantile_optimizer.admission import (
    NONE,
    PER_MILLE,
    admits,
    blocks_for,
    cut_reserve,
    firm_blocks,
    running_firm_blocks,
    soft_blocks,
    soft_millitokens,
    watermark_blocks,
)
from kvantile_optimizer.waiting import Order, Ticket, WaitingQueue


@dataclass(frozen=True, slots=True)
class Limits:
    """What one replica can hold and do at once. `watermark` is the fraction of all blocks that admission leaves."""

    total_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    watermark: float = 0.0
    order: Order = "slack"
    prefix_caching: bool = True


class State(Enum):
    """Where a sequence is."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()
    ABORTED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and the answer that it will get; lengths in tokens, times in engine seconds.

    `hashes` are those of the leading full blocks that other prompts may share; what comes after is found again only by
    the sequence itself, when it comes back after a preemption.
    """

    prompt: int
    output: int
    arrival: float = 0.0
    latest_start: float | None = None
    form: int = NONE
    max_tokens: int = 1_000_000_000
    """What the client allows; the scheduler knows no more about the answer's length than this and the reservation."""
    reserve: int = 0
    pooling_per_mille: int = PER_MILLE
    hashes: tuple[int, ...] = ()

    state: State = State.WAITING
    generated: int = 0
    computed: int = 0
    """Tokens whose keys and values are in blocks."""
    scheduled: int = 0
    """Tokens computed by the step in progress."""
    number: int = field(default_factory=count().__next__)
    full: list[int] = field(default_factory=list)
    """Its leading blocks that have a key; none where prefixes are not cached."""
    private: int = 0
    firm: int = 0
    soft: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the first admission found in the prefix cache."""
    preemptions: int = 0
    last_token_at: float | None = None
    ticket: Ticket[Sequence] | None = None

    @property
    def known(self) -> int:
        """Tokens there are: the prompt and what was generated."""
        return self.prompt + self.generated

    @property
    def blocks(self) -> int:
        """Blocks that it holds, its own and shared ones."""
        return len(self.full) + self.private


@dataclass(slots=True)
class Step:
    """A step in progress: who is in it and what it computes."""

    decoding: list[Sequence] = field(default_factory=list)
    prefilling: list[Sequence] = field(default_factory=list)
    context_tokens: int = 0
    prefill_tokens: int = 0
    preempted: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class Scheduler:
    """The waiting queue, the running list and the block pool of one replica."""

    limits: Limits
    pool: BlockPool = field(init=False)
    waiting: WaitingQueue[Sequence] = field(init=False)
    running: list[Sequence] = field(default_factory=list)
    firm: int = 0
    """Blocks that running sequences will take, for sure or by promise."""
    soft: int = 0
    """Milli-tokens that running sequences pool."""
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    _watermark_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.limits.total_blocks)
        self.waiting = WaitingQueue(self.limits.order)
        self._watermark_blocks = watermark_blocks(self.limits.watermark, self.limits.total_blocks)

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.running) or len(self.waiting) > 0

    @property
    def committed_blocks(self) -> int:
        """Blocks set aside beyond the used ones, firm and soft."""
        return self.firm + soft_blocks(self.soft, self.limits.block_size)

    def submit(self, sequence: Sequence) -> None:
        """Puts a sequence into the queue. Raises ValueError for one that the pool could not hold even alone."""
        size, total = self.limits.block_size, self.limits.total_blocks
        if sequence.prompt < 1 or sequence.output < 1:
            raise ValueError("a prompt and an output of at least one token")
        if blocks_for(sequence.prompt + sequence.output - 1, size) > total:
            raise ValueError(f"prompt and output within {total * size} tokens of KV cache")
        sequence.reserve = cut_reserve(sequence.reserve, sequence.prompt, sequence.max_tokens, total, size)
        sequence.ticket = self.waiting.push(sequence, sequence.arrival, sequence.latest_start)

    def abort(self, sequence: Sequence) -> None:
        """Takes a sequence out wherever it is and frees its blocks; harmless when it has ended."""
        if sequence.state is State.WAITING and sequence.ticket is not None:
            self.waiting.remove(sequence.ticket)
        elif sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self._free(sequence)
        if sequence.state is not State.FINISHED:
            sequence.state = State.ABORTED

    def begin(self, now: float) -> Step:
        """Decides the step that starts at `now` and takes the blocks for it."""
        step = Step()
        budget = self._advance_running(step)
        if not step.preempted:
            self._admit(step, now, budget)
        return step

    def end(self, step: Step) -> list[Sequence]:
        """Closes the step: the sequences that got a token, ended ones among them (their state says so)."""
        got: list[Sequence] = []
        size = self.limits.block_size
        for sequence in step.decoding:
            if sequence.state is not State.RUNNING:
                continue
            sequence.computed += 1
            sequence.generated += 1
            if sequence.soft:
                sequence.soft -= sequence.pooling_per_mille
                self.soft -= sequence.pooling_per_mille
            if sequence.generated >= sequence.output:
                self._finish(sequence)
            elif sequence.computed % size == 0:
                self._recount(sequence)
            got.append(sequence)
        got += [sequence for sequence in step.prefilling if self._end_prefill(sequence)]
        return got

    def recount(self) -> tuple[int, int]:
        """The sums of firm blocks and soft milli-tokens, added up anew: what the running ones must equal."""
        return sum(self._firm(s) for s in self.running), sum(self._soft(s) for s in self.running)

    def reset(self) -> None:
        """Empties the prefix cache and the counters."""
        self.pool.forget()
        self.preemptions = self.prefix_queries = self.prefix_hits = 0

    def _advance_running(self, step: Step) -> int:
        """Schedules what runs; the token budget that is left."""
        budget, size, position = self.limits.max_num_batched_tokens, self.limits.block_size, 0
        while position < len(self.running) and budget > 0:
            sequence = self.running[position]
            missing = sequence.known - sequence.computed
            tokens = min(missing, budget)
            if sequence.computed + tokens > sequence.blocks * size and not self._grow(sequence, tokens, step):
                break
            self._publish(sequence, sequence.computed + tokens)
            if missing == 1 and sequence.generated:
                step.decoding.append(sequence)
                step.context_tokens += sequence.computed + 1
            else:
                self._prefill(sequence, tokens, step)
            budget -= tokens
            position += 1
        return budget

    def _grow(self, sequence: Sequence, tokens: int, step: Step) -> bool:
        """Takes the blocks for `tokens` more, preempting from the end; False when `sequence` itself had to go."""
        needed = blocks_for(sequence.computed + tokens, self.limits.block_size) - sequence.blocks
        while not self.pool.take(needed):
            last = self.running.pop()
            self._preempt(last)
            step.preempted.append(last)
            if last is sequence:
                return False
        sequence.private += needed
        self._recount(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._free(sequence)
        sequence.state = State.WAITING
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        sequence.ticket = self.waiting.push(sequence, sequence.arrival, preempted=True)

    def _admit(self, step: Step, now: float, budget: int) -> None:
        while budget > 0 and len(self.running) < self.limits.max_num_seqs:
            ticket = self.waiting.peek(now)
            if ticket is None:
                return
            sequence = ticket.item
            hits, free_hits = self._hits(sequence)
            if not self._admits(sequence, len(hits), free_hits):
                return
            self.waiting.pop(now)
            budget -= self._start(sequence, hits, budget, step)

    def _hits(self, sequence: Sequence) -> tuple[list[int], int]:
        """Leading blocks in the prefix cache, and how many of them are free; the last token is always computed."""
        if not self.limits.prefix_caching:
            return [], 0
        return self.pool.leading_hits(_keys(sequence, 0, (sequence.known - 1) // self.limits.block_size))

    def _admits(self, sequence: Sequence, hits: int, free_hits: int) -> bool:
        size = self.limits.block_size
        form = sequence.form if self.running else NONE
        return admits(
            free_blocks=self.pool.free - free_hits,
            candidate_firm=firm_blocks(form, sequence.prompt, sequence.generated, sequence.reserve, hits, size),
            candidate_soft=self._soft(sequence),
            running_firm=self.firm,
            running_soft=self.soft,
            running=len(self.running),
            watermark_blocks=self._watermark_blocks,
            block_size=size,
        )

    def _start(self, sequence: Sequence, hits: list[int], budget: int, step: Step) -> int:
        """Lets an admitted sequence run its first chunk; the tokens of it. Its blocks are there: it was admitted."""
        size = self.limits.block_size
        self.pool.share(hits)
        sequence.full = hits
        sequence.computed = len(hits) * size
        if self.limits.prefix_caching:
            self.prefix_queries += sequence.known
            self.prefix_hits += sequence.computed
        if not sequence.preemptions:
            sequence.cached_tokens = sequence.computed
        tokens = min(sequence.known - sequence.computed, budget)
        needed = blocks_for(sequence.computed + tokens, size) - len(hits)
        taken = self.pool.take(needed)
        assert taken, "an admitted sequence has room for its first chunk"  # noqa: S101 - admission guarantees it
        sequence.private = needed
        self._publish(sequence, sequence.computed + tokens)
        sequence.state = State.RUNNING
        self.running.append(sequence)
        self._recount(sequence)
        sequence.soft = self._soft(sequence)
        self.soft += sequence.soft
        self._prefill(sequence, tokens, step)
        step.admitted.append(sequence)
        return tokens

    def _prefill(self, sequence: Sequence, tokens: int, step: Step) -> None:
        sequence.scheduled = tokens
        step.prefilling.append(sequence)
        step.prefill_tokens += tokens

    def _end_prefill(self, sequence: Sequence) -> bool:
        """Counts the chunk as computed; whether that was the last one, which yields a token."""
        if sequence.state is not State.RUNNING:
            return False
        sequence.computed += sequence.scheduled
        if sequence.computed < sequence.known:
            return False
        sequence.generated += 1
        if sequence.generated >= sequence.output:
            self._finish(sequence)
            return True
        self._recount(sequence)
        self.soft -= sequence.soft
        sequence.soft = self._soft(sequence)
        self.soft += sequence.soft
        return True

    def _publish(self, sequence: Sequence, computed: int) -> None:
        """Gives the blocks that this step fills their keys: at once, so that whoever is admitted next finds them."""
        if self.limits.prefix_caching:
            for key in _keys(sequence, len(sequence.full), computed // self.limits.block_size):
                sequence.full.append(self.pool.publish(key))
                sequence.private -= 1

    def _finish(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        sequence.state = State.FINISHED

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.full, sequence.private)
        sequence.full, sequence.private = [], 0
        self.firm -= sequence.firm
        self.soft -= sequence.soft
        sequence.firm = sequence.soft = 0

    def _recount(self, sequence: Sequence) -> None:
        firm = self._firm(sequence)
        self.firm += firm - sequence.firm
        sequence.firm = firm

    def _firm(self, s: Sequence) -> int:
        return running_firm_blocks(s.form, s.prompt, s.generated, s.reserve, s.blocks, self.limits.block_size)

    def _soft(self, s: Sequence) -> int:
        return soft_millitokens(s.form, s.generated, s.reserve, s.pooling_per_mille)


def _keys(sequence: Sequence, start: int, end: int) -> Iterator[Hashable]:
    """Of its full blocks from `start` to `end`: hashes that others may have too, then keys that are its own."""
    shared = len(sequence.hashes)
    return (sequence.hashes[place] if place < shared else (sequence.number, place) for place in range(start, end))
