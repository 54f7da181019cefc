"""The checks that the other tests lean on must themselves find something."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import leaks, processes, programs


def test_a_running_process_is_found_and_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = {process for process in processes.running_processes() if process.pid == child.pid}
        assert len(found) == 1
        assert str(child.pid) in processes.end(found, patience_s=0.0)[0]
    assert child.pid not in {process.pid for process in processes.running_processes()}


def test_an_orphan_is_found_by_its_mark() -> None:
    # The child tells its own number: until it runs, the system does not show its environment.
    leave_a_child = (
        "import subprocess, sys; idle = 'import os; print(os.getpid(), flush=True); input()';"
        "subprocess.Popen([sys.executable, '-c', idle], stdin=0)"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", leave_a_child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        parent.wait()
        found = {process for process in processes.running_processes() if process.pid == orphan}
        assert found
        assert processes.end(found, patience_s=0.0)


@pytest.mark.parametrize(
    "line",
    [
        "see https://" + "pypi" + ".org/project/x",
        "--" + "index-url http://mirror",
        "open('/" + "root/x')",
        "cd /" + "work",
    ],
)
def test_a_leak_is_found(line: str) -> None:
    assert [number for number, _, _ in leaks.leaks_in(f"first\n{line}\n")] == [2]


@pytest.mark.parametrize("line", ["./work/x", "a/root", "$ROOT/work", "the homework/workload", "/etc/rootless"])
def test_an_innocent_line_is_left_alone(line: str) -> None:
    assert list(leaks.leaks_in(line)) == []


def test_a_missing_program_skips_on_a_laptop_and_fails_on_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt install no-such-package"):
        programs.need("no-such-program", "no-such-package")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt install no-such-package"):
        programs.need("no-such-program", "no-such-package")


def test_a_program_that_is_there_is_found() -> None:
    assert programs.need("sh", "dash").endswith("/sh")
