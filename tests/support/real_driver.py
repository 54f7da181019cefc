"""vLLM's own scheduler in a process of its own, to which a test gives scripts (`real_scheduler`)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tests.support import real_vllm
from tests.support.scripts import Script
from tests.support.tiny_model import make_model

DRIVER = Path(__file__).with_name("real_scheduler.py")


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
