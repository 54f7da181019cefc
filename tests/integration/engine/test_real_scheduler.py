"""vLLM's own scheduler with the plug-in, and without, against the emulator's: the same in every step of random scripts.

Without a model: what the scheduler asks for is answered step by step (`tests.support.real_scheduler`). Whoever is
admitted and preempted, who gets a token, what is pooled and how many blocks are free is compared, under every version
that is supported. The simulator's kernel is held to the emulator's scheduler by tests of its own.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import real_vllm
from tests.support.real_driver import driven
from tests.support.scripts import Kind, emulated, make_script

COUNT = 2000
EVERY = "KVANTILE_EVERY_SCRIPT"
"""When set, every version gets all scripts, which takes the better part of an hour; else they are dealt out."""
SCRIPTS = {real_vllm.SERVING: range(1000)} | {
    version: range(1000 + 125 * place, 1125 + 125 * place) for place, version in enumerate(real_vllm.ALONE)
}
"""Seeds for each version."""
if os.environ.get(EVERY):
    SCRIPTS = dict.fromkeys(SCRIPTS, range(COUNT))

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3600 if os.environ.get(EVERY) else 900)]


@pytest.mark.parametrize("version", SCRIPTS)
def test_every_step_is_the_emulators(version: str, tmp_path: Path) -> None:
    seeds = SCRIPTS[version]
    preempted = admitted = stock = stepped = 0
    with driven(version, tmp_path) as real:
        assert real.version == version
        for seed in seeds:
            script = make_script(seed)
            kinds: tuple[Kind, ...] = (script.kind, "stock") if script.is_stock else (script.kind,)
            for kind in kinds:
                real.begin(replace(script, kind=kind))
            expected = emulated(script)
            for kind in kinds:
                compare(real.steps(), expected, f"seed {seed}, {kind}")
            preempted += sum(len(step["preempted"]) for step in expected)
            admitted += sum(len(step["admitted"]) for step in expected)
            stock += "stock" in kinds
            stepped += len(expected)
    # The table in docs/engine.md; pytest -rP shows it.
    print(f"| {version} | {len(seeds):,} | {stepped:,} | {admitted:,} | {preempted:,} |")
    # The scripts hold what the test is about.
    assert preempted > len(seeds)
    assert admitted > 10 * len(seeds)
    assert stock > len(seeds) / 10


def compare(found: list[dict[str, Any]], expected: list[dict[str, Any]], name: str) -> None:
    """Asserts that both are the same, with the first step that is not."""
    for place, (mine, theirs) in enumerate(zip(found, expected, strict=False)):
        assert {key: mine[key] for key in theirs} == theirs, f"{name}, step {place}"
    assert len(found) == len(expected), name
