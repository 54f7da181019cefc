"""Compiles the simulator's inner functions with numba, and lets them call the shared admission rule as it stands.

Compiling takes seconds, so machine code is cached, by default beside the sources. numba looks only at the file of the
function itself, while the code holds what that calls in other files; so the folder is named after the contents of
every file that is compiled, and a change of any of them compiles afresh. Where no folder can be written each process
compiles for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import njit
from numba.extending import register_jitable

from kvantile_optimizer import admission

Function = TypeVar("Function", bound=Callable[..., Any])
config: Any = numba.config  # its attributes are made at run time

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
        with _cached_in(_FOLDER):
            return cast("Function", njit(cache=True)(function))
    except RuntimeError:
        # What numba raises where it finds no folder to cache in.
        return cast("Function", njit(function))


@contextmanager
def _cached_in(folder: Path) -> Iterator[None]:
    """Has numba choose `folder` for what is decorated meanwhile; other users of numba keep their own."""
    before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before


def _cache_folder() -> Path:
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*here.glob("*.py"), Path(admission.__file__)]):
        digest.update(path.read_bytes())
    base = Path(config.CACHE_DIR) if config.CACHE_DIR else here / "__pycache__"
    return base / f"kvantile-{digest.hexdigest()[:16]}"


_FOLDER = _cache_folder()
