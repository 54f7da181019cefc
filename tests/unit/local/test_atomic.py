"""A file is replaced whole or not at all."""

from __future__ import annotations

import os
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


def test_a_link_stays_and_leads_to_the_new_text(tmp_path: Path) -> None:
    link, path = tmp_path / "link.html", tmp_path / "page.html"
    link.symlink_to(path)
    for text in ("one", "two"):
        atomic.check(link)
        atomic.write(link, text)
        assert path.read_text(encoding="utf-8") == text
    assert link.is_symlink()


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    atomic.check(pipe)
    atomic.write(pipe, "new")
    assert os.read(reader, 100) == b"new"
    os.close(reader)
    assert pipe.is_fifo()


def test_half_a_surrogate_pair_does_not_stop_a_page(tmp_path: Path) -> None:
    atomic.write(tmp_path / "page.html", "a\ud800b")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "a?b"


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
