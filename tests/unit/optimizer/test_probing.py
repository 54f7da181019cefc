"""Probes of an engine with known step times: found again, whatever disturbs one of them."""

from __future__ import annotations

import numpy as np
import pytest

from kvantile_optimizer.errors import WorkError
from kvantile_optimizer.plan import StepTime
from kvantile_optimizer.probing import Floats, Limits, Observation, Probe, Stream, fitted, observed, probes

KNOWN = StepTime(alpha=0.012, beta=1e-4, gamma=8e-8, delta=1e-4)
OVERHEAD_S = 0.004
LIMITS = Limits(16_384, 65_536)


def answers(probe: Probe) -> list[Stream]:
    """What an engine of the known step time sends: all prompts first, then everybody decodes."""
    prefill_s = KNOWN.alpha * -(-probe.prompt // LIMITS.max_num_batched_tokens) + KNOWN.delta * probe.prompt
    context = probe.count * (probe.prompt + 1 + np.arange(probe.output - 1))
    steps = KNOWN.alpha + KNOWN.beta * probe.count + KNOWN.gamma * context
    at_s: Floats = 100 + OVERHEAD_S + probe.count * prefill_s + np.append(0.0, np.cumsum(steps)).astype(np.float64)
    return [Stream(100.0, at_s, np.arange(1, probe.output + 1, dtype=np.float64))] * probe.count


def round_of(limits: Limits = LIMITS) -> list[Observation]:
    found = [observed(probe, answers(probe), limits) for probe in probes(limits)]
    return [item for item in found if item is not None]


def assert_known(found: StepTime, rel: float) -> None:
    for name, value in KNOWN.model_dump().items():
        assert getattr(found, name) == pytest.approx(value, rel=rel), name


def test_known_coefficients_and_the_way_there_and_back_are_recovered() -> None:
    found = fitted([round_of(), round_of()])
    assert_known(found.step_time, 0.02)
    assert found.overhead_s == pytest.approx(OVERHEAD_S, rel=0.05)
    assert all(abs(error) < 1e-3 for error in found.errors.values())


@pytest.mark.parametrize("which", range(len(round_of())))
def test_one_disturbed_probe_of_two_rounds_moves_nothing_much(which: int) -> None:
    disturbed = round_of()
    disturbed[which] = Observation(disturbed[which].weights, 3 * disturbed[which].seconds)
    found = fitted([disturbed, round_of()]).step_time
    assert found.alpha == pytest.approx(KNOWN.alpha, rel=0.1)
    assert found.delta == pytest.approx(KNOWN.delta, rel=0.1)


def test_requests_that_never_decode_side_by_side_say_nothing() -> None:
    early, late = (Stream(0.0, np.linspace(start, start + 0.2, 20), np.linspace(1, 20, 20)) for start in (0.0, 5.0))
    assert observed(Probe(2, 16, 20), [early, late], LIMITS) is None


def test_probes_keep_to_what_the_server_holds() -> None:
    for limits in (LIMITS, Limits(2048, 8192, 16), Limits(131_072)):
        for probe in probes(limits):
            assert probe.prompt + probe.output <= limits.max_model_len
            assert probe.count <= limits.max_num_seqs
            assert probe.count * (probe.prompt + probe.output) <= (limits.kv_tokens or 65_536)


def test_a_server_that_holds_next_to_nothing_is_refused() -> None:
    with pytest.raises(WorkError, match="larger KV cache"):
        probes(Limits(64, 64))
