"""An interruption at every moment of a run's beginning is one, with nothing left half made."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from kvantile_optimizer.local import runner


@pytest.mark.filterwarnings("error")
def test_a_signal_while_the_loop_is_made_waits_until_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    made = asyncio.new_event_loop
    whole = []

    def interrupted() -> asyncio.AbstractEventLoop:
        os.kill(os.getpid(), signal.SIGINT)
        loop = made()
        whole.append(loop)
        return loop

    async def main() -> None:
        raise AssertionError("it was interrupted before")

    monkeypatch.setattr(asyncio.events, "new_event_loop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.run(main())
    assert [loop.is_closed() for loop in whole] == [True]
