"""`python -m kvantile_engine copy`: our packages in a folder for a stock image's PYTHONPATH."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvantile_engine.__main__ import main


def test_the_copy_is_whole_and_works_where_nothing_else_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "kvantile"
    assert main(["copy", str(folder)]) == 0
    assert capsys.readouterr().out == f"PYTHONPATH={folder}\n"
    assert sorted(path.name for path in folder.iterdir()) == ["kvantile_engine", "kvantile_optimizer"]
    assert not list(folder.rglob("__pycache__"))
    asked = [sys.executable, "-S", "-m", "kvantile_engine", "installed"]
    said = subprocess.run(asked, env={"PYTHONPATH": str(folder)}, cwd=tmp_path, capture_output=True, text=True)
    assert (said.returncode, said.stdout, said.stderr) == (1, "vLLM is not installed\n", "")


def test_a_second_copy_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    stale = tmp_path / "kvantile_engine" / "gone.py"
    other = tmp_path / "theirs.py"
    stale.parent.mkdir()
    stale.touch()
    other.touch()
    assert main(["copy", str(tmp_path)]) == 0
    assert not stale.exists()
    assert other.exists()


def test_where_it_cannot_write_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["copy", str(file)]) == 1
    assert capsys.readouterr().err == f"{file}: Not a directory\n"


def test_what_cannot_be_written_whole_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        assert main(["copy", str(tmp_path)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in capsys.readouterr().err
