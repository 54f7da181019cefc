"""vLLM's own scheduler with the plug-in, doing what the emulator does not: windows, priorities, adapters, drafts.

There is nothing to compare its steps with. What holds under every one of them: all requests end, what was taken and
promised comes back, and nobody is preempted where each answer's whole length is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest

from tests.support import real_vllm
from tests.support.real_driver import RealScheduler, driven
from tests.support.scripts import Script, Shape, make_script

SEEDS = range(12)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealScheduler]:
    with driven(real_vllm.SERVING, tmp_path_factory.mktemp("driven")) as scheduler:
        yield scheduler


@pytest.mark.parametrize("shape", get_args(Shape))
def test_all_end_and_all_that_was_taken_comes_back(real: RealScheduler, shape: Shape) -> None:
    admitted = preempted = 0
    for seed in SEEDS:
        script = shaped(seed, shape)
        real.begin(script)
        steps = real.steps()
        ends = steps[-1]
        assert (ends["free"], ends["firm"], ends["soft"]) == (script.total_blocks, 0, 0), f"seed {seed}"
        admitted += sum(len(step["admitted"]) for step in steps)
        preempted += sum(len(step["preempted"]) for step in steps)
    # Memory was short, or nothing was shown.
    assert admitted > 10 * len(SEEDS)
    assert preempted


@pytest.mark.parametrize("shape", get_args(Shape))
def test_nobody_is_preempted_where_the_whole_answer_is_held(real: RealScheduler, shape: Shape) -> None:
    waited = 0
    for seed in SEEDS:
        script = held(shaped(seed, shape))
        real.begin(script)
        for place, step in enumerate(real.steps()):
            assert not step["preempted"], f"seed {seed}, step {place}"
            waited += step["firm"] > 0
    assert waited


def shaped(seed: int, shape: Shape) -> Script:
    """A script with room for the longest sequence's window, or for drafts at its end."""
    script = make_script(seed)
    more = script.total_blocks if shape == "hybrid" else 3
    lags = script.kind == "ahead"
    return replace(script, shape=shape, total_blocks=script.total_blocks + more, lags=lags)


def held(script: Script) -> Script:
    """The same with each answer's length held, and nobody who goes before the end."""
    items = tuple(
        replace(item, form="held", reserve=item.output, max_tokens=item.output, abort_step=None)
        for item in script.sequences
    )
    return replace(script, sequences=items)
