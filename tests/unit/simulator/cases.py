"""Small random replays, and the emulator's scheduler driven through one on a virtual clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from kvantile_engine.emulator.scheduler import Limits, Scheduler, Sequence, State
from kvantile_engine.emulator.steptime import StepTime as EngineStepTime
from kvantile_optimizer.admission import FORMS
from kvantile_optimizer.plan import StepTime
from kvantile_optimizer.simulator.replica import Policy, ReplicaSpec, Requests, replica_records, request_records, run
from kvantile_optimizer.simulator.state import Structured
from kvantile_optimizer.traces import HashIds
from kvantile_optimizer.waiting import Order

PINNED_BLOCKS = 3
ORDERS: tuple[Order, ...] = ("fcfs", "deadline", "slack")


@dataclass(frozen=True, slots=True)
class Case:
    """A replica, a policy and the records of the requests."""

    replica: ReplicaSpec
    policy: Policy
    requests: Structured
    pinned_blocks: int = 0
    hash_ids: HashIds | None = None


@dataclass(frozen=True, slots=True)
class Happened:
    """What is compared: per request, and of the replica at the end."""

    admitted: list[float]
    first: list[float]
    last: list[float]
    preemptions: list[int]
    free_blocks: int
    credit: int
    computed_tokens: int
    hits: list[int]
    """Prompt tokens that the first admission of each request found computed."""


def make_case(seed: int) -> Case:
    """A replica with too little of everything, and requests whose forms may differ; some answers are long."""
    rng = np.random.default_rng(seed)
    size = int(rng.choice([1, 2, 4, 16]))
    long = rng.random() < 0.3
    blocks = int(rng.integers(60, 300) if long else rng.integers(4, 60))
    step = StepTime(
        alpha=float(rng.uniform(0.5, 2)),
        beta=float(rng.choice([0.0, rng.uniform(0, 0.2)])),
        gamma=float(rng.choice([0.0, rng.uniform(0, 0.01)])),
        delta=float(rng.uniform(0, 0.1)),
    )
    batched = int(rng.choice([3, 8, 32, 256]))
    replica = ReplicaSpec(blocks * size, step, size, int(rng.choice([2, 5, 64])), batched)
    policy = Policy(
        form="pooled",
        pooling=float(rng.choice([0.05, 0.1, 0.25, 1.0])),
        order=ORDERS[int(rng.integers(3))],
        watermark=float(rng.choice([0.0, 0.1, 0.3])),
    )
    count = int(rng.integers(5, 30))
    tokens = blocks * size
    gaps = rng.exponential(rng.choice([0.3, 3.0, 20.0]), count) * (rng.random(count) < 0.8)
    requests = Requests(
        arrival_s=np.cumsum(gaps),
        prompt=rng.integers(1, max(2, tokens // 2), count),
        output=rng.integers(1, max(2, min(200 if long else 60, tokens // 2)), count),
        ttft_s=np.where(rng.random(count) < 0.2, math.inf, rng.uniform(0, 60, count)),
    )
    records = request_records(requests, policy, replica)
    records["form"] = rng.choice(list(FORMS.values()) if rng.random() < 0.4 else [int(rng.integers(3))], count)
    records["reserve"] = np.minimum(rng.integers(0, 250 if long else 50, count), tokens - records["prompt"])
    return Case(replica, policy, records)


def make_mixed_case(seed: int) -> Case:
    """Few long answers, each held or pooled whole: promises are used up while a pool shrinks beside them."""
    rng = np.random.default_rng(seed)
    size, count = int(rng.choice([2, 4, 16])), 8
    tokens = int(rng.integers(10, 60)) * 16
    replica = ReplicaSpec(tokens, StepTime(alpha=1.0, beta=0.01, gamma=1e-4, delta=0.01), size, 64, 256)
    policy = Policy("pooled", pooling=1.0)
    requests = Requests(np.cumsum(rng.exponential(5, count)), rng.integers(1, 40, count), rng.integers(60, 150, count))
    kept = requests.prompt + requests.output <= tokens
    records = request_records(requests, policy, replica)
    records["form"] = rng.choice([FORMS["held"], FORMS["pooled"]], count)
    records["reserve"] = np.minimum(rng.integers(60, 250, count), tokens - records["prompt"])
    return Case(replica, policy, records[kept])


def with_hash_ids(case: Case, seed: int) -> Case:
    """The same case with prompts that begin like earlier ones; an id's stretch need not be whole blocks."""
    rng = np.random.default_rng(seed)
    tokens = int(rng.choice([1, case.replica.block_size, 2 * case.replica.block_size, 5]))
    prompts: list[list[int]] = []
    for prompt in case.requests["prompt"]:
        count = -(-int(prompt) // tokens)
        like = prompts[rng.integers(len(prompts))] if prompts and rng.random() < 0.8 else []
        known = like[: rng.integers(count + 1)]
        fresh = sum(map(len, prompts)) + 1
        prompts.append(known + list(range(fresh, fresh + count - len(known))))
    counts = np.array([len(ids) for ids in prompts])
    hash_ids = HashIds(np.concatenate(prompts), np.cumsum(counts) - counts, counts, tokens)
    return replace(case, hash_ids=hash_ids)


def with_shared_blocks(case: Case, seed: int) -> Case:
    """The same case with a pinned prefix before some prompts: what is left to hold and to compute is as before."""
    records, size = case.requests.copy(), case.replica.block_size
    carried = np.random.default_rng(seed).random(len(records)) < 0.7
    records["shared"] = np.where(carried, PINNED_BLOCKS, 0)
    records["cached"] = records["shared"] * size
    records["prompt"] += records["cached"]
    tokens = case.replica.kv_tokens + PINNED_BLOCKS * size
    return Case(replace(case.replica, kv_tokens=tokens), case.policy, records, PINNED_BLOCKS)


def simulated(case: Case, *, shortcut: bool) -> Happened:
    """The case through the kernel."""
    machines = replica_records(case.replica, case.policy, 1, case.pinned_blocks)
    outcome = run(case.requests.copy(), machines, np.array([0, 1]), hash_ids=case.hash_ids, shortcut=shortcut)
    machine = machines[0]
    return Happened(
        outcome.admitted_s.tolist(),
        outcome.first_s.tolist(),
        outcome.last_s.tolist(),
        outcome.preemptions.tolist(),
        int(machine["free"]),
        int(machine["credit"]),
        outcome.computed_tokens,
        outcome.hit_tokens.tolist(),
    )


class PromptCaching(Scheduler):
    """The emulator's scheduler with the simulator's simpler prefix cache, as docs/simulator.md says: of prompts only,
    known once they are computed, and each content in one block."""

    def _hits(self, sequence: Sequence) -> tuple[list[int], int]:
        return self.pool.leading_hits(sequence.hashes[: (sequence.known - 1) // self.limits.block_size])

    def _publish(self, sequence: Sequence, computed: int) -> None:
        pass

    def _end_prefill(self, sequence: Sequence) -> bool:
        if sequence.state is State.RUNNING:
            full = (sequence.computed + sequence.scheduled) // self.limits.block_size
            for key in sequence.hashes[len(sequence.full) : full]:
                if self.pool.leading_hits([key])[0]:
                    break
                sequence.full.append(self.pool.publish(key))
                sequence.private -= 1
        return super()._end_prefill(sequence)


def emulated(case: Case) -> Happened:
    """The case through the emulator's scheduler: a step begins where the last one ended, or at the next arrival."""
    replica, step_time = case.replica, case.replica.step_time
    seconds = EngineStepTime(step_time.alpha, step_time.beta, step_time.gamma, step_time.delta).seconds
    limits = Limits(
        replica.blocks,
        replica.block_size,
        replica.max_num_seqs,
        replica.max_num_batched_tokens,
        case.policy.watermark,
        case.policy.order,
        prefix_caching=case.hash_ids is not None,
    )
    scheduler, sequences = PromptCaching(limits), [_sequence(case, index) for index in range(len(case.requests))]
    admitted: dict[Sequence, float] = {}
    first: dict[Sequence, float] = {}
    last: dict[Sequence, float] = {}
    now, arrived, computed = 0.0, 0, 0
    while arrived < len(sequences) or scheduler.busy:
        if not scheduler.busy:
            now = max(now, sequences[arrived].arrival)
        while arrived < len(sequences) and sequences[arrived].arrival <= now:
            scheduler.submit(sequences[arrived])
            arrived += 1
        step = scheduler.begin(now)
        for sequence in step.admitted:
            admitted.setdefault(sequence, now)
        computed += len(step.decoding) + step.prefill_tokens
        now += seconds(len(step.decoding), step.context_tokens, step.prefill_tokens)
        for sequence in scheduler.end(step):
            first.setdefault(sequence, now)
            if sequence.state is State.FINISHED:
                last[sequence] = now
    return Happened(
        [admitted[sequence] for sequence in sequences],
        [first[sequence] for sequence in sequences],
        [last[sequence] for sequence in sequences],
        [sequence.preemptions for sequence in sequences],
        scheduler.pool.free,
        scheduler.waiting._credit,
        computed,
        [sequence.cached_tokens for sequence in sequences],
    )


def _hashes(case: Case, index: int) -> tuple[int, ...]:
    """A key for each full block: the id of the stretch that it ends in, and where it ends there."""
    if case.hash_ids is None:
        return ()
    ids, tokens, size = case.hash_ids.ids[case.hash_ids.begin[index] :], case.hash_ids.tokens, case.replica.block_size
    ends = range(size - 1, int(case.requests[index]["prompt"]), size)
    return tuple(int(ids[end // tokens]) * tokens + end % tokens for end in ends)


def _sequence(case: Case, index: int) -> Sequence:
    record = case.requests[index]
    latest = float(record["latest_start"])
    return Sequence(
        prompt=int(record["prompt"]),
        output=int(record["output"]),
        arrival=float(record["arrival"]),
        latest_start=None if latest == math.inf else latest,
        form=int(record["form"]),
        reserve=int(record["reserve"]),
        pooling_per_mille=int(record["pooling"]),
        hashes=_hashes(case, index),
    )
