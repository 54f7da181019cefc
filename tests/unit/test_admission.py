"""The admission rule, against its definition written out."""

from fractions import Fraction
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from kvantile_optimizer.admission import (
    FORMS,
    HELD,
    NONE,
    POOLED,
    admits,
    blocks_for,
    cut_reserve,
    firm_blocks,
    late_turn,
    running_firm_blocks,
    soft_blocks,
    soft_millitokens,
)

tokens = st.integers(0, 5_000)
block_sizes = st.sampled_from([1, 16, 32])


@given(tokens, block_sizes)
def test_blocks_are_the_ceiling(count: int, block_size: int) -> None:
    assert blocks_for(count, block_size) == ceil(Fraction(count, block_size))


def test_held_promises_the_reservation_until_it_is_used() -> None:
    assert firm_blocks(HELD, prompt=100, generated=0, reserve=60, allocated_blocks=0, block_size=16) == 10
    assert firm_blocks(HELD, prompt=100, generated=50, reserve=60, allocated_blocks=10, block_size=16) == 0
    assert firm_blocks(HELD, prompt=100, generated=80, reserve=60, allocated_blocks=11, block_size=16) == 1


def test_a_running_request_counts_for_nothing_where_nothing_is_reserved() -> None:
    assert running_firm_blocks(NONE, prompt=100, generated=0, reserve=60, allocated_blocks=0, block_size=16) == 0
    assert running_firm_blocks(POOLED, prompt=100, generated=0, reserve=60, allocated_blocks=2, block_size=16) == 5


@given(st.lists(st.tuples(tokens, tokens), max_size=20), st.integers(0, 1000), block_sizes)
def test_pooling_rounds_once_for_the_sum(
    requests: list[tuple[int, int]], pooling_per_mille: int, block_size: int
) -> None:
    total = sum(soft_millitokens(POOLED, generated, reserve, pooling_per_mille) for generated, reserve in requests)
    unused = sum(max(0, reserve - generated) for generated, reserve in requests)
    assert soft_blocks(total, block_size) == ceil(Fraction(pooling_per_mille * unused, 1000 * block_size))


def test_only_pooled_is_soft() -> None:
    assert soft_millitokens(HELD, 0, 100, 250) == soft_millitokens(NONE, 0, 100, 250) == 0
    assert set(FORMS) == {"none", "held", "pooled"}


def test_an_empty_engine_is_never_kept_waiting() -> None:
    assert admits(10, 10, 10**9, 0, 0, running=0, watermark_blocks=5, block_size=16)
    assert not admits(10, 11, 0, 0, 0, running=0, watermark_blocks=0, block_size=16)


@given(*[st.integers(0, 200)] * 4, st.integers(0, 10**6), st.integers(0, 20), block_sizes)
def test_admission_leaves_room_for_every_promise(
    free: int, mine: int, firm: int, watermark: int, soft: int, mine_soft: int, block_size: int
) -> None:
    admitted = admits(free, mine, mine_soft, firm, soft, 1, watermark, block_size)
    assert admitted == (free - mine - firm - watermark >= Fraction(soft + mine_soft, 1000 * block_size))


def test_a_reservation_is_cut_to_max_tokens_and_to_the_pool() -> None:
    assert cut_reserve(500, prompt=100, max_tokens=64, total_blocks=100, block_size=16) == 64
    assert cut_reserve(5_000, prompt=100, max_tokens=10_000, total_blocks=100, block_size=16) == 1_500
    assert cut_reserve(500, prompt=2_000, max_tokens=10_000, total_blocks=100, block_size=16) == 0


def test_credit_does_not_pile_up_while_nobody_is_late() -> None:
    credit = 0
    for _ in range(1_000):
        late, credit = late_turn(credit, on_time_waiting=True, late_waiting=False, share=100)
        assert not late
    assert credit == 0
