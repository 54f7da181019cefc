"""What to ask of a running engine so that its answers tell its step time, and what they tell.

Two kinds of probes, on an engine that does nothing else. A lone prompt of I tokens takes TTFT = o + alpha steps +
delta I, where o is what the way there and back takes. Of B requests at once, while all of them decode, a token takes
alpha + beta B + gamma C at a context of C tokens together. B and C vary independently over a square of small and large
values, because nothing else tells beta from gamma. The five unknowns, none below zero, are fitted to all probes
together: relative errors, with a loss that a disturbed probe cannot rule. Rounds of the same probes repeat; a fit to
the first one that is judged on the next says how far it can be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from kvantile_optimizer.errors import WorkError
from kvantile_optimizer.plan import StepTime

Floats = npt.NDArray[np.float64]
PROMPTS = (16, 128, 512, 1024, 2048, 4096)
"""Tokens of lone prompts: from nearly nothing to a long document's."""
BATCHES = (1, 8, 32)
"""Requests at once: 32 times beta is half of a usual alpha at most, and 32 connections trouble no server."""
MOST_CONTEXT = 32_768
"""Tokens of context of all requests of a probe: reading them takes a tenth of a usual step or more, computing them
first takes seconds."""
SHORT_PROMPT = 16
FEWEST_STEPS = 64
"""Steps that all requests of a probe decode side by side: a millisecond of jitter at its ends is 0.1 % of them."""
LEAST_TOKENS = 5
"""Tokens in the part of a stream that is measured, below which its speed means nothing."""
MOST_CONTEXT_SHARE = 0.5
"""Of the KV cache: nothing may be preempted, and others may hold some of it."""
_OUTLIER = 0.05
"""Relative error from which on a probe counts linearly; undisturbed ones agree to a hundredth."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server can take."""

    max_model_len: int
    kv_tokens: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Probe:
    """`count` requests at once, each of `prompt` tokens and `output` wanted."""

    count: int
    prompt: int
    output: int


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """One answer as it came: when it was asked for, and when how many of its tokens were there; seconds."""

    sent_s: float
    at_s: Floats
    """(E,) when each piece came."""
    tokens: Floats
    """(E,) tokens with it and before."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One probe's row of the fit: what alpha, beta, gamma, delta and the overhead count for, and the seconds seen."""

    weights: tuple[float, float, float, float, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The fit, the seconds that a request spends outside of the engine, and relative errors where there were two
    rounds: medians over the second round's probes of a fit to the first."""

    step_time: StepTime
    overhead_s: float
    errors: dict[str, float]


def probes(limits: Limits) -> list[Probe]:
    """One round of probes. Raises WorkError for a server that is too small for any."""
    longest = min(limits.max_model_len, limits.kv_tokens or limits.max_model_len)
    lone = [Probe(1, prompt, 1) for prompt in PROMPTS if prompt < longest]
    room = min(MOST_CONTEXT, int(MOST_CONTEXT_SHARE * (limits.kv_tokens or 2 * MOST_CONTEXT)))
    together = []
    for count in BATCHES:
        for prompt in (SHORT_PROMPT, min(room // count, longest // 2)):
            # The first of them must still decode when the last one has been computed.
            output = FEWEST_STEPS + math.ceil(count * prompt / limits.max_num_batched_tokens)
            if count <= limits.max_num_seqs and prompt + output <= longest and count * output <= room:
                together.append(Probe(count, prompt, output))
    if len(lone) < 2 or len({probe.count for probe in together}) < 2:
        raise WorkError(f"the server holds {longest} tokens, too few to tell its step time; give it a larger KV cache")
    return [*lone, *together]


def observed(probe: Probe, streams: Sequence[Stream], limits: Limits) -> Observation | None:
    """What a probe's answers say; None where they never decoded side by side for long enough."""
    if probe.output == 1:
        steps = math.ceil(probe.prompt / limits.max_num_batched_tokens)
        return Observation((steps, 0, 0, probe.prompt, 1), float(streams[0].at_s[0] - streams[0].sent_s))
    begin, end = max(stream.at_s[0] for stream in streams), min(stream.at_s[-1] for stream in streams)
    paces, contexts = [], []
    for stream in streams:
        within = (stream.at_s >= begin) & (stream.at_s <= end)
        at_s, tokens = stream.at_s[within], stream.tokens[within]
        if len(at_s) < 2 or tokens[-1] - tokens[0] < LEAST_TOKENS:
            return None
        paces.append((at_s[-1] - at_s[0]) / (tokens[-1] - tokens[0]))
        contexts.append(probe.prompt + (tokens[0] + tokens[-1]) / 2)
    return Observation((1, probe.count, sum(contexts), 0, 0), float(np.mean(paces)))


def fitted(rounds: Sequence[Sequence[Observation]]) -> Measured:
    """The step time that explains all rounds."""
    found = _fit([item for one in rounds for item in one])
    errors = {}
    if len(rounds) > 1:
        first = _fit(rounds[0])
        for name, kind in (("ttftMedian", 4), ("tpotMedian", 1)):
            judged = [item for item in rounds[1] if item.weights[kind]]
            if judged:
                errors[name] = float(np.median([np.dot(item.weights, first) / item.seconds - 1 for item in judged]))
    alpha, beta, gamma, delta, overhead = map(float, found)
    return Measured(StepTime(alpha=alpha, beta=beta, gamma=gamma, delta=delta), overhead, errors)


def _fit(observations: Sequence[Observation]) -> Floats:
    """alpha, beta, gamma, delta, overhead (5,) in seconds."""
    weights = np.array([item.weights for item in observations], np.float64)
    seconds = np.array([item.seconds for item in observations])
    # Columns of one size: an overhead counts once where a gamma counts thousands of times.
    relative = weights / seconds[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)

    def residuals(unknown: Floats) -> Floats:
        return np.asarray(relative / scale @ unknown - 1)

    end = least_squares(residuals, np.full(5, 0.2), bounds=(1e-9, np.inf), loss="soft_l1", f_scale=_OUTLIER)
    return np.asarray(end.x / scale)
