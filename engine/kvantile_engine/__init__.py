"""What Kvantile has in an engine: the scheduler for vLLM's `--scheduler-cls`, and an emulator of vLLM."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class that exists where vLLM does
    """`ReservationScheduler`, looked up when it is asked for: the emulator runs without vLLM."""
    if name != "ReservationScheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvantile_engine.plugin.scheduler import ReservationScheduler

    return ReservationScheduler
