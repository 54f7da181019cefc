"""Runs a coroutine so that Ctrl-C and SIGTERM end it the same way at every moment: by cancelling it.

asyncio cancels the main task on the first SIGINT and lets its `finally` blocks drain; SIGTERM is made to do the same.
Both end in KeyboardInterrupt, for the caller to translate. A second Ctrl-C does not wait for the draining.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Like `asyncio.run`. Raises KeyboardInterrupt after SIGINT or SIGTERM."""
    return asyncio.run(_until_terminated(main))


async def _until_terminated(main: Coroutine[Any, Any, Result]) -> Result:
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - asyncio.run made it
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        terminated = True
        task.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await main
    except asyncio.CancelledError:
        if terminated:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
