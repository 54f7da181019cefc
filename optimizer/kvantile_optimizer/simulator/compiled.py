"""Compiles the simulator's inner functions with numba, and lets them call the shared rules as they stand.

Compiling takes seconds, so the machine code of what Python calls (`entry`) is cached; it holds all that it calls, so
the rest (`compiled`) needs no cache and no way in from Python, which makes a fifth less to compile. numba looks only
at the file of the entry itself; so the folder is named after the contents of every file that is compiled, and a change
of any of them compiles afresh. Folders are tried in turn: `NUMBA_CACHE_DIR`, beside the sources, the user's own cache.
Where none can be written each process compiles for itself.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.extending import register_jitable

from kvantile_optimizer import admission, routing

Function = TypeVar("Function", bound=Callable[..., Any])
config: Any = numba.config  # its attributes are made at run time
njit: Any = numba.njit  # its types lack the options about wrappers

for _rule in (
    admission.blocks_for,
    admission.firm_blocks,
    admission.running_firm_blocks,
    admission.soft_millitokens,
    admission.soft_blocks,
    admission.admits,
    admission.late_turn,
    admission.cut_reserve,
    routing.score,
    routing.weighted_score,
    routing.precedence,
    routing.credit_after,
    routing.has_room,
    routing.pick,
    routing.least_loaded,
    routing.lead_after,
):
    register_jitable(_rule)


def compiled(function: Function) -> Function:
    """`function` as machine code that only other compiled functions call, compiled with the first that does."""
    return cast("Function", njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


def entry(function: Function) -> Function:
    """`function` as machine code that Python calls, compiled at its first call or taken from the cache."""
    if _FOLDER is None:
        return cast("Function", njit(no_cfunc_wrapper=True)(function))
    with _cached_in(_FOLDER):
        return cast("Function", njit(cache=True, no_cfunc_wrapper=True)(function))


@cache
def tell_of_compiling() -> None:
    """Says on a terminal, once, why the first replay of a new version takes seconds."""
    if sys.stderr.isatty() and (_FOLDER is None or not any(_FOLDER.rglob("*.nbi"))):
        print("Compiling the simulator, which takes some seconds the first time.", file=sys.stderr)


@contextmanager
def _cached_in(folder: Path) -> Iterator[None]:
    """Has numba choose `folder` for what is decorated meanwhile; other users of numba keep their own."""
    before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before


def cache_bases(chosen: str, platform: str, environment: Mapping[str, str], home: Path) -> list[Path]:
    """Where machine code may be kept, best first; `chosen` is the user's own folder for numba, or empty."""
    if platform == "win32":
        own = Path(environment.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif platform == "darwin":
        own = home / "Library" / "Caches"
    else:
        # The XDG base directory specification has relative paths ignored.
        given = environment.get("XDG_CACHE_HOME", "")
        own = Path(given) if given.startswith("/") else home / ".cache"
    first = [Path(chosen)] if chosen else []
    return [*first, Path(__file__).parent / "__pycache__", own / "kvantile"]


def first_writable(bases: list[Path], name: str) -> Path | None:
    """The folder `name`, made in the first of `bases` that can be written to; None where none can."""
    for base in bases:
        try:
            (base / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=base / name):
                return base / name
        except OSError:
            continue
    return None


def _version() -> str:
    """A name that changes with the sources."""
    digest = hashlib.sha256()
    for path in sorted([*Path(__file__).parent.glob("*.py"), Path(admission.__file__), Path(routing.__file__)]):
        digest.update(path.read_bytes())
    return f"kvantile-{digest.hexdigest()[:16]}"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user id without a home, as containers have: no folder can be made there
        return Path(os.devnull)


_FOLDER = first_writable(cache_bases(config.CACHE_DIR, sys.platform, os.environ, _home()), _version())
