"""What the kernel works on: one record per request and one per replica, as numpy structured arrays.

A record keeps all of a request in a few cache lines, and compiled code reads it by field name, so the kernel reads
like the emulator's scheduler. The protocols say the same to the type checker. Times are seconds on the replay's clock.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

NOBODY = -1
"""No request: the root of an empty queue, the end of a list."""
FCFS, DEADLINE, SLACK = 0, 1, 2
ORDERS = {"fcfs": FCFS, "deadline": DEADLINE, "slack": SLACK}
BETWEEN, STEP, ALIKE = 0, 1, 2
"""What a replica is at: between two steps, in one, or in several decode-only ones that are jumped over."""
KV_BINS = 512
"""Bins of KV use over which time is counted: a P99 is then exact to 0.2 % of the capacity."""

REQUEST = np.dtype(
    [
        ("arrival", "f8"),
        ("latest_start", "f8"),  # inf: no target
        ("prompt", "i8"),
        ("output", "i8"),
        ("cached", "i8"),  # leading prompt tokens that need no computing
        ("shared", "i8"),  # blocks at its beginning that stay on the replica for all who share them
        ("form", "i8"),
        ("reserve", "i8"),
        ("pooling", "i8"),  # per mille
        ("limit", "i8"),  # the most tokens the client allows
        ("chance", "f8"),  # in [0, 1), for what is foretold by chance
        ("load", "i8"),  # tokens that the router counts
        ("group", "i8"),
        ("replica", "i8"),
        ("generated", "i8"),
        ("computed", "i8"),
        ("scheduled", "i8"),
        ("blocks", "i8"),
        ("preemptions", "i8"),
        ("admitted", "f8"),
        ("first", "f8"),
        ("last", "f8"),
        ("key", "f8"),  # place in the heap it waits in, then its tie-break and its neighbours there
        ("tie", "i8"),
        ("child", "i8"),
        ("sibling", "i8"),
        ("ticket", "i8"),  # its turn among those that came to the queue it waits in
    ],
    align=True,
)

REPLICA = np.dtype(
    [
        ("block_size", "i8"),
        ("total_blocks", "i8"),
        ("max_num_seqs", "i8"),
        ("max_batched", "i8"),
        ("watermark_blocks", "i8"),
        ("order", "i8"),
        ("late_share", "i8"),
        ("gate", "i8"),
        ("alpha", "f8"),
        ("beta", "f8"),
        ("gamma", "f8"),
        ("delta", "f8"),
        ("clock", "f8"),  # when the step in progress began, or the next one may
        ("end", "f8"),  # when the step in progress, or the last of the equal ones, ends
        ("wake", "f8"),  # when there is something to do next
        ("phase", "i8"),
        ("steps", "i8"),
        ("context", "i8"),  # tokens that the first of the equal steps attends to
        ("deaf", "i8"),  # 1: an arrival changes nothing in the equal steps
        ("free", "i8"),
        ("running", "i8"),
        ("waiting", "i8"),
        ("preempted_root", "i8"),
        ("on_time_root", "i8"),
        ("late_root", "i8"),
        ("credit", "i8"),
        ("ticket", "i8"),
        ("ratio", "f8"),  # of the new-token-ratio gate
        ("name_hash", "i8"),
        ("tokens", "i8"),  # that the router counts
        ("requests", "i8"),
        ("preemptions", "i8"),
        ("computed_tokens", "i8"),
        ("recomputed_tokens", "i8"),
        ("busy_s", "f8"),
        ("kv_block_s", "f8"),
    ],
    align=True,
)

VISIT = np.dtype(
    [
        ("arrival", "f8"),
        ("due", "f8"),  # when its first token is promised
        ("class_index", "i8"),
        ("line", "i8"),  # the line of the lobby that it would stand in
        ("key", "i8"),  # of its prefix, NO_KEY where it has nothing in common with others
        ("group_key", "i8"),  # what groups are chosen by
        ("waiting", "i8"),  # 1: it stands in the lobby
        ("behind", "i8"),  # the next of its class that came to the lobby
    ],
    align=True,
)

ROUTE = np.dtype(
    [
        ("fraction", "f8"),
        ("credit", "f8"),  # requests that the group is owed
        ("form", "i8"),
        ("reserve", "i8"),
        ("pooling", "i8"),  # per mille
        ("share", "f8"),  # of a reserved token that the router counts
        ("ordered", "i8"),  # 1: the engine is told the target
        ("resident", "i8"),  # tokens of the class's prefix that stay on the group
    ],
    align=True,
)

PLACE = np.dtype(
    [
        ("begin", "i8"),  # its replicas among all
        ("end", "i8"),
        ("kv_tokens", "i8"),
        ("max_num_seqs", "i8"),
        ("name_hash", "i8"),
        ("lead", "f8"),  # how long first tokens take after dispatch
        ("withheld", "i8"),  # 1: kept for somebody who waits for room there
        ("tried", "i8"),
    ],
    align=True,
)

ROW = np.dtype(
    [
        ("ttft_s", "f8"),
        ("patience_s", "f8"),
        ("length", "i8"),  # places in the lobby
        ("waiting", "i8"),
        ("head", "i8"),  # the first and the last that came to the lobby
        ("tail", "i8"),
    ],
    align=True,
)

CHAIN = np.dtype(
    [
        ("begin", "i8"),  # where the ids of the prompt begin among all
        ("covered", "i8"),  # tokens of the prompt that they stand for
        ("held", "i8"),  # blocks after the request's `shared` ones that it refers to in the cache
        ("prefilling", "i8"),  # 1: the step in progress computes more of it than one further token
        ("hit", "i8"),  # prompt tokens that its first admission found computed
    ],
    align=True,
)

SLOT = np.dtype(
    [
        ("bucket", "i8"),  # the first slot whose key belongs here
        ("next", "i8"),  # in the same bucket, or among the unused
        ("key", "i8"),
        ("users", "i8"),
        ("older", "i8"),
        ("newer", "i8"),
    ],
    align=True,
)

ENDS = np.dtype(
    [
        ("cached", "i8"),  # free blocks that still hold a known piece of a prompt
        ("oldest", "i8"),  # the ends of their list
        ("newest", "i8"),
        ("unused", "i8"),  # the first unused slot
    ],
    align=True,
)


class RequestState(Protocol):
    """A record of `REQUEST`."""

    arrival: float
    latest_start: float
    prompt: int
    output: int
    cached: int
    shared: int
    form: int
    reserve: int
    pooling: int
    limit: int
    chance: float
    load: int
    group: int
    replica: int
    generated: int
    computed: int
    scheduled: int
    blocks: int
    preemptions: int
    admitted: float
    first: float
    last: float
    key: float
    tie: int
    child: int
    sibling: int
    ticket: int


class ReplicaState(Protocol):
    """A record of `REPLICA`."""

    block_size: int
    total_blocks: int
    max_num_seqs: int
    max_batched: int
    watermark_blocks: int
    order: int
    late_share: int
    gate: int
    alpha: float
    beta: float
    gamma: float
    delta: float
    clock: float
    end: float
    wake: float
    phase: int
    steps: int
    context: int
    deaf: int
    free: int
    running: int
    waiting: int
    preempted_root: int
    on_time_root: int
    late_root: int
    credit: int
    ticket: int
    ratio: float
    name_hash: int
    tokens: int
    requests: int
    preemptions: int
    computed_tokens: int
    recomputed_tokens: int
    busy_s: float
    kv_block_s: float


class VisitState(Protocol):
    """A record of `VISIT`: a request as the gateway sees it."""

    arrival: float
    due: float
    class_index: int
    line: int
    key: int
    group_key: int
    waiting: int
    behind: int


class RouteState(Protocol):
    """A record of `ROUTE`: what a plan says of a class on a group, and what the group is owed."""

    fraction: float
    credit: float
    form: int
    reserve: int
    pooling: int
    share: float
    ordered: int
    resident: int


class PlaceState(Protocol):
    """A record of `PLACE`: a group as the gateway sees it."""

    begin: int
    end: int
    kv_tokens: int
    max_num_seqs: int
    name_hash: int
    lead: float
    withheld: int
    tried: int


class RowState(Protocol):
    """A record of `ROW`: those of a class in the lobby."""

    ttft_s: float
    patience_s: float
    length: int
    waiting: int
    head: int
    tail: int


class ChainState(Protocol):
    """A record of `CHAIN`: what a prefix cache knows of a request."""

    begin: int
    covered: int
    held: int
    prefilling: int
    hit: int


class SlotState(Protocol):
    """A record of `SLOT`: a hashed block, or the place for one."""

    bucket: int
    next: int
    key: int
    users: int
    older: int
    newer: int


class EndsState(Protocol):
    """A record of `ENDS`: where the lists of a prefix cache begin and end."""

    cached: int
    oldest: int
    newest: int
    unused: int


Record = TypeVar("Record", covariant=True)


class Table(Protocol[Record]):
    """A structured array, seen as its records."""

    @overload
    def __getitem__(self, index: int, /) -> Record: ...
    @overload
    def __getitem__(self, index: slice, /) -> Table[Record]: ...
    def __len__(self) -> int: ...


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Structured = npt.NDArray[Any]


class Gateway(NamedTuple):
    """What a gateway knows of N requests, C classes, G groups and L lines."""

    visits: Table[VisitState]
    """(N,)"""
    rows: Table[RowState]
    """(C,)"""
    routes: Table[Table[RouteState]]
    """(C, G)"""
    places: Table[PlaceState]
    """(G,)"""
    allowed: npt.NDArray[np.bool_]
    """(N, G) whether a group's replicas could hold the request."""
    lines: Table[ReplicaState]
    """(L,) the lobby's queues: of a replica's record only what `heaps` uses."""
    line_groups: npt.NDArray[np.bool_]
    """(L, G) the groups that a line waits for."""
    stuck: npt.NDArray[np.bool_]
    """(L,) whether whoever is first in it does not fit."""


class Caches(NamedTuple):
    """The prefix caches of R replicas and what they know of N requests."""

    slots: Table[Table[SlotState]]
    """(R, S)"""
    ends: Table[EndsState]
    """(R,)"""
    chains: Table[ChainState]
    """(N,)"""
    ids: Ints
    """(I,) of all prompts."""
    id_tokens: int
    """Tokens that an id stands for."""


class Cache(NamedTuple):
    """One of them."""

    slots: Table[SlotState]
    ends: Table[EndsState]
    """(1,): compiled code can return an array in a tuple, but no record."""
    chains: Table[ChainState]
    ids: Ints
    id_tokens: int
