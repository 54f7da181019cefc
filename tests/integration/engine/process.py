"""Starts the emulator as users do: a process of its own, on a port that the kernel chooses."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

COMMAND = [sys.executable, "-m", "kvantile_engine.emulator"]
MODEL = "test-model"
STOP_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Emulator:
    """A running emulator."""

    process: subprocess.Popen[str]
    url: str

    def metric(self, name: str) -> float:
        """The value of a metric, summed over its labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert values, f"no metric {name}"
        return sum(values)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_WITHIN_S)


@contextmanager
def emulator(**flags: object) -> Iterator[Emulator]:
    """An emulator with these flags; it must end by SIGTERM, unless the test has ended it."""
    arguments = [part for name, value in flags.items() for part in _flag(name, value)]
    command = [*COMMAND, "--model", MODEL, "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            assert line.startswith("listening on http://"), line + process.stderr.read()
            running = Emulator(process, line.split()[-1])
            yield running
            if process.poll() is None:
                assert running.stop() == 0
        finally:
            process.kill()


def _flag(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value is True else [flag, str(value)]
