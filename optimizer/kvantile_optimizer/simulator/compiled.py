"""Compiles the simulator's inner functions with numba, and lets them call the shared admission rule as it stands.

Machine code is cached beside the sources, or in the user's cache folder, because compiling takes seconds; where
neither can be written (a read-only image) each process compiles for itself. The cache looks at the file of the
compiled function only: after an edit of `admission`, touch `kernel.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit
from numba.extending import register_jitable

from kvantile_optimizer import admission

Function = TypeVar("Function", bound=Callable[..., Any])

for _rule in (
    admission.blocks_for,
    admission.firm_blocks,
    admission.running_firm_blocks,
    admission.soft_millitokens,
    admission.soft_blocks,
    admission.admits,
    admission.late_turn,
):
    register_jitable(_rule)


def compiled(function: Function) -> Function:
    """`function` as machine code, compiled at its first call."""
    try:
        return cast("Function", njit(cache=True)(function))
    except RuntimeError:
        # What numba raises where it finds no folder to cache in.
        return cast("Function", njit(function))
