"""What is made up has the rate, the lengths and the bursts of what it stands for."""

from __future__ import annotations

import numpy as np
import pytest

from kvantile_optimizer.rehearsal.requests import Stream, draw, synthesise
from kvantile_optimizer.simulator.replica import Requests
from kvantile_optimizer.simulator.state import Ints
from tests.support.plans import make_class, make_plan, make_route
from tests.unit.rehearsal.cases import make_bursty_plan, make_record, make_workload


def dispersion(arrival_s: np.ndarray, window_s: float) -> float:
    """Variance over mean of the counts in windows: 1 for a Poisson process."""
    counts = np.bincount((arrival_s / window_s).astype(int))[:-1]
    return float(counts.var() / counts.mean())


def test_the_same_seed_gives_the_same_requests_and_another_one_others() -> None:
    streams = [Stream(make_workload()), Stream(make_workload("code", record=make_record()))]
    first, again, other = (draw(streams, seed, 2_000) for seed in (1, 1, 2))
    assert np.array_equal(first[0].arrival_s, again[0].arrival_s)
    assert np.array_equal(first[0].output, again[0].output)
    assert not np.array_equal(first[0].arrival_s, other[0].arrival_s)


def test_each_class_comes_at_its_rate_with_its_lengths() -> None:
    chat, code = make_workload(rate=6.0), make_workload("code", rate=2.0, output=np.full(2000, 9.0))
    requests, places = draw([Stream(chat), Stream(code)], 1, 8_000)
    assert np.bincount(places).tolist() == [6_000, 2_000]
    assert requests.arrival_s[-1] == pytest.approx(1_000)
    assert (np.diff(requests.arrival_s) >= 0).all()
    assert requests.output[places == 1].tolist() == [9] * 2_000
    mine = places == 0
    assert requests.output[mine].mean() == pytest.approx(chat.expect(chat.output), rel=1e-3)
    joint = float((requests.prompt[mine] * requests.output[mine]).mean())
    assert joint == pytest.approx(chat.expect(chat.prompt * chat.output), rel=1e-3)


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 1.0, 4.0])
def test_gaps_have_the_burstiness_of_the_class(burstiness: float) -> None:
    requests, _ = draw([Stream(make_workload(burstiness=burstiness))], 1, 20_000)
    gaps = np.diff(requests.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.1, abs=2e-3)


def test_a_thinned_class_is_like_one_whose_requests_are_taken_by_chance() -> None:
    requests, _ = draw([Stream(make_workload(burstiness=4.0), share=0.25)], 1, 20_000)
    gaps = np.diff(requests.arrival_s)
    # A geometric sum of gaps: the squared variation is 1 + share * (cv^2 - 1).
    assert gaps.std() / gaps.mean() == pytest.approx((1 + 0.25 * 15) ** 0.5, rel=0.1)
    assert requests.arrival_s[-1] == pytest.approx(20_000 / 2)


def test_a_recorded_class_keeps_its_bursts_and_each_row_of_its_record() -> None:
    record = make_record(prompt=1.0 + np.arange(6_000))
    recorded, _ = draw([Stream(make_workload(rate=20.0, burstiness=1.0, record=record))], 1, 6_000)
    described, _ = draw([Stream(make_workload(rate=20.0, burstiness=1.0))], 1, 6_000)
    assert dispersion(recorded.arrival_s, 10.0) > 20 * dispersion(described.arrival_s, 10.0)
    assert sorted(recorded.prompt) == list(range(1, 6_001))
    assert record.prompt is not None
    assert np.array_equal(recorded.output, record.tokens[recorded.prompt - 1].astype(int))


def bursts_in_common(requests: Requests, places: Ints, window_s: float = 100.0) -> float:
    """Correlation of the counts of the first two streams in windows."""
    ends = int(requests.arrival_s[-1] / window_s)
    counts = [np.bincount((requests.arrival_s[places == place] / window_s).astype(int))[:ends] for place in (0, 1)]
    return float(np.asarray(np.corrcoef(counts))[0, 1])


def test_classes_that_were_recorded_together_burst_together() -> None:
    whole = make_record()
    assert whole.arrival_s is not None
    half = np.arange(len(whole)) % 2 == 0
    first, second = (
        make_record(3_000, arrival_s=whole.arrival_s[mine], tokens=whole.tokens[mine]) for mine in (half, ~half)
    )
    later = make_record(3_000, arrival_s=1e6 + whole.arrival_s[~half])
    chat = Stream(make_workload(rate=0.5, record=first))
    for rate, share in ((0.5, 1.0), (0.1, 1.0), (0.5, 0.3)):
        code = Stream(make_workload("code", rate=rate, record=second), share=share)
        requests, places = draw([chat, code], 1, 12_000)
        assert bursts_in_common(requests, places) > 0.8
        assert np.bincount(places)[1] == round(12_000 * code.per_second / (chat.per_second + code.per_second))
    apart = draw([chat, Stream(make_workload("code", rate=0.5, record=later))], 1, 12_000)
    assert bursts_in_common(*apart) < 0.5


def test_answers_that_were_cut_off_go_on_as_others_did() -> None:
    tokens = np.tile([50.0, 200.0, 300.0, 400.0], 100)
    record = make_record(400, tokens=tokens, censored=tokens == 200.0)
    requests, _ = draw([Stream(make_workload(record=record))], 1, 4_000)
    assert set(requests.output) == {50, 300, 400}
    assert np.count_nonzero(requests.output == 50) == 1_000


def test_rows_of_one_tick_are_spread_over_it() -> None:
    record = make_record(300, arrival_s=np.repeat(np.arange(100) * 3.0, 3))
    requests, _ = draw([Stream(make_workload(rate=1.0, burstiness=1.0, record=record))], 1, 300)
    assert np.diff(requests.arrival_s).max() == pytest.approx(1.0, rel=0.05)


def test_a_resident_prefix_is_cached_for_those_who_carry_it() -> None:
    names = {"class": "chat", "group": "g", "tokens": 30}
    plan = make_plan(classes=[make_class()], routes=[make_route()], residentPrefixes=[names])
    workload = make_workload(prefix_tokens=30, prefix_share=0.25)
    requests, _ = synthesise(plan, [workload], 1, 4_000)
    cached = np.asarray(requests.cached)
    assert (cached > 0).mean() == pytest.approx(0.25, abs=0.03)
    assert cached.max() == 30
    bare, _ = synthesise(make_bursty_plan(), [workload], 1, 4_000)
    assert not np.asarray(bare.cached).any()
