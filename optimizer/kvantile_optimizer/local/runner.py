"""Runs a coroutine so that Ctrl-C and SIGTERM end it the same way at every moment: by cancelling it.

asyncio cancels the main task on the first SIGINT and lets its `finally` blocks drain; SIGTERM is made to do the same.
Both end in KeyboardInterrupt, for the caller to translate. A second Ctrl-C does not wait for the draining. Before and
after, SIGTERM does what it did.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

Result = TypeVar("Result")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Like `asyncio.run`. Raises KeyboardInterrupt after SIGINT or SIGTERM."""
    whole = _until_terminated(main)
    early: list[bool] = []
    # A loop that an interruption left half made cannot be closed, so signals are only noted until it is whole. Blocking
    # them would not do: another thread of a library would take them.
    before = {number: signal.signal(number, lambda *_: early.append(True)) for number in SIGNALS}
    try:
        with asyncio.Runner() as runner:
            _restore(before)
            if early:
                raise KeyboardInterrupt
            return runner.run(whole)
    finally:
        # What was never begun would be complained about.
        whole.close()
        main.close()
        # The loop leaves the system's default behind, by which the process would die on the spot.
        _restore(before)


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


async def _until_terminated(main: Coroutine[Any, Any, Result]) -> Result:
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - asyncio.run made it
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        terminated = True
        task.cancel()

    # The loop takes the handler away when it is closed, after everything has drained.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await main
    except asyncio.CancelledError:
        if terminated:
            raise KeyboardInterrupt from None
        raise
