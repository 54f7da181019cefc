"""Replays requests through one simulated replica, or several that share them by load.

`simulate_replica` is for those who ask what a reservation does: arrays of requests, a replica's size and speed, a
policy, and arrays of what happened. The work is `dispatch`'s and `kernel`'s; here inputs are checked once, put into
records and taken out again. A request that the pool could not hold even alone is refused, as the gateway would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvantile_optimizer.admission import FORMS, LATE_SHARE_PER_MILLE, PER_MILLE, watermark_blocks
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.plan import Form, Group, StepTime
from kvantile_optimizer.simulator import dispatch, gates, gateway
from kvantile_optimizer.simulator.compiled import tell_of_compiling
from kvantile_optimizer.simulator.outcome import Outcome
from kvantile_optimizer.simulator.state import (
    CHAIN,
    ENDS,
    KV_BINS,
    NOBODY,
    ORDERS,
    REPLICA,
    REQUEST,
    SLOT,
    Caches,
    Floats,
    Gateway,
    Ints,
    Structured,
)
from kvantile_optimizer.traces import HashIds
from kvantile_optimizer.waiting import Order

NO_LIMIT = 1_000_000_000
"""Tokens that a client allows when it does not say."""
GATES = {"reservation": gates.RESERVATION, "new-token-ratio": gates.NEW_TOKEN_RATIO, "past-future": gates.PAST_FUTURE}


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """N requests in order of arrival. What is given as one number holds for all of them."""

    arrival_s: Floats
    """(N,) seconds, ascending."""
    prompt: Ints
    """(N,) tokens, at least 1."""
    output: Ints
    """(N,) tokens, at least 1: what the answer will have, which no policy but `oracle` knows."""
    ttft_s: Floats | float = math.inf
    """(N,) target for the first token, for the orders that look at it; inf where there is none."""
    max_tokens: Ints | int = NO_LIMIT
    """(N,) the most tokens that the client allows."""
    cached: Ints | int = 0
    """(N,) leading prompt tokens that the prefix cache has; they take memory but no time. With `hash_ids` only those
    of a resident prefix count: the rest is found in the cache or not."""
    hash_ids: HashIds | None = None
    """What the prompts consist of; with it each replica keeps a prefix cache."""

    def __len__(self) -> int:
        return len(self.prompt)

    def only(self, which: npt.NDArray[np.intp], ttft_s: float) -> Requests:
        """The requests at the places `which`, with the target `ttft_s`."""
        max_tokens, cached = (np.broadcast_to(value, len(self))[which] for value in (self.max_tokens, self.cached))
        ids = self.hash_ids and self.hash_ids.only(which)
        return Requests(self.arrival_s[which], self.prompt[which], self.output[which], ttft_s, max_tokens, cached, ids)


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """The size and speed of one replica."""

    kv_tokens: int
    step_time: StepTime
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048

    @classmethod
    def of(cls, group: Group) -> ReplicaSpec:
        """A replica of a plan's group."""
        return cls(group.kv_tokens, group.step_time, group.block_size, group.max_num_seqs, group.max_num_batched_tokens)

    @property
    def blocks(self) -> int:
        """Whole blocks of the KV cache."""
        return self.kv_tokens // self.block_size


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """How admission is decided. Arrays are (N,), a number holds for every request."""

    form: Form = "none"
    reserve: Ints | int = 0
    """Tokens."""
    pooling: float = 1.0
    """phi, of `pooled`."""
    order: Order = "fcfs"
    watermark: float = 0.0
    """Share of the blocks that admission leaves free while something runs."""
    gate: str = "reservation"
    """A key of `GATES`: another engine's rule beside the shared one."""
    history: Sequence[int] | Ints = field(default_factory=list)
    """Past output lengths, for `past-future`."""
    late_share: int = LATE_SHARE_PER_MILLE
    """Thousandths of the admissions that the late get while others wait."""

    def only(self, which: npt.NDArray[np.intp], count: int) -> Policy:
        """The policy for those at the places `which` of `count` requests."""
        return replace(self, reserve=np.broadcast_to(self.reserve, count)[which])


def simulate_replica(
    requests: Requests,
    replica: ReplicaSpec,
    policy: Policy,
    *,
    replicas: int = 1,
    seed: int = 0,
    shortcut: bool = True,
) -> Outcome:
    """What `requests` get from `replicas` replicas of one kind under `policy`; ties between replicas go by `seed`.

    Without `shortcut` every step is taken for itself: the same, slowly.
    Raises InputError for arrivals that are not finite or not in order, and for lengths below 1.
    """
    check(requests)
    records = request_records(requests, policy, replica)
    records["chance"] = np.random.default_rng(seed).random(len(requests))
    machines = np.concatenate([replica_records(replica, policy, 1) for _ in range(replicas)])
    return run(records, machines, np.array([0, replicas]), policy.history, requests.hash_ids, shortcut=shortcut)


def request_records(requests: Requests, policy: Policy, replica: ReplicaSpec) -> Structured:
    """Records (N,) of `REQUEST`, before anything happens."""
    records = np.zeros(len(requests), REQUEST)
    step = replica.step_time
    records["arrival"], records["prompt"], records["output"] = requests.arrival_s, requests.prompt, requests.output
    records["latest_start"] = requests.arrival_s + requests.ttft_s - (step.alpha + step.delta * requests.prompt)
    records["cached"], records["limit"] = np.minimum(requests.cached, requests.prompt), requests.max_tokens
    records["form"] = FORMS[policy.form]
    room = replica.blocks * replica.block_size - requests.prompt
    reserve = np.minimum(np.minimum(policy.reserve, requests.max_tokens), room)
    records["reserve"] = np.maximum(0, reserve) if policy.form != "none" else 0
    records["pooling"] = round(policy.pooling * PER_MILLE)
    share = policy.pooling if policy.form == "pooled" else 1.0
    records["load"] = requests.prompt + np.ceil(share * records["reserve"]).astype(np.int64)
    for name in ("admitted", "first", "last"):
        records[name] = np.nan
    return records


