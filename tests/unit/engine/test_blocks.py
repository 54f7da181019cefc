"""The emulator's block pool."""

from __future__ import annotations

from kvantile_engine.emulator.blocks import BlockPool


def cached_pool(total: int, *keys: str) -> BlockPool:
    """A pool whose free blocks hold `keys`, the first used least recently."""
    pool = BlockPool(total)
    for key in keys:
        assert pool.take(1)
        pool.release([pool.publish(key)], 0)
    return pool


def hits(pool: BlockPool, keys: str) -> tuple[int, int]:
    """How many leading keys are there, and how many of their blocks are free."""
    found, free = pool.leading_hits(keys)
    return len(found), free


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(3)
    assert not pool.take(4)
    assert (pool.free, pool.used) == (3, 0)
    assert pool.take(3)
    assert (pool.free, pool.used) == (0, 3)


def test_a_released_prefix_stays_cached_until_its_block_is_needed() -> None:
    pool = cached_pool(3, "a", "b")
    assert (pool.free, hits(pool, "abc")) == (3, (2, 2))
    assert pool.take(1)
    assert hits(pool, "ab") == (2, 2)
    assert pool.take(1)
    assert hits(pool, "a") == (0, 0)
    assert hits(pool, "b") == (1, 1)


def test_using_a_cached_block_makes_it_the_last_to_go() -> None:
    pool = cached_pool(2, "a", "b")
    found, _ = pool.leading_hits("a")
    pool.share(found)
    pool.release(found, 0)
    assert pool.take(1)
    assert hits(pool, "a") == (1, 1)
    assert hits(pool, "b") == (0, 0)


def test_of_one_sequence_the_tail_goes_before_the_head() -> None:
    pool = BlockPool(2)
    assert pool.take(2)
    pool.release([pool.publish("a"), pool.publish("b")], 0)
    assert pool.take(1)
    assert hits(pool, "ab") == (1, 1)


def test_a_block_is_shared_until_the_last_lets_go() -> None:
    pool = cached_pool(2, "a")
    found, _ = pool.leading_hits("a")
    pool.share(found)
    pool.share(found)
    pool.release(found, 0)
    assert (pool.used, hits(pool, "a")) == (1, (1, 0))
    pool.release(found, 0)
    assert (pool.used, hits(pool, "a")) == (0, (1, 1))


def test_of_two_blocks_with_the_same_content_the_older_one_is_found() -> None:
    pool = BlockPool(2)
    assert pool.take(2)
    older, younger = pool.publish("a"), pool.publish("a")
    assert pool.leading_hits("a") == ([older], 0)
    pool.release([older], 0)
    assert pool.take(1)
    assert pool.leading_hits("a") == ([younger], 0)
    pool.release([younger], 1)
    assert (pool.free, pool.used) == (2, 0)


def test_forgetting_leaves_no_hits_and_all_blocks() -> None:
    pool = cached_pool(3, "a", "b")
    pool.forget()
    assert (pool.free, pool.blank, hits(pool, "a")) == (3, 3, (0, 0))
