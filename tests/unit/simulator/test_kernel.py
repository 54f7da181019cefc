"""The kernel against single steps of its own and against the emulator's scheduler."""

from __future__ import annotations

import pytest

from tests.unit.simulator.cases import (
    Happened,
    emulated,
    make_case,
    make_mixed_case,
    simulated,
    with_hash_ids,
    with_shared_blocks,
)

CASES, CACHE_CASES, BATCHES = 1000, 400, 25


def assert_same(found: Happened, expected: Happened, seed: int) -> None:
    assert found.preemptions == expected.preemptions, seed
    for name in ("admitted", "first", "last"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9, abs=1e-9), (seed, name)
    assert found.free_blocks == expected.free_blocks, seed
    assert found.credit == expected.credit, seed
    assert found.computed_tokens == expected.computed_tokens, seed


@pytest.mark.parametrize("batch", range(BATCHES))
def test_jumping_stepping_and_the_emulator_agree_on_random_cases(batch: int) -> None:
    for seed in range(batch, CASES, BATCHES):
        case = make_case(seed)
        expected = emulated(case)
        assert_same(simulated(case, shortcut=False), expected, seed)
        assert_same(simulated(case, shortcut=True), expected, seed)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_prefix_cache_keeps_and_evicts_what_the_emulators_does(batch: int) -> None:
    for seed in range(batch, CACHE_CASES, BATCHES):
        case = with_hash_ids(make_case(seed), seed)
        expected = emulated(case)
        for found in (simulated(case, shortcut=False), simulated(case, shortcut=True)):
            assert_same(found, expected, seed)
            assert found.hits == expected.hits, seed


def test_the_random_cases_hold_hits_and_misses_of_prefixes() -> None:
    cases = [with_hash_ids(make_case(seed), seed) for seed in range(100)]
    hits = sum(sum(simulated(case, shortcut=True).hits) for case in cases)
    prompts = sum(int(case.requests["prompt"].sum()) for case in cases)
    assert 0.1 < hits / prompts < 0.9


def test_jumping_and_stepping_agree_where_held_and_pooled_reservations_mix() -> None:
    for seed in range(1000):
        case = make_mixed_case(seed)
        assert_same(simulated(case, shortcut=True), simulated(case, shortcut=False), seed)


def test_the_random_cases_hold_preemptions_waiting_and_every_form() -> None:
    happened = [(case, simulated(case, shortcut=True)) for case in map(make_case, range(200))]
    assert sum(sum(found.preemptions) for _, found in happened) > 200
    waited = [found.admitted > case.requests["arrival"] + 5 for case, found in happened]
    assert sum(sum(item) for item in waited) > 200
    assert {int(form) for case, _ in happened for form in case.requests["form"]} == {0, 1, 2}


def test_shared_blocks_neither_take_memory_nor_time() -> None:
    for seed in range(300):
        case = make_case(seed)
        if case.replica.step_time.gamma or case.policy.watermark:
            continue  # attention to what is shared takes time, and a watermark is a share of the larger pool
        expected, shared = emulated(case), with_shared_blocks(case, seed)
        assert_same(simulated(shared, shortcut=False), expected, seed)
        assert_same(simulated(shared, shortcut=True), expected, seed)
