"""The closed forms of a loaded replica: limits that are known, and directions."""

from __future__ import annotations

import numpy as np
import pytest

from kvantile_optimizer import load, workload
from kvantile_optimizer.load import Moments
from kvantile_optimizer.plan import StepTime
from kvantile_optimizer.workload import Workload
from tests.support.specs import make_serving_plan

STEP = StepTime(alpha=0.02, beta=1e-4, gamma=1e-7, delta=1e-4)


def chat() -> Workload:
    return workload.of_plan(make_serving_plan(), {})[0]


def at(utilisation: float, mix: Moments, replicas: float = 1.0) -> load.LoadedReplica:
    return load.loaded(STEP, mix, np.array([utilisation]), 99, 2048, replicas)


def test_an_idle_replica_takes_the_fixed_step_time() -> None:
    mix = load.moments(chat(), 99)
    lone = at(1e-6, mix)
    assert lone.tpot_mean[0] == pytest.approx(STEP.alpha + STEP.beta + STEP.gamma * mix.context, rel=1e-3)
    assert lone.kv_mean[0] == pytest.approx(0.0, abs=1.0)


def test_little_s_law_ties_rate_batch_and_time() -> None:
    mix = load.moments(chat(), 99)
    state = at(0.5, mix)
    assert state.rate[0] * load.engine_seconds(STEP, mix) == pytest.approx(0.5)
    batch = state.rate[0] * mix.steps * state.tpot_mean[0]
    assert state.kv_mean[0] == pytest.approx(batch * mix.context, rel=0.15)


def test_everything_grows_with_the_load() -> None:
    mix = load.moments(chat(), 99)
    state = load.loaded(STEP, mix, load.UTILISATIONS, 99, 2048, 2.0)
    for figure in (state.tpot_mean, state.tpot_p, state.ttft_p, state.kv_mean, state.kv_p):
        assert np.all(np.diff(figure[np.isfinite(figure)]) >= -1e-9)
    assert np.all(state.tail_margin >= 1.0)


def test_more_replicas_smooth_bursts() -> None:
    mix = load.moments(chat(), 99)
    bursty = load.mixed([(1.0, mix)])
    bursty = Moments(**{name: getattr(bursty, name) for name in Moments.__slots__} | {"burstiness_squared": 25.0})
    assert at(0.5, bursty, 8.0).ttft_p[0] < at(0.5, bursty, 1.0).ttft_p[0]


def test_capacity_falls_with_each_target() -> None:
    mix = load.moments(chat(), 99)

    def limit(ttft_s: float, tpot_s: float) -> float:
        return load.capacity(STEP, mix, ttft_s, tpot_s, 99, 2048, 2.0).utilisation

    assert limit(3.0, 0.1) > limit(3.0, 0.05) > limit(3.0, 0.025)
    assert limit(3.0, 0.1) > limit(0.6, 0.1)
    assert limit(3.0, 0.02) == limit(0.001, 0.1) == 0.0


def test_a_gamma_tail_is_consistent_with_its_own_percentile() -> None:
    assert load.exceeds(100.0, 180.0, 99, 180.0) == pytest.approx(0.01, rel=1e-3)
    assert load.exceeds(100.0, 180.0, 99, 100.0) == pytest.approx(0.5, abs=0.1)
    assert load.exceeds(0.0, 0.0, 99, 1.0) == 0.0
