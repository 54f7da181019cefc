"""Where the emulator's settings come from."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from kvantile_engine.emulator.cli import emulator
from kvantile_engine.emulator.settings import Settings


def resolve(*arguments: str) -> Settings:
    context = emulator.make_context(
        "kvantile-emulator", list(arguments), auto_envvar_prefix=emulator.context_settings["auto_envvar_prefix"]
    )
    return Settings.model_validate(context.params)


def test_without_anything_the_defaults_hold() -> None:
    assert resolve() == Settings()


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "emulator.toml"
    file.write_text('model = "m"\nport = 1\nkv-tokens = 100\nspeed = 2\nenable-prefix-caching = false\n')
    monkeypatch.setenv("KVANTILE_PORT", "2")
    monkeypatch.setenv("KVANTILE_KV_TOKENS", "200")
    settings = resolve("--config", str(file), "--port", "3")
    assert (settings.port, settings.kv_tokens, settings.speed, settings.model) == (3, 200, 2.0, "m")
    assert not settings.enable_prefix_caching


@pytest.mark.parametrize("content", ["kv-token = 3", "port = ", "\x00"])
def test_a_wrong_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "emulator.toml"
    file.write_text(content)
    with pytest.raises(click.BadParameter, match=r"emulator\.toml"):
        resolve("--config", str(file))


@pytest.mark.parametrize("arguments", [("--port", "x"), ("--order", "last"), ("--no-such-flag",), ("--speed",)])
def test_a_wrong_flag_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(click.UsageError):
        resolve(*arguments)
