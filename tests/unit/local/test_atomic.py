"""A file is replaced whole or not at all."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kvantile_optimizer.errors import WorkError
from kvantile_optimizer.local import atomic


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old", encoding="utf-8")
    atomic.check(path)
    atomic.write(path, "new")
    assert path.read_text(encoding="utf-8") == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "page.html"
    says = r"missing/page\.html cannot be written: No such file"
    with pytest.raises(WorkError, match=says):
        atomic.check(path)
    with pytest.raises(WorkError, match=says):
        atomic.write(path, "new")


def test_a_folder_in_the_files_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="Is a directory"):
        atomic.check(tmp_path)


def test_a_full_disk_leaves_the_old_text(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old", encoding="utf-8")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(WorkError, match="cannot be written"):
            atomic.write(path, "new" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]
