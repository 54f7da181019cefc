"""Waits double up to a cap and start over after a healthy while."""

from __future__ import annotations

import random

import pytest

from kvantile_optimizer.local.backoff import Backoff


def test_waits_double_up_to_the_cap_with_jitter() -> None:
    backoff = Backoff(rng=random.Random(1), first_s=1.0, cap_s=8.0)
    for full_s in (1.0, 2.0, 4.0, 8.0, 8.0):
        assert full_s / 2 <= backoff.next_wait_s(ran_s=0.1) <= full_s


def test_a_healthy_run_starts_over() -> None:
    backoff = Backoff(rng=random.Random(1), first_s=1.0, cap_s=8.0, healthy_s=30.0)
    for _ in range(5):
        backoff.next_wait_s(ran_s=0.1)
    assert backoff.next_wait_s(ran_s=31.0) <= 1.0


@pytest.mark.parametrize("failures", [1, 100, 5000])
def test_any_number_of_failures_has_a_wait(failures: int) -> None:
    backoff = Backoff()
    assert max(backoff.next_wait_s(0.0) for _ in range(failures)) <= backoff.cap_s
