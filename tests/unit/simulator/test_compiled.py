"""Where machine code is kept, and that it is kept where the package itself cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvantile_optimizer.simulator import compiled
from kvantile_optimizer.simulator.compiled import cache_bases, first_writable

HOME = Path("/house/user")


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {}, "/house/user/.cache/kvantile"),
        ("linux", {"XDG_CACHE_HOME": "/var/cache"}, "/var/cache/kvantile"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/house/user/.cache/kvantile"),
        ("darwin", {"XDG_CACHE_HOME": "/var/cache"}, "/house/user/Library/Caches/kvantile"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/kvantile"),
    ],
)
def test_the_users_cache_folder_follows_the_platform(platform: str, environment: dict[str, str], expected: str) -> None:
    beside, own = cache_bases("", platform, environment, HOME)
    assert own == Path(expected)
    assert beside == Path(compiled.__file__).parent / "__pycache__"


def test_the_folder_that_numba_was_given_comes_first() -> None:
    assert cache_bases("/given", "linux", {}, HOME)[0] == Path("/given")


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert first_writable([tmp_path / "file", tmp_path / "own"], "v1") == tmp_path / "own" / "v1"
    assert first_writable([tmp_path / "file"], "v1") is None


def test_each_replay_is_cached_in_one_piece() -> None:
    assert compiled._FOLDER is not None
    kept = [path.name for path in compiled._FOLDER.rglob("*.nbi")]
    assert kept
    assert all(name.startswith(("dispatch.replay", "gateway.replay")) for name in kept)
