"""Classes from descriptions, traces and observations, against closed forms and counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvantile_optimizer import traces, workload
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.observation import ClassObservation, length_bucket
from kvantile_optimizer.spec import RequestClass
from kvantile_optimizer.traces import Trace
from kvantile_optimizer.workload import Lengths, Workload
from tests.support.specs import make_class, make_serving_plan


def make_request_class(**overrides: object) -> RequestClass:
    return RequestClass.model_validate(make_class(**overrides))  # type: ignore[arg-type] # passed through as given


def make_trace(prompt: list[int], output: list[int], cut: list[int] | None = None, every_s: float = 1.0) -> Trace:
    count = len(prompt)
    empty = np.full(count, "", np.str_)
    return Trace(
        np.arange(count, dtype=np.float64) * every_s,
        np.array(prompt, np.int64),
        np.array(output, np.int64),
        np.isin(np.arange(count), cut or []),
        empty,
        empty,
        np.zeros(count, np.int64),
    )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(0, 60))
def test_cdf_quantile_and_excess_equal_plain_counts(tokens: list[int], at: int) -> None:
    lengths = Lengths.of(tokens, np.ones(len(tokens)), 60)
    assert lengths.cdf(at) == pytest.approx(np.mean(np.array(tokens) <= at))
    assert lengths.excess([at]) == pytest.approx([np.mean(np.maximum(np.array(tokens) - at, 0))])
    assert lengths.mean == pytest.approx(np.mean(tokens))
    assert lengths.std == pytest.approx(np.std(tokens))
    for percent in (10, 50, 90, 100):
        assert lengths.quantile(percent / 100) == np.percentile(tokens, percent, method="inverted_cdf")


def test_the_quantile_takes_the_lower_end() -> None:
    assert Lengths.of(np.arange(1, 11), np.full(10, 0.1), 10).quantile(0.9) == 9


def test_mean_and_p99_are_a_log_normal() -> None:
    made = workload.of_class(make_request_class(prompt={"mean": 1200, "p99": 4100}), 100_000)
    assert made.expect(made.prompt) == pytest.approx(1200, rel=0.02)
    assert Lengths.of(made.prompt, made.weight, 1e9).quantile(0.99) == pytest.approx(4100, rel=0.025)
    logs = np.log(made.prompt)
    assert made.expect((logs - made.expect(logs)) ** 3) == pytest.approx(0, abs=0.02)  # no skew


def test_percentiles_are_joined_linearly_from_one_token_to_max() -> None:
    made = workload.of_class(make_request_class(output={"p50": 101, "max": 1001}), 100_000)
    assert made.upper == 1001
    assert made.lengths.mean == pytest.approx((1 + 101) / 4 + (101 + 1001) / 4, rel=1e-3)
    for probability, tokens in ((0.25, 51), (0.5, 101), (0.75, 551)):
        assert made.lengths.quantile(probability) == pytest.approx(tokens, abs=11)


def test_described_prompt_and_output_are_independent_and_few() -> None:
    made = workload.of_class(make_request_class(), 100_000)
    assert len(made.weight) <= 10_000
    assert made.weight.sum() == pytest.approx(1)
    product = made.expect(made.prompt * made.output)
    assert product == pytest.approx(made.expect(made.prompt) * made.expect(made.output))
    assert made.samples == made.lengths.samples == 0


def test_the_same_description_gives_the_same_numbers() -> None:
    first, second = (workload.of_class(make_request_class(), 8192) for _ in range(2))
    assert np.array_equal(first.output, second.output)
    assert np.array_equal(first.weight, second.weight)


def test_a_class_carries_its_rate_burstiness_and_prefix() -> None:
    spec = make_class(rate=12.5, burstiness=2.5, sharedPrefix={"tokens": 600, "share": "0.8"})
    made = workload.of_class(RequestClass.model_validate(spec), 8192)
    assert (made.requests_per_second, made.burstiness) == (12.5, 2.5)
    assert (made.prefix_tokens, made.prefix_share) == (600, 0.8)


def test_a_mean_too_far_from_p99_is_refused_with_the_limit() -> None:
    plan = make_serving_plan(classes=[make_class(prompt={"mean": 10, "p99": 1000})])
    with pytest.raises(InputError) as caught:
        workload.of_plan(plan, {})
    assert str(caught.value) == (
        "spec.classes[0].demand.promptTokens: found p99 1000 with mean 10, allowed p99 at most 149 for a log-normal"
    )


def test_answers_are_cut_to_what_the_model_holds_and_counted() -> None:
    made = workload.of_trace("a", make_trace([900, 500, 1000, 2000], [50, 600, 10, 7]), 1000)
    assert made.prompt.tolist() == [900, 500]
    assert made.output.tolist() == [50, 500]
    assert made.too_long_share == 0.5
    assert made.cut_share == 0.5
    assert made.upper == 500
    assert len(made.warnings) == 2


def test_a_trace_of_prompts_that_never_fit_is_refused() -> None:
    with pytest.raises(InputError, match="class a: found prompts of 2000 tokens and more, allowed some under 1000"):
        workload.of_trace("a", make_trace([2000], [5]), 1000)


def test_a_trace_keeps_prompt_and_output_together_and_gives_the_rate() -> None:
    made = workload.of_trace("a", make_trace([10, 20, 30], [100, 200, 300], every_s=0.5), 4096)
    assert made.expect(made.prompt * made.output) == pytest.approx(np.mean([1000, 4000, 9000]))
    assert (made.requests_per_second, made.burstiness) == (2, 0)
    assert made.samples == 3


def test_a_trace_without_times_needs_a_rate() -> None:
    trace = make_trace([10, 20], [1, 2], every_s=float("nan"))
    with pytest.raises(InputError, match="without arrival times"):
        workload.of_trace("a", trace, 4096)
    assert workload.of_trace("a", trace, 4096, requests_per_second=3).requests_per_second == 3


def test_censored_answers_hand_their_weight_to_longer_ones() -> None:
    # Textbook: deaths at 1, 3 and 4, censored at 2 and 4, so S falls to 4/5, 8/15 and 4/15.
    tokens, weights = workload.kaplan_meier(
        np.array([1.0, 2, 3, 4, 4]), np.ones(5), np.array([False, True, False, False, True]), np.full(5, 9.0)
    )
    assert weights == pytest.approx([1 / 5, 0, 4 / 15, 4 / 15, 4 / 15])
    assert tokens.tolist() == [1, 2, 3, 4, 9]


def test_answers_that_were_all_cut_off_reach_the_limit() -> None:
    made = workload.of_trace("a", make_trace([10, 20], [5, 7], cut=[0, 1]), 100)
    assert sorted(made.output.tolist()) == [80, 90]
    assert made.lengths.mean == 85


def test_recorded_lengths_come_from_the_config_map_of_the_plans_namespace() -> None:
    demand = {"requestsPerSecond": "5", "samples": {"configMapRef": {"name": "lengths", "key": "trace.csv"}}}
    plan = make_serving_plan(classes=[make_class() | {"demand": demand}])
    text = "prompt_tokens,output_tokens\n10,100\n20,300\n"
    (made,) = workload.of_plan(plan, {("default", "lengths", "trace.csv"): text})
    assert (made.lengths.mean, made.requests_per_second, made.burstiness) == (200, 5, 1)
    with pytest.raises(InputError) as caught:
        workload.of_plan(plan, {("other", "lengths", "trace.csv"): text})
    assert str(caught.value) == (
        "spec.classes[0].demand.samples.configMapRef: found default/lengths/trace.csv, "
        "allowed a ConfigMap in the file (other/lengths/trace.csv)"
    )
    with pytest.raises(InputError, match="configMapRef: found nothing, allowed a trace"):
        workload.of_plan(plan, {("default", "lengths", "trace.csv"): ""})
    with pytest.raises(InputError, match="configMapRef:2: output_tokens: found "):
        workload.of_plan(plan, {("default", "lengths", "trace.csv"): text.replace("100", "x")})


def make_prior() -> Workload:
    return workload.of_class(make_request_class(rate=4.0, burstiness=2.0), 8192)


def seen_like(rng: np.random.Generator, mean: float, count: int, **fields: object) -> ClassObservation:
    buckets, counts = np.unique([length_bucket(int(n) + 1) for n in rng.exponential(mean, count)], return_counts=True)
    return ClassObservation.model_validate(
        {
            "requests": count,
            "finished": dict(zip(buckets.tolist(), counts.tolist(), strict=True)),
            "prompts": {100: count // 2, 300: count - count // 2},
            **fields,
        }
    )


def test_what_was_seen_replaces_the_prior() -> None:
    seen = seen_like(
        np.random.default_rng(0), 80, 5000, arrival_seconds_sum=1000.0, arrival_seconds_squared_sum=1000.0**2 / 4999 * 5
    )
    made = workload.of_observation("chat", seen, make_prior(), 1000)
    assert made.requests_per_second == 5
    assert made.burstiness == pytest.approx(2)
    assert made.lengths.mean == pytest.approx(80.5, rel=0.05)
    assert made.expect(made.prompt) == pytest.approx(200)
    assert made.samples == 5000
    assert made.upper == make_prior().upper


def test_too_little_seen_changes_the_rate_alone() -> None:
    prior = make_prior()
    made = workload.of_observation("chat", seen_like(np.random.default_rng(0), 80, 20), prior, 10)
    assert made.requests_per_second == 2
    assert made.burstiness == 2
    assert np.array_equal(made.output, prior.output)


def test_a_class_that_got_nothing_keeps_a_rate_above_zero() -> None:
    assert workload.of_observation("chat", ClassObservation(), make_prior(), 100).requests_per_second == 0.01


def test_answers_cut_off_at_the_gateway_count_as_longer() -> None:
    rng = np.random.default_rng(1)
    whole = workload.of_observation("chat", seen_like(rng, 80, 1000), make_prior(), 1000)
    cut = workload.of_observation("chat", seen_like(rng, 80, 1000, censored={64: 300}), make_prior(), 1000)
    assert cut.lengths.mean > whole.lengths.mean * 0.95
    assert cut.samples == 1300


def lengths_like(rng: np.random.Generator, mean: float, count: int) -> Lengths:
    return Lengths.of(np.ceil(rng.exponential(mean, count)) + 1, np.ones(count), 10_000, count)


def test_the_same_traffic_is_no_drift_and_other_traffic_is_one() -> None:
    rng = np.random.default_rng(2)
    old = lengths_like(rng, 200, 5000)
    assert not workload.shifted(old, lengths_like(rng, 200, 5000))
    drift = workload.shifted(old, lengths_like(rng, 260, 5000))
    assert drift
    assert drift.relative_distance == pytest.approx(0.3, abs=0.05)


def test_a_certain_but_small_difference_is_no_drift() -> None:
    rng = np.random.default_rng(3)
    drift = workload.shifted(lengths_like(rng, 200, 200_000), lengths_like(rng, 206, 200_000))
    assert drift.p_value < workload.DRIFT_P_VALUE
    assert not drift


def test_a_hundred_answers_are_needed_for_a_drift() -> None:
    rng = np.random.default_rng(4)
    old = lengths_like(rng, 200, 5000)
    assert not workload.shifted(old, lengths_like(rng, 2000, 99))
    assert workload.shifted(old, lengths_like(rng, 2000, 100))


def test_traffic_as_described_is_no_drift() -> None:
    prior, rng = make_prior(), np.random.default_rng(5)
    drawn = rng.choice(prior.output, 2000, p=prior.weight)
    grid = [length_bucket(int(tokens)) for tokens in drawn]
    assert not workload.shifted(prior.lengths, Lengths.of(grid, np.ones(2000), prior.upper, 2000))


def test_the_bundled_trace_makes_workloads() -> None:
    trace = traces.bundled()
    made = workload.of_trace("conv", trace.only(trace.labels == "azure-conversation"), 16_384)
    assert made.lengths.mean == pytest.approx(trace.output[trace.labels == "azure-conversation"].mean())
    assert made.requests_per_second == pytest.approx(4.885, rel=1e-3)
