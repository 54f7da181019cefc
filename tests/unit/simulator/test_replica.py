"""One simulated replica, and several that share requests by load: by hand and by property."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvantile_optimizer.errors import InputError
from kvantile_optimizer.plan import StepTime
from kvantile_optimizer.simulator.replica import GATES, Policy, ReplicaSpec, Requests, simulate_replica

STEP = StepTime(alpha=0.01, beta=1e-4, gamma=1e-7, delta=1e-4)


def make_requests(
    count: int = 400, *, per_second: float = 2.0, prompt: int = 200, output: int = 100, seed: int = 0
) -> Requests:
    rng = np.random.default_rng(seed)
    return Requests(
        arrival_s=np.cumsum(rng.exponential(1 / per_second, count)),
        prompt=rng.integers(1, 2 * prompt, count),
        output=rng.integers(1, 2 * output, count),
        ttft_s=2.0,
    )


def make_replica(kv_tokens: int = 8192) -> ReplicaSpec:
    return ReplicaSpec(kv_tokens, STEP, max_num_seqs=64)


def test_a_lone_request_takes_its_prefill_and_a_step_for_each_further_token() -> None:
    alone = Requests(np.array([5.0]), np.array([100]), np.array([4]))
    found = simulate_replica(alone, make_replica(), Policy())
    assert found.admitted_s.tolist() == [5.0]
    assert found.ttft_s[0] == pytest.approx(0.01 + 100 * 1e-4)
    # Three steps that attend to 101, 102 and 103 tokens.
    assert found.e2e_s[0] == pytest.approx(0.02 + 3 * 0.01 + 3 * 1e-4 + 306 * 1e-7)
    assert found.tpot_s[0] == pytest.approx((3 * 0.01 + 3 * 1e-4 + 306 * 1e-7) / 3)


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    alone = Requests(np.array([0.0]), np.array([5000]), np.array([1]))
    found = simulate_replica(alone, make_replica(), Policy())
    assert found.ttft_s[0] == pytest.approx(3 * 0.01 + 5000 * 1e-4)
    assert math.isnan(found.tpot_s[0])


def test_cached_tokens_cost_no_time_but_the_last_one_of_a_prompt_is_always_computed() -> None:
    alone = Requests(np.array([0.0]), np.array([160]), np.array([1]), cached=160)
    assert simulate_replica(alone, make_replica(), Policy()).ttft_s[0] == pytest.approx(0.01 + 16 * 1e-4)


@pytest.mark.parametrize("order", ["fcfs", "deadline", "slack"])
def test_overload_makes_the_queue_grow_without_bound(order: str) -> None:
    waits = []
    for count in (2000, 4000, 8000):
        requests = make_requests(count, per_second=60.0)
        found = simulate_replica(requests, make_replica(), Policy(order=order))  # type: ignore[arg-type]
        late = found.ttft_s[-count // 10 :] if order == "fcfs" else found.ttft_s
        waits.append(float(np.nanmax(late)))
    assert waits[1] > 1.7 * waits[0]
    assert waits[2] > 1.7 * waits[1]


def test_below_capacity_more_requests_wait_no_longer() -> None:
    short, long = (
        np.mean(simulate_replica(make_requests(count, per_second=5.0), make_replica(), Policy()).ttft_s)
        for count in (2000, 8000)
    )
    assert long == pytest.approx(short, rel=0.1)


def test_a_request_that_no_pool_could_hold_is_refused_and_disturbs_nobody() -> None:
    requests = Requests(np.array([0.0, 0.0]), np.array([10_000, 100]), np.array([4, 4]))
    found = simulate_replica(requests, make_replica(), Policy())
    assert found.served.tolist() == [False, True]
    assert found.replica.tolist() == [-1, 0]
    assert found.ttft_s[1] == pytest.approx(0.02)


def test_reservations_as_large_as_the_answers_never_preempt() -> None:
    requests = make_requests(per_second=30.0, output=300)
    assert simulate_replica(requests, make_replica(), Policy()).preemptions.sum() > 50
    oracle = simulate_replica(requests, make_replica(), Policy("held", requests.output))
    assert oracle.preemptions.sum() == 0
    assert oracle.recomputed_tokens == 0


def test_all_work_is_done_once_and_lost_work_again() -> None:
    requests = make_requests(per_second=30.0, output=300)
    found = simulate_replica(requests, make_replica(), Policy())
    once = int((requests.prompt + requests.output - 1).sum())
    assert found.computed_tokens == once + found.recomputed_tokens
    assert found.kv_seconds.sum() == pytest.approx(found.busy_s.sum())


@pytest.mark.parametrize("gate", sorted(GATES))
def test_every_gate_serves_all_and_the_shortcut_changes_nothing(gate: str) -> None:
    requests = make_requests(per_second=30.0, output=300)
    policy = Policy(gate=gate, history=np.arange(1, 600))
    found = simulate_replica(requests, make_replica(), policy)
    stepped = simulate_replica(requests, make_replica(), policy, shortcut=False)
    assert found.served.all()
    assert found.preemptions.tolist() == stepped.preemptions.tolist()
    assert found.last_s == pytest.approx(stepped.last_s, rel=1e-9)


def test_looking_ahead_preempts_less_than_stock() -> None:
    requests = make_requests(per_second=30.0, output=300)

    def preemptions(gate: str) -> int:
        policy = Policy(gate=gate, history=np.arange(1, 600))
        return int(simulate_replica(requests, make_replica(), policy).preemptions.sum())

    assert preemptions("past-future") < preemptions("reservation") / 2
    assert preemptions("new-token-ratio") < preemptions("reservation")


def test_replicas_share_requests_evenly_and_the_same_seed_gives_the_same_replay() -> None:
    requests = make_requests(2000, per_second=20.0)
    found, again, other = (simulate_replica(requests, make_replica(), Policy(), replicas=4, seed=s) for s in (1, 1, 2))
    assert np.bincount(found.replica).min() > 400
    assert found.last_s.tolist() == again.last_s.tolist()
    assert found.replica.tolist() != other.replica.tolist()


def test_two_requests_at_once_go_to_two_replicas() -> None:
    pair = Requests(np.zeros(2), np.array([100, 100]), np.array([5, 5]))
    found = simulate_replica(pair, make_replica(), Policy(), replicas=2)
    assert sorted(found.replica.tolist()) == [0, 1]
    assert found.ttft_s.tolist() == [pytest.approx(0.02)] * 2


def test_load_falls_when_an_answer_ends_and_not_before() -> None:
    arrivals = np.array([0.0, 0.0, 0.5])
    requests = Requests(arrivals, np.array([100, 50, 10]), np.array([2, 200, 1]))
    found = simulate_replica(requests, make_replica(), Policy(), replicas=2)
    assert found.replica[2] == found.replica[0] != found.replica[1]


@pytest.mark.parametrize(
    ("arrival_s", "prompt"), [([0.0, -1.0], [1, 1]), ([0.0, math.nan], [1, 1]), ([0.0, 1.0], [1, 0]), ([], [])]
)
def test_what_no_replay_can_take_is_refused(arrival_s: list[float], prompt: list[int]) -> None:
    requests = Requests(np.array(arrival_s), np.array(prompt, np.int64), np.ones(len(prompt), np.int64))
    with pytest.raises(InputError, match="found"):
        simulate_replica(requests, make_replica(), Policy())
