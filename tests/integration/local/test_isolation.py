"""A fleet is what its plan says, whatever is set and lies around where the user stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvantile_optimizer.local import fleet
from kvantile_optimizer.local.flags import FleetSettings
from tests.support.small_plan import make_plan


async def test_neither_variables_nor_files_of_the_users_reach_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVANTILE_WATERMARK", "nonsense")
    monkeypatch.setenv("KVANTILE_API_KEYS", "/nowhere")
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    async with fleet.running(make_plan(), FleetSettings(speed=20.0), said.append) as running:
        assert len(running.replica_urls) == 1
    assert said == []
