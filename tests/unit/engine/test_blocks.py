"""The emulator's block pool."""

from __future__ import annotations

from kvantile_engine.emulator.blocks import BlockPool


def cached_pool(total: int, *keys: int) -> BlockPool:
    """A pool whose free blocks hold `keys`, the first used least recently."""
    pool = BlockPool(total)
    for key in keys:
        assert pool.take(1)
        assert pool.publish(key)
        pool.release([key], 0)
    return pool


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(3)
    assert not pool.take(4)
    assert (pool.free, pool.used) == (3, 0)
    assert pool.take(3)
    assert (pool.free, pool.used) == (0, 3)


def test_a_released_prefix_stays_cached_until_its_block_is_needed() -> None:
    pool = cached_pool(3, 1, 2)
    assert (pool.free, pool.leading_hits([1, 2, 3])) == (3, (2, 2))
    assert pool.take(1)
    assert pool.leading_hits([1, 2]) == (2, 2)
    assert pool.take(1)
    assert pool.leading_hits([1]) == (0, 0)
    assert pool.leading_hits([2]) == (1, 1)


def test_using_a_cached_block_makes_it_the_last_to_go() -> None:
    pool = cached_pool(2, 1, 2)
    pool.share([1])
    pool.release([1], 0)
    assert pool.take(1)
    assert pool.leading_hits([1]) == (1, 1)
    assert pool.leading_hits([2]) == (0, 0)


def test_of_one_sequence_the_tail_goes_before_the_head() -> None:
    pool = BlockPool(2)
    assert pool.take(2)
    assert pool.publish(1)
    assert pool.publish(2)
    pool.release([1, 2], 0)
    assert pool.take(1)
    assert pool.leading_hits([1, 2]) == (1, 1)


def test_a_block_is_shared_until_the_last_lets_go() -> None:
    pool = cached_pool(2, 1)
    pool.share([1])
    pool.share([1])
    pool.release([1], 0)
    assert (pool.used, pool.leading_hits([1])) == (1, (1, 0))
    pool.release([1], 0)
    assert (pool.used, pool.leading_hits([1])) == (0, (1, 1))


def test_a_second_block_of_the_same_content_stays_private() -> None:
    pool = cached_pool(2, 1)
    assert pool.take(1)
    assert not pool.publish(1)
    pool.release([], 1)
    assert (pool.free, pool.used) == (2, 0)


def test_forgetting_leaves_no_hits_and_all_blocks() -> None:
    pool = cached_pool(3, 1, 2)
    pool.forget()
    assert (pool.free, pool.blank, pool.leading_hits([1])) == (3, 3, (0, 0))
