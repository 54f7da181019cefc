"""SIGTERM ends a run by cancelling it, and does what it did before once the run is over."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from kvantile_optimizer.local import runner


async def terminated_while_it_waits(drained: list[bool]) -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(10)
    finally:
        drained.append(True)


def test_sigterm_drains_and_is_given_back() -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    drained: list[bool] = []
    try:
        with pytest.raises(KeyboardInterrupt):
            runner.run(terminated_while_it_waits(drained))
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert drained == [True]
