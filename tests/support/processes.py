"""Finds the processes that tests started and that still run.

A process counts when it descends from this one or carries the mark that this one put into its environment: a replica
whose supervisor was killed belongs to init by then, and only the mark still tells.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress

import psutil

MARK = "TEST_RUN_OF_KVANTILE"


def mark_this_run() -> None:
    """Sets the mark that the processes started from now on inherit; another pytest's processes have another."""
    os.environ[MARK] = uuid.uuid4().hex


def running_processes() -> set[psutil.Process]:
    """The processes this run has started and that have not ended, zombies among them."""
    found = set(psutil.Process().children(recursive=True))
    for process in psutil.process_iter():
        # Processes end while they are looked at, and those of other users do not show their environment.
        with suppress(psutil.Error):
            if process.environ().get(MARK) == os.environ[MARK]:
                found.add(process)
    return {process for process in found if process.pid != os.getpid() and not _is_tracker(process)}


def _is_tracker(process: psutil.Process) -> bool:
    """Whether it is multiprocessing's resource tracker, which the standard library keeps until the interpreter ends."""
    with suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    return False


def end(processes: set[psutil.Process], patience_s: float = 2.0) -> list[str]:
    """Waits up to `patience_s` for `processes`, kills those that stay, and says which they were."""
    _, staying = psutil.wait_procs(processes, timeout=patience_s)
    described = [_described(process) for process in staying]
    for process in staying:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(staying, timeout=patience_s)
    return sorted(described)


def _described(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())}"
    return f"{process.pid} (ended)"
