"""The emulator's scheduler, step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvantile_engine.emulator.scheduler import Limits, Scheduler, Sequence, State
from kvantile_engine.emulator.steptime import StepTime
from kvantile_optimizer.admission import FORMS, HELD, NONE, POOLED


def make_scheduler(total_blocks: int = 8, block_size: int = 4, **limits: object) -> Scheduler:
    return Scheduler(Limits(total_blocks, block_size, **limits))  # type: ignore[arg-type]  # named by each test


def submit(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.submit(sequence)


def step(scheduler: Scheduler, now: float = 0.0) -> list[Sequence]:
    return scheduler.end(scheduler.begin(now))


def finish(scheduler: Scheduler, most_steps: int = 10_000) -> list[Sequence]:
    """Steps until nothing is left; what finished, in order."""
    done: list[Sequence] = []
    for number in range(most_steps):
        if not scheduler.busy:
            return done
        done += [sequence for sequence in step(scheduler, float(number)) if sequence.state is State.FINISHED]
    raise AssertionError("it does not end")


def test_the_step_of_the_prefill_yields_the_first_token_and_each_further_step_one_more() -> None:
    scheduler, sequence = make_scheduler(), Sequence(prompt=5, output=3)
    submit(scheduler, sequence)
    assert step(scheduler) == [sequence]
    assert (sequence.generated, sequence.computed, sequence.blocks) == (1, 5, 2)
    step(scheduler)
    step(scheduler)
    assert sequence.state is State.FINISHED
    assert scheduler.pool.free == 8


def test_a_long_prompt_is_prefilled_in_chunks_of_what_the_decoding_leave_of_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    first, second = Sequence(prompt=5, output=9), Sequence(prompt=12, output=2)
    submit(scheduler, first, second)
    begun = scheduler.begin(0.0)
    assert [s.scheduled for s in begun.prefilling] == [5, 1]
    assert scheduler.end(begun) == [first]
    begun = scheduler.begin(1.0)
    assert (begun.decoding, begun.prefilling, begun.prefill_tokens) == ([first], [second], 5)
    assert scheduler.end(begun) == [first]
    assert second.blocks == 2
    step(scheduler)
    assert step(scheduler) == [first, second]


def test_no_more_run_than_max_num_seqs() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    first, second = Sequence(prompt=1, output=2), Sequence(prompt=1, output=1)
    submit(scheduler, first, second)
    assert [step(scheduler), step(scheduler), step(scheduler)] == [[first], [first], [second]]


def test_the_last_that_runs_is_preempted_and_that_step_admits_nobody() -> None:
    scheduler = make_scheduler(total_blocks=4)
    first, second, third = (Sequence(prompt=length, output=6) for length in (8, 7, 1))
    submit(scheduler, first, second, third)
    step(scheduler)
    assert scheduler.running == [first, second]
    begun = scheduler.begin(1.0)
    assert begun.preempted == [second]
    assert begun.admitted == []
    assert scheduler.pool.free == 1
    assert third.state is State.WAITING
    scheduler.end(begun)
    assert (second.generated, second.computed, second.preemptions, second.blocks) == (1, 0, 1, 0)


@pytest.mark.parametrize(("caching", "again"), [(False, 8), (True, 4)])
def test_a_preempted_sequence_comes_back_first_and_computes_what_its_blocks_lost(caching: bool, again: int) -> None:
    scheduler = make_scheduler(total_blocks=4, prefix_caching=caching)
    first, second, third = Sequence(prompt=8, output=3), Sequence(prompt=7, output=6), Sequence(prompt=8, output=1)
    submit(scheduler, first, second, third)
    step(scheduler)
    step(scheduler)
    step(scheduler)
    assert first.state is State.FINISHED
    begun = scheduler.begin(3.0)
    assert begun.admitted == [second, third]
    assert [s.scheduled for s in begun.prefilling] == [again, 8]
    scheduler.end(begun)
    assert second.generated == 2
    assert finish(scheduler)[-1].state is State.FINISHED


def test_the_whole_prompt_must_fit_even_when_only_a_chunk_is_computed_at_once() -> None:
    scheduler = make_scheduler(total_blocks=4, max_num_batched_tokens=4)
    small, large = Sequence(prompt=4, output=5), Sequence(prompt=13, output=1)
    submit(scheduler, small, large)
    step(scheduler)
    assert scheduler.running == [small]
    assert len(scheduler.waiting) == 1


def test_held_sets_the_reservation_aside_and_pooled_a_share_of_it() -> None:
    for form, per_mille, fits in ((NONE, 1000, True), (HELD, 1000, False), (POOLED, 1000, False), (POOLED, 250, True)):
        scheduler = make_scheduler(total_blocks=8)
        first, second = (
            Sequence(prompt=4, output=8, form=form, reserve=12, pooling_per_mille=per_mille) for _ in range(2)
        )
        filler = Sequence(prompt=4, output=8)
        submit(scheduler, first, second, filler)
        step(scheduler)
        assert (scheduler.running == [first, second, filler]) == fits, (form, per_mille)


def test_the_first_that_is_not_admitted_keeps_the_others_waiting() -> None:
    scheduler = make_scheduler(total_blocks=4)
    running, large, small = Sequence(prompt=8, output=5), Sequence(prompt=12, output=1), Sequence(prompt=1, output=1)
    submit(scheduler, running, large, small)
    step(scheduler)
    assert scheduler.running == [running]


def test_the_watermark_counts_only_while_something_runs() -> None:
    scheduler = make_scheduler(total_blocks=4, watermark=0.5)
    first, second = Sequence(prompt=12, output=2), Sequence(prompt=1, output=1)
    submit(scheduler, first, second)
    step(scheduler)
    assert scheduler.running == [first]


def test_a_reservation_larger_than_the_pool_is_cut_and_an_empty_engine_never_waits() -> None:
    scheduler = make_scheduler(total_blocks=4)
    sequence = Sequence(prompt=4, output=8, form=HELD, reserve=1000)
    submit(scheduler, sequence)
    assert sequence.reserve == 12
    assert finish(scheduler) == [sequence]


def test_a_reservation_is_cut_to_what_the_client_allows() -> None:
    scheduler, sequence = make_scheduler(), Sequence(prompt=4, output=2, max_tokens=3, form=HELD, reserve=12)
    submit(scheduler, sequence)
    assert sequence.reserve == 3


def test_what_cannot_fit_even_alone_is_refused() -> None:
    scheduler = make_scheduler(total_blocks=4)
    submit(scheduler, Sequence(prompt=10, output=7))
    with pytest.raises(ValueError, match="within 16 tokens"):
        scheduler.submit(Sequence(prompt=10, output=8))
    with pytest.raises(ValueError, match="at least one token"):
        scheduler.submit(Sequence(prompt=0, output=8))


def test_slack_order_serves_who_can_still_be_on_time_and_gives_the_late_their_share() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    late = Sequence(prompt=1, output=1, latest_start=1.0)
    on_time = [Sequence(prompt=1, output=1, arrival=5.0, latest_start=1000.0 - i) for i in range(12)]
    submit(scheduler, late, *on_time)
    served = [step(scheduler, 10.0)[0] for _ in range(13)]
    assert served == [*on_time[::-1][:9], late, *on_time[::-1][9:]]


def test_an_abort_between_the_two_halves_of_a_step_frees_everything() -> None:
    scheduler = make_scheduler()
    first, second = Sequence(prompt=5, output=3), Sequence(prompt=5, output=3)
    submit(scheduler, first, second)
    begun = scheduler.begin(0.0)
    scheduler.abort(first)
    scheduler.abort(first)
    assert scheduler.end(begun) == [second]
    assert scheduler.pool.used == second.blocks
    scheduler.abort(second)
    assert (scheduler.pool.free, scheduler.busy) == (8, False)


def test_equal_prefixes_share_blocks_and_are_computed_once() -> None:
    scheduler = make_scheduler()
    first, second = (Sequence(prompt=10, output=2, hashes=(1, 2)) for _ in range(2))
    submit(scheduler, first)
    step(scheduler)
    submit(scheduler, second)
    begun = scheduler.begin(1.0)
    assert begun.prefill_tokens == 2
    scheduler.end(begun)
    assert second.cached_tokens == 8
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (20, 8)


def test_a_prompt_that_is_cached_as_a_whole_still_computes_its_last_token() -> None:
    scheduler = make_scheduler()
    for expected in (8, 4):
        submit(scheduler, Sequence(prompt=8, output=1, hashes=(1, 2)))
        begun = scheduler.begin(0.0)
        assert begun.prefill_tokens == expected
        scheduler.end(begun)


def test_without_prefix_caching_nothing_is_shared() -> None:
    scheduler = make_scheduler(prefix_caching=False)
    for _ in range(2):
        submit(scheduler, Sequence(prompt=8, output=1, hashes=(1, 2)))
        assert scheduler.begin(0.0).prefill_tokens == 8
        scheduler.abort(scheduler.running[0])


@pytest.mark.parametrize(
    ("prompt", "output", "budget"), [(100, 50, 2048), (100, 1, 2048), (1000, 20, 300), (16, 200, 16)]
)
def test_a_lone_request_takes_what_the_closed_form_says(prompt: int, output: int, budget: int) -> None:
    times = StepTime(alpha=0.01, beta=1e-3, gamma=1e-6, delta=1e-4)
    scheduler = make_scheduler(total_blocks=100, block_size=16, max_num_batched_tokens=budget)
    submit(scheduler, Sequence(prompt=prompt, output=output))
    now, token_times = 0.0, []
    while scheduler.busy:
        begun = scheduler.begin(now)
        now += times.seconds(len(begun.decoding), begun.context_tokens, begun.prefill_tokens)
        token_times += [now] * len(scheduler.end(begun))
    chunks = -(-prompt // budget)
    first = chunks * times.alpha + times.delta * prompt
    rest = (output - 1) * (times.alpha + times.beta + times.gamma * (prompt + output / 2))
    assert abs(token_times[0] - first) < 1e-9
    assert abs(token_times[-1] - first - rest) < 1e-9
    assert len(token_times) == output


SIZE, TOTAL = 4, 12
sequences = st.builds(
    lambda prompt, output, form, reserve, per_mille, latest, hashed: Sequence(
        prompt=prompt,
        output=min(output, TOTAL * SIZE - prompt + 1),
        latest_start=latest,
        form=FORMS[form],
        reserve=reserve,
        pooling_per_mille=per_mille,
        hashes=tuple(range(hashed, hashed + prompt // SIZE)) if hashed else (),
    ),
    prompt=st.integers(1, TOTAL * SIZE),
    output=st.integers(1, 30),
    form=st.sampled_from(sorted(FORMS)),
    reserve=st.integers(0, 60),
    per_mille=st.integers(0, 1000),
    latest=st.none() | st.floats(0, 50),
    hashed=st.integers(0, 3),
)
limits = st.builds(
    Limits,
    total_blocks=st.just(TOTAL),
    block_size=st.just(SIZE),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 40),
    watermark=st.sampled_from([0.0, 0.1, 0.5]),
    order=st.sampled_from(["slack", "deadline", "fcfs"]),
)
scripts = st.lists(sequences | st.integers(0, 20) | st.none(), max_size=40)


def check(scheduler: Scheduler) -> None:
    """Block conservation, and the running sums against their definition."""
    pool, running = scheduler.pool, scheduler.running
    assert pool.free + pool.used == TOTAL
    assert pool.used == sum(s.private for s in running) + len({block for s in running for block in s.full})
    assert (scheduler.firm, scheduler.soft) == scheduler.recount()
    assert all(s.computed <= s.blocks * SIZE for s in running)


@given(limits, scripts)
def test_blocks_are_conserved_and_everybody_finishes(limits: Limits, script: list[Sequence | int | None]) -> None:
    """A script submits sequences, aborts the one of a number, or steps (None)."""
    scheduler, submitted = Scheduler(limits), []
    for action in script:
        if isinstance(action, Sequence):
            scheduler.submit(action)
            submitted.append(action)
        elif action is not None and submitted:
            scheduler.abort(submitted[action % len(submitted)])
        else:
            begun = scheduler.begin(float(len(submitted)))
            check(scheduler)
            scheduler.end(begun)
        check(scheduler)
    finish(scheduler)
    assert all(s.state in (State.FINISHED, State.ABORTED) for s in submitted)
    assert all(s.generated == s.output for s in submitted if s.state is State.FINISHED)
    assert (scheduler.pool.free, scheduler.firm, scheduler.soft) == (TOTAL, 0, 0)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=20))
def test_who_holds_what_it_will_use_is_never_preempted(lengths: list[tuple[int, int]]) -> None:
    scheduler = make_scheduler(total_blocks=10)
    for prompt, output in lengths:
        scheduler.submit(Sequence(prompt=prompt, output=output, form=HELD, reserve=output))
    while scheduler.busy:
        step(scheduler)
        assert scheduler.pool.used + scheduler.committed_blocks <= 10
    assert scheduler.preemptions == 0


@pytest.mark.parametrize("order", ["slack", "deadline", "fcfs"])
def test_without_budgets_every_order_is_first_come_first_served(order: str) -> None:
    scheduler = make_scheduler(max_num_seqs=1, order=order)
    arrivals = [Sequence(prompt=1, output=1, arrival=at) for at in (3.0, 1.0, 2.0)]
    submit(scheduler, *arrivals)
    assert [s.arrival for s in finish(scheduler)] == [1.0, 2.0, 3.0]
