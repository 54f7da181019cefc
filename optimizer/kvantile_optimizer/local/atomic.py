"""Writes a file so that a reader sees the old text or the new one, and a full disk leaves the old."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from kvantile_optimizer.errors import WorkError


def write(path: Path, text: str) -> None:
    """Replaces `path` by `text`. Raises WorkError, naming the path, when that cannot be done."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as draft:
            kept = Path(draft.name)
            try:
                draft.write(text)
                draft.flush()
                # Temporary files are private to their owner; a report is made to be shown.
                kept.chmod(0o644)
                kept.replace(path)
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
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise WorkError(f"{path} cannot be written: {error.strerror or error}") from error
