"""Runs the scheduler on a virtual time line.

A step ends where the previous one ended plus its own duration (or plus now, after idling), in engine seconds; the
task sleeps until that moment in real time. A late wake shortens the next sleep, so lateness never adds up, and a
request joins at the first step that starts after its arrival, however late that step is computed. Tokens are handed
out when the step has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from kvantile_engine.emulator.answers import Answer, Answers
from kvantile_engine.emulator.failures import Lottery
from kvantile_engine.emulator.history import History
from kvantile_engine.emulator.requests import CompletionRequest, SequencePlan
from kvantile_engine.emulator.scheduler import Scheduler, Sequence, State, Step
from kvantile_engine.emulator.settings import Settings
from kvantile_engine.emulator.tallies import Tallies
from kvantile_optimizer.errors import WorkError


class OutOfMemoryError(WorkError):
    """The engine has died, as `--fail oom=TOKENS` asked for."""


class TimeLine:
    """Engine seconds since the start: real ones times `speed`."""

    def __init__(self, speed: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.speed = speed
        self._clock = clock
        self._origin = clock()

    def now(self) -> float:
        """The engine second that it is."""
        return (self._clock() - self._origin) * self.speed

    def real_seconds_until(self, moment: float) -> float:
        """How long to sleep until an engine second; 0 when it is past."""
        return max(0.0, (moment - self.now()) / self.speed)


class Engine:
    """One replica. `run` is its only task; everything else is called from the same event loop."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.scheduler = Scheduler(settings.limits())
        self.tallies = Tallies(settings.max_model_len)
        self.history = History()
        self.line = TimeLine(settings.speed, clock)
        self.lottery = Lottery(settings.failures, settings.seed)
        self._oom_tokens = settings.failures.oom_tokens
        self._step_time = settings.step_time()
        self._arrived: deque[Sequence] = deque()
        self._answers: dict[Sequence, Answer] = {}
        self._work = asyncio.Event()
        self._step_began = 0.0
        self._stepping = False

    @property
    def idle(self) -> bool:
        """Whether no request is inside and no step is under way: a step outlives the requests that leave during it."""
        return not self._answers and not self._stepping

    @property
    def waiting(self) -> int:
        """Sequences that wait, those included that no step has seen yet."""
        return len(self.scheduler.waiting) + len(self._arrived)

    def submit(self, request: CompletionRequest) -> Answers:
        """Takes a request in, as arrived now."""
        now = self.line.now()
        answers = Answers(self.settings.stream_interval if request.stream else None)
        self.tallies.broken_hints += request.broken_hints
        for plan in request.sequences:
            sequence = self._sequence(request, plan, now)
            self._answers[sequence] = answers.add(plan, sequence, request.per_prompt)
            self._arrived.append(sequence)
        self._work.set()
        return answers

    def abort(self, answers: Answers) -> None:
        """Ends a request at once and frees what it holds; harmless when it has ended."""
        for answer in answers.items:
            if self._answers.pop(answer.sequence, None) is not None:
                self.scheduler.abort(answer.sequence)
                self.tallies.finished["abort"] += 1
        answers.abort()

    def reset(self) -> bool:
        """Forgets prefix cache, counters and history, whose time begins anew; refused (False) while it is not idle."""
        if not self.idle:
            return False
        self.scheduler.reset()
        self.history = History(self.line.now())
        self.tallies = Tallies(self.settings.max_model_len)
        return True

    async def run(self) -> None:
        """Steps until cancelled. Raises OutOfMemoryError where the settings ask for it."""
        end = 0.0
        while True:
            start = await self._next_start(end)
            step = self.scheduler.begin(start)
            if self.scheduler.pool.used * self.settings.block_size >= self._oom_tokens:
                raise OutOfMemoryError(f"out of memory at {self._oom_tokens:,.0f} KV tokens, as --fail asked for")
            self._step_began = start
            end = start + self._step_time.seconds(len(step.decoding), step.context_tokens, step.prefill_tokens)
            self._note(step, start)
            self._sample(start)
            self._stepping = True
            await asyncio.sleep(self.line.real_seconds_until(end))
            self._stepping = False
            self.tallies.lag_s = self.line.now() - end
            self._deliver(step, end)

    async def _next_start(self, end: float) -> float:
        """When the step after `end` begins: at once, or when something has arrived."""
        self._enter(end)
        while not self.scheduler.busy:
            if not self._arrived:
                self.history.add(end, *self._state())
                self._work.clear()
                await self._work.wait()
            end = max(end, self._arrived[0].arrival)
            self._enter(end)
        return end

    def _enter(self, now: float) -> None:
        """Hands what has arrived by `now` to the scheduler; what was aborted meanwhile drops out."""
        while self._arrived and self._arrived[0].arrival <= now:
            sequence = self._arrived.popleft()
            if sequence.state is not State.ABORTED:
                self.scheduler.submit(sequence)

    def _note(self, step: Step, start: float) -> None:
        """Counts what the step computes, and keeps when a sequence was first admitted."""
        self.tallies.step_tokens.observe(len(step.decoding) + step.prefill_tokens)
        for sequence in step.admitted:
            if not sequence.preemptions:
                self._answers[sequence].started_s = start

    def _deliver(self, step: Step, end: float) -> None:
        """Closes the step and tells those who wait for tokens; gaps of one step are counted together."""
        in_step = 0
        produced = self.scheduler.end(step)
        for sequence in produced:
            last, sequence.last_token_at = sequence.last_token_at, end
            if last == self._step_began:
                in_step += 1
            elif last is None:
                self.tallies.first_token_s.observe(end - sequence.arrival)
                self.tallies.prompt_tokens += sequence.prompt
                self.tallies.cached_tokens += sequence.cached_tokens
                self._answers[sequence].first_s = end
            else:
                self.tallies.between_tokens_s.observe(end - last)
            self._answers[sequence].notify()
            if sequence.state is State.FINISHED:
                self._finish(sequence, end)
        self.tallies.between_tokens_s.observe(end - self._step_began, in_step)
        self.tallies.generation_tokens += len(produced)

    def _finish(self, sequence: Sequence, end: float) -> None:
        answer = self._answers.pop(sequence)
        self.tallies.whole_s.observe(end - sequence.arrival)
        self.tallies.finished[answer.finish_reason] += 1
        decode_s = end - answer.first_s
        self.tallies.requests.observe(
            request_prompt_tokens=sequence.prompt,
            request_generation_tokens=sequence.generated,
            request_max_num_generation_tokens=sequence.generated,
            request_params_max_tokens=sequence.max_tokens,
            request_prefill_kv_computed_tokens=sequence.prompt - sequence.cached_tokens,
            request_params_n=answer.copies,
            request_num_preemptions=sequence.preemptions,
            request_time_per_output_token_seconds=decode_s / max(1, sequence.generated - 1),
            request_queue_time_seconds=answer.started_s - sequence.arrival,
            request_inference_time_seconds=end - answer.started_s,
            request_prefill_time_seconds=answer.first_s - answer.started_s,
            request_decode_time_seconds=decode_s,
        )

    def _sample(self, now: float) -> None:
        if now >= self.history.due_s:
            self.history.add(now, *self._state())

    def _state(self) -> tuple[int, ...]:
        scheduler, size = self.scheduler, self.settings.block_size
        used = scheduler.pool.used
        committed = used + scheduler.committed_blocks
        return used * size, committed * size, len(scheduler.running), self.waiting, scheduler.preemptions

    def _sequence(self, request: CompletionRequest, plan: SequencePlan, now: float) -> Sequence:
        budget = request.hint.ttft_budget_s
        return Sequence(
            prompt=plan.prompt,
            output=plan.output,
            max_tokens=plan.limit,
            arrival=now,
            latest_start=None if budget is None else now + budget - self._step_time.prefill_seconds(plan.prompt),
            form=request.hint.form,
            reserve=request.hint.reserve_tokens or 0,
            pooling_per_mille=request.hint.pooling_per_mille,
            hashes=plan.hashes,
        )