def replica_records(replica: ReplicaSpec, policy: Policy, count: int, pinned_blocks: int = 0) -> Structured:
    """Records (count,) of `REPLICA`, empty but for `pinned_blocks` that prefixes keep for good."""
    records = np.zeros(count, REPLICA)
    step = replica.step_time
    records["block_size"], records["total_blocks"] = replica.block_size, replica.blocks
    records["free"] = replica.blocks - pinned_blocks
    records["max_num_seqs"], records["max_batched"] = replica.max_num_seqs, replica.max_num_batched_tokens
    records["watermark_blocks"] = watermark_blocks(policy.watermark, replica.blocks)
    records["order"], records["gate"] = ORDERS[policy.order], GATES[policy.gate]
    records["late_share"], records["ratio"] = policy.late_share, gates.FIRST_RATIO
    records["alpha"], records["beta"], records["gamma"], records["delta"] = (
        step.alpha,
        step.beta,
        step.gamma,
        step.delta,
    )
    records["wake"] = np.inf
    for name in ("preempted_root", "on_time_root", "late_root"):
        records[name] = NOBODY
    return records


def run(
    requests: Structured,
    replicas: Structured,
    first_replicas: npt.NDArray[np.int64],
    history: Sequence[int] | Ints = (),
    hash_ids: HashIds | None = None,
    at_gateway: Gateway | None = None,
    *,
    shortcut: bool = True,
) -> Outcome:
    """Replays records, which afterwards say what came of them.

    `first_replicas` (G + 1,) are where each group's replicas begin. With `hash_ids`, what the prompts consist of, each
    replica has a prefix cache; `at_gateway` chooses groups and replicas and queues what finds no room. A record whose
    group is NOBODY is refused, and so is one that the group's pool could not hold alone.
    """
    machines = replicas[first_replicas[np.maximum(0, requests["group"])]]
    longest = (machines["free"] + requests["shared"]) * machines["block_size"]
    held = (requests["group"] != NOBODY) & (requests["prompt"] + requests["output"] - 1 <= longest)
    kept = np.ascontiguousarray(requests[held])
    most = int(min(np.minimum(replicas["max_num_seqs"], replicas["total_blocks"]).max(), max(1, len(kept))))
    kv_seconds = np.zeros((len(replicas), KV_BINS))
    caches = _caches(hash_ids.only(held), kept, replicas) if hash_ids else None
    tell_of_compiling()
    scratch = (
        np.zeros((len(replicas), most), np.int64),
        np.zeros(int(replicas["block_size"].max()), np.int64),
        np.sort(np.asarray(history, np.int64)),
        caches,
        kv_seconds,
        shortcut,
    )
    if at_gateway is None:
        dispatch.replay(kept, replicas, first_replicas.astype(np.int64), *scratch)
    else:
        visits = np.asarray(at_gateway.visits)[held]
        gateway.replay(kept, replicas, at_gateway._replace(visits=visits, allowed=at_gateway.allowed[held]), *scratch)
        kept["arrival"] = visits["arrival"]
        kept["replica"] = np.where(np.isnan(kept["last"]), NOBODY, kept["replica"])
    if caches is not None:
        kept["cached"] = np.asarray(caches.chains)["hit"]
    requests["replica"] = NOBODY
    requests[held] = kept
    return _outcome(requests, machines["block_size"], replicas, kv_seconds)


def _caches(hash_ids: HashIds, requests: Structured, replicas: Structured) -> Caches:
    """Empty prefix caches of the replicas: a slot for each block, and so many buckets."""
    count = int(replicas["total_blocks"].max())
    slots = np.zeros((len(replicas), count), SLOT)
    slots["bucket"] = NOBODY
    slots["next"] = np.append(np.arange(1, count), NOBODY)
    ends = np.zeros(len(replicas), ENDS)
    ends["oldest"] = ends["newest"] = NOBODY
    chains = np.zeros(len(requests), CHAIN)
    chains["begin"] = hash_ids.begin
    chains["covered"] = np.minimum(requests["prompt"], hash_ids.count * hash_ids.tokens)
    return Caches(slots, ends, chains, hash_ids.ids, hash_ids.tokens)


def _outcome(whole: Structured, block_size: Ints, replicas: Structured, kv_seconds: Floats) -> Outcome:
    return Outcome(
        arrival_s=whole["arrival"].copy(),
        output=whole["output"].copy(),
        admitted_s=whole["admitted"].copy(),
        first_s=whole["first"].copy(),
        last_s=whole["last"].copy(),
        preemptions=whole["preemptions"].copy(),
        replica=whole["replica"].copy(),
        hit_tokens=np.minimum(whole["cached"], whole["prompt"] - 1) // block_size * block_size,
        computed_tokens=int(replicas["computed_tokens"].sum()),
        recomputed_tokens=int(replicas["recomputed_tokens"].sum()),
        busy_s=replicas["busy_s"].copy(),
        kv_seconds=kv_seconds,
    )


def check(requests: Requests) -> None:
    """Raises InputError for what no replay can take."""
    if not len(requests):
        raise InputError("requests: found none, allowed at least one")
    if not np.isfinite(requests.arrival_s).all() or (np.diff(requests.arrival_s) < 0).any():
        raise InputError("arrival_s: found times that are not finite or not ascending, allowed seconds in order")
    for name in ("prompt", "output"):
        if (least := int(getattr(requests, name).min())) < 1:
            raise InputError(f"{name}: found {least}, allowed at least 1 token")
