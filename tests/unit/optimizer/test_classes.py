"""Classes fitted on traffic that was made up of known parts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvantile_optimizer import classes, traces, workload
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.traces import Trace


def make_trace(rows: list[tuple[float, int, int, str]]) -> Trace:
    lines = "".join(f"{when},{prompt},{output},{label}\n" for when, prompt, output, label in rows)
    return traces.parse(f"arrival_s,prompt_tokens,output_tokens,class\n{lines}", "made up")


def test_a_label_is_a_class_and_the_largest_is_the_default() -> None:
    rows = [(float(n), 100, 10, "GPT-4/API log" if n % 3 else "Chat") for n in range(31)]
    api, chat = sorted(classes.by_label([("x", make_trace(rows))]), key=lambda item: -item.requests)
    assert (api.request_class.name, chat.request_class.name) == ("gpt-4-api-log", "chat")
    assert api.request_class.default
    assert not chat.request_class.default
    assert float(api.request_class.demand.requests_per_second) == pytest.approx(20 / 30, rel=1e-3)


def test_requests_without_a_label_are_named_after_their_file() -> None:
    sources = [("Azure_code", make_trace([(0, 5, 5, ""), (1, 5, 5, "")])), ("b", make_trace([(0, 5, 5, "")]))]
    assert [item.request_class.name for item in classes.by_label(sources)] == ["azure-code", "b"]


def test_traces_of_one_label_count_as_recorded_one_after_another() -> None:
    first = make_trace([(float(n), 100, 10, "a") for n in range(101)])
    second = make_trace([(n / 4, 100, 30, "a") for n in range(401)])
    (found,) = classes.by_label([("x", first), ("y", second)])
    assert found.requests == 502
    assert float(found.request_class.demand.requests_per_second) == pytest.approx(502 / 200, rel=1e-3)


def test_labels_that_read_alike_are_one_class_recorded_once() -> None:
    (found,) = classes.by_label(
        [("x", make_trace([(float(n), 100, 10, "A b" if n % 2 else "a-b") for n in range(101)]))]
    )
    assert (found.request_class.name, found.requests) == ("a-b", 101)
    assert float(found.request_class.demand.requests_per_second) == pytest.approx(101 / 100, rel=1e-3)
    assert float(found.request_class.demand.burstiness) == 0


def test_a_rate_beyond_every_quantity_is_the_largest_one() -> None:
    (found,) = classes.by_label([("x", make_trace([(n * 1e-300, 100, 10, "a") for n in range(3)]))])
    assert found.request_class.demand.requests_per_second == "999999999"


def test_no_times_and_few_intervals_leave_the_defaults() -> None:
    trace = traces.parse("num_prefill_tokens,num_decode_tokens\n5,6\n7,8\n", "s")
    (found,) = classes.by_label([("s", trace)])
    assert not found.has_arrivals
    assert (found.request_class.demand.requests_per_second, found.request_class.demand.burstiness) == ("1", "1")


def test_fitted_percentiles_are_those_of_the_trace_and_give_its_mean_back() -> None:
    trace = traces.bundled()
    part = trace.only(trace.labels == "burstgpt")
    (found,) = classes.by_label([("x", part)])
    lengths = found.request_class.demand.output_tokens
    assert lengths is not None
    assert lengths.p90 == np.percentile(part.output, 90, method="inverted_cdf")
    assert lengths.max == part.output.max()
    made = workload.of_class(found.request_class, 100_000)
    assert made.lengths.mean == pytest.approx(part.output.mean(), rel=0.05)
    assert made.burstiness == pytest.approx(part.arrivals().burstiness, rel=1e-3)


def test_answers_that_were_cut_off_raise_the_percentiles() -> None:
    line = '{"usage": {"prompt_tokens": 9, "completion_tokens": %d}, "choices": [{"finish_reason": "%s"}]}'
    lines = [line % (n, "length" if n == 10 else "stop") for n in [5] * 50 + [10] * 40 + [100] * 10]
    (found,) = classes.by_label([("x", traces.parse("\n".join(lines), "log"))])
    lengths = found.request_class.demand.output_tokens
    assert found.censored == 40
    assert lengths is not None
    assert (lengths.p25, lengths.p75) == (5, 100)


def test_prompt_classes_find_the_cut_that_tells_answers_apart() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, 1000, 3000)
    output = np.where(prompt <= 300, rng.integers(10, 20, 3000), rng.integers(500, 600, 3000))
    assert classes.cuts(prompt, output, 2) == pytest.approx([300], abs=16)
    rows = [(float(n), int(p), int(o), "") for n, (p, o) in enumerate(zip(prompt, output, strict=True))]
    short, long = classes.by_prompt([("x", make_trace(rows))], 2)
    assert short.requests + long.requests == 3000
    assert long.request_class.default
    (bounds,) = [match.prompt_tokens for match in short.request_class.match]
    assert bounds is not None
    assert short.request_class.name == f"prompt-to-{bounds.lte}"
    assert long.request_class.name == f"prompt-over-{bounds.lte}"


@pytest.mark.parametrize("count", [2, 3, 4])
def test_cuts_are_the_best_of_all(count: int) -> None:
    rng = np.random.default_rng(count)
    prompt, output = rng.integers(1, 9, 200), rng.integers(1, 100, 200)

    def spread(ends: tuple[int, ...]) -> float:
        groups = np.searchsorted(ends, prompt)
        return sum(float(np.var(np.log(output[groups == g])) * np.sum(groups == g)) for g in range(count))

    best = min(itertools.combinations(range(1, 8), count - 1), key=spread)
    assert classes.cuts(prompt, output, count) == list(best)


def test_one_class_by_prompt_takes_everything() -> None:
    (found,) = classes.by_prompt([("x", make_trace([(0, 5, 5, "a"), (1, 6, 6, "b")]))], 1)
    assert found.requests == 2
    assert found.request_class.default
    assert not found.request_class.match


def test_more_classes_than_prompts_are_refused() -> None:
    with pytest.raises(InputError, match="--classes: found 3, allowed at most 2"):
        classes.by_prompt([("x", make_trace([(0, 5, 5, ""), (1, 6, 6, "")]))], 3)


@pytest.mark.parametrize(
    ("label", "name"), [("ChatGPT/Conversation log", "chatgpt-conversation-log"), ("é", "requests"), ("-A_b-", "a-b")]
)
def test_labels_become_names_that_kubernetes_takes(label: str, name: str) -> None:
    assert classes.class_name(label) == name
