"""Groups by planned fractions, replicas by prefix and load."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvantile_optimizer.routing import CREDIT_BOUND, LOAD_BOUND, hashed
from kvantile_router.routing import Shares, name_hash, pick_replica, weighted_order

fractions = st.lists(st.floats(0.02, 1.0), min_size=1, max_size=6)


@dataclass
class Loaded:
    url: str
    tokens: int = 0
    requests: int = 0

    @property
    def name_hash(self) -> int:
        return name_hash(self.url)


def make_replicas(count: int) -> list[Loaded]:
    return [Loaded(f"http://replica-{i}") for i in range(count)]


def pick(
    key: bytes | None, replicas: list[Loaded], tokens: int = 10, kv: int = 10_000, most: int = 1000
) -> Loaded | None:
    return pick_replica(None if key is None else hashed(key), replicas, tokens, kv, most, random.Random(0).random)


def key(index: int) -> bytes:
    return index.to_bytes(8, "big")


def number(index: int) -> int:
    return hashed(key(index))


@settings(max_examples=20)
@given(fractions, st.integers(0, 2**32))
def test_realised_fractions_are_within_a_point_when_half_of_the_requests_share_a_prefix(
    weights: list[float], seed: int
) -> None:
    rng = random.Random(seed)
    shares = Shares({f"g{i}": weight for i, weight in enumerate(weights)})
    for _ in range(10_000):
        hot = rng.random() < 0.5
        shares.record(shares.order(hashed(b"hot" if hot else rng.randbytes(8)), list(shares.fractions))[0])
    for name, realised in shares.realised().items():
        assert realised == pytest.approx(shares.fractions[name], abs=0.01)


def test_hashing_alone_gives_each_group_its_weight_of_the_keys() -> None:
    weights = {"a": 0.6, "b": 0.3, "c": 0.1, "never": 0.0}
    first = Counter(weighted_order(number(index), weights)[0] for index in range(10_000))
    assert {name: first[name] / 10_000 for name in weights} == pytest.approx(weights, abs=0.015)


def test_few_prefixes_leave_their_group_to_keep_the_fractions() -> None:
    shares = Shares({"a": 0.5, "b": 0.5})
    rng, moved = random.Random(1), 0
    for _ in range(10_000):
        name = number(rng.randrange(1000))
        chosen = shares.order(name, ["a", "b"])[0]
        moved += chosen != weighted_order(name, shares.fractions)[0]
        shares.record(chosen)
    assert moved / 10_000 < 0.05


def test_a_group_that_was_away_is_not_flooded_on_its_return() -> None:
    shares = Shares({"a": 0.5, "b": 0.5})
    for _ in range(1000):
        shares.record("b")
    turns = []
    for index in range(200):
        turns.append(shares.order(number(index), ["a", "b"])[0])
        shares.record(turns[-1])
    assert turns[:150].count("a") <= 75 + 2 * CREDIT_BOUND + 15


@pytest.mark.parametrize("change", ["leaves", "joins"])
def test_a_replica_of_twenty_that_comes_or_goes_moves_only_its_share(change: str) -> None:
    twenty = make_replicas(20)
    others = twenty[:7] + twenty[8:] if change == "leaves" else [*twenty, Loaded("http://new")]
    moved = sum(pick(key(i), twenty) != pick(key(i), others) for i in range(5000))
    assert 0 < moved / 5000 <= 1 / 20 + 0.01


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=30), st.binary(min_size=1, max_size=8))
def test_the_choice_is_never_above_the_load_bound(loads: list[int], prefix: bytes) -> None:
    replicas = make_replicas(len(loads))
    for replica, tokens in zip(replicas, loads, strict=True):
        replica.tokens, replica.requests = tokens, 1
    chosen = pick(prefix, replicas)
    assert chosen is not None
    assert chosen.tokens <= LOAD_BOUND * sum(loads) / len(loads)


def test_a_hot_prefix_spreads_over_the_replicas_as_load_grows() -> None:
    replicas = make_replicas(4)
    for _ in range(100):
        chosen = pick(b"hot", replicas)
        assert chosen is not None
        chosen.tokens += 10
        chosen.requests += 1
    mean = sum(replica.tokens for replica in replicas) / 4
    assert max(replica.tokens for replica in replicas) <= LOAD_BOUND * mean + 10


def test_room_is_reserved_tokens_and_requests_but_an_empty_replica_takes_anything() -> None:
    full, empty = Loaded("http://full", tokens=95, requests=1), Loaded("http://empty")
    assert pick(b"k", [full], tokens=10, kv=100) is None
    assert pick(b"k", [full], tokens=5, kv=100) is full
    assert pick(b"k", [full], tokens=5, kv=100, most=1) is None
    assert pick(b"k", [full, empty], tokens=500, kv=100) is empty


def test_without_a_prefix_the_least_loaded_serves_and_ties_fall_by_chance() -> None:
    replicas = make_replicas(4)
    replicas[0].tokens = 50
    rng = random.Random(3)
    chosen = Counter(
        found.url for _ in range(300) if (found := pick_replica(None, replicas, 1, 1000, 10, rng.random)) is not None
    )
    assert "http://replica-0" not in chosen
    assert min(chosen.values()) > 300 / 3 - 5 * math.sqrt(300)
