"""What holds for every test: nothing it started outlives its module, and properties are tried the same way on CI.

The process guard is a fixture per module, not per test, so that a module may share one fleet among its tests.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

from tests.support import processes, real_vllm

# No deadline: the machines are shared and slow, and pytest-timeout already bounds a hang.
hypothesis.settings.register_profile("laptop", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "laptop")

processes.mark_this_run()

# What a script starts in the background ignores Ctrl-C, and so would every command that is started from here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the real vLLM come first: they are few and long, and the other worker has the rest meanwhile.

    Without vLLM they are skipped, but not where everything has to be there.
    """
    items.sort(key=lambda item: item.get_closest_marker("vllm") is None)
    if not os.environ.get("CI") and not real_vllm.python():
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason=real_vllm.MISSING))


@pytest.fixture(autouse=True, scope="module")
def _no_process_outlives_its_module() -> Iterator[None]:
    before = processes.running_processes()
    yield
    left = processes.end(processes.running_processes() - before)
    assert not left, "processes left behind:\n" + "\n".join(left)
