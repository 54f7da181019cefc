"""vLLM's own scheduler with the plug-in, and without, against the emulator's: the same in every step of random scripts.

Without a model: what the scheduler asks for is answered step by step (`tests.support.real_scheduler`). Whoever is
admitted and preempted, who gets a token, what is pooled and how many blocks are free is compared, under every version
that is supported. The simulator's kernel is held to the emulator's scheduler by tests of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from tests.support import real_vllm
from tests.support.scripts import Kind, Script, emulated, make_script
from tests.support.tiny_model import make_model

DRIVER = real_vllm.ROOT / "tests" / "support" / "real_scheduler.py"
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


class RealScheduler:
    """The driver's process."""

    def __init__(self, stdin: IO[str], stdout: IO[str], log: Path) -> None:
        self._stdin, self._stdout, self._log = stdin, stdout, log
        self.version = self._read()["version"]

    def begin(self, script: Script) -> None:
        """Has the driver go through a script; it works while we do something else."""
        self._stdin.write(json.dumps(script.to_json()) + "\n")
        self._stdin.flush()

    def steps(self) -> list[dict[str, Any]]:
        """What happened in each step of the first script that was begun and not asked for."""
        found: list[dict[str, Any]] = self._read()
        return found

    def _read(self) -> Any:
        line = self._stdout.readline()
        assert line, self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
        return json.loads(line)


@contextmanager
def driven(version: str, folder: Path) -> Iterator[RealScheduler]:
    """The driver under a version of vLLM."""
    assert version == real_vllm.SERVING or real_vllm.alone(version).exists(), f"vLLM {version} is missing: make vllm"
    log = folder / "log"
    command = [str(real_vllm.python()), str(DRIVER), str(make_model(folder / "model"))]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=real_vllm.environment(version, VLLM_LOGGING_LEVEL="ERROR"),
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield RealScheduler(process.stdin, process.stdout, log)
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            finally:
                process.kill()


@pytest.mark.parametrize("version", SCRIPTS)
def test_every_step_is_the_emulators(version: str, tmp_path: Path) -> None:
    seeds = SCRIPTS[version]
    preempted = admitted = stock = 0
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
    # The scripts hold what the test is about.
    assert preempted > len(seeds)
    assert admitted > 10 * len(seeds)
    assert stock > len(seeds) / 10


def compare(found: list[dict[str, Any]], expected: list[dict[str, Any]], name: str) -> None:
    """Asserts that both are the same, with the first step that is not."""
    for place, (mine, theirs) in enumerate(zip(found, expected, strict=False)):
        assert mine == theirs, f"{name}, step {place}"
    assert len(found) == len(expected), name
