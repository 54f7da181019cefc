"""Writes a file so that a reader sees the old text or the new one, and a full disk leaves the old.

A link stays one, its target is replaced; what is no file, such as /dev/stdout or a pipe, is written to as it stands.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from kvantile_optimizer.errors import WorkError


def write(path: Path, text: str) -> None:
    """Replaces `path` by `text`. Raises WorkError, naming the path, when that cannot be done."""
    try:
        if _is_special(path):
            with path.open("w", encoding="utf-8", errors="replace") as stream:
                stream.write(text)
            return
        target = path.resolve()
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", errors="replace", dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as draft:
            kept = Path(draft.name)
            try:
                draft.write(text)
                draft.flush()
                # Temporary files are private to their owner; a report is made to be shown.
                kept.chmod(0o644)
                kept.replace(target)
            except OSError:
                kept.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise WorkError(f"{path} cannot be written: {error.strerror or error}") from error


def check(path: Path) -> None:
    """Raises WorkError, naming the path, if `write` could not even begin: to be asked before long work."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if _is_special(path):
            return
        target = path.resolve()
        with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise WorkError(f"{path} cannot be written: {error.strerror or error}") from error


def _is_special(path: Path) -> bool:
    """Whether there is something that a file must not take the place of."""
    return path.exists() and not path.is_file() and not path.is_dir()
