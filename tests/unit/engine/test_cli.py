"""Where the emulator's settings come from."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from kvantile_engine.emulator import cli
from kvantile_engine.emulator.cli import emulator
from kvantile_engine.emulator.settings import Settings
from kvantile_optimizer import geometry, hardware
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.spec import Model


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


def settings_of(*arguments: str) -> Settings:
    context = emulator.make_context("kvantile-emulator", list(arguments))
    with context:
        return cli._settings(context.params)


def test_a_gpu_gives_what_the_planner_assumes_of_it() -> None:
    settings = settings_of("--gpu", "RTX4090", "--model", "meta-llama/Llama-3.1-8B-Instruct")
    shape = geometry.of_model(Model(name="llama-3.1-8b", max_model_len=16))
    gpu = hardware.gpu_table()["RTX4090"]
    times = hardware.step_time(shape, gpu, 1, 1)
    assert settings.kv_tokens == hardware.kv_tokens(shape, gpu, 1, 1, 2048, 256)
    assert (settings.alpha, settings.beta, settings.gamma, settings.delta) == (
        times.alpha, times.beta, times.gamma, times.delta,
    )  # fmt: skip


def test_more_gpus_hold_more_and_what_is_given_stands(tmp_path: Path) -> None:
    file = tmp_path / "emulator.toml"
    file.write_text("alpha = 0.5\n")
    arguments = ("--gpu", "H100", "--model", "llama-3.1-8b", "--config", str(file), "--beta", "0.25")
    one, four = settings_of(*arguments), settings_of(*arguments, "--tp", "4")
    assert four.kv_tokens > 4 * one.kv_tokens
    assert four.delta < one.delta
    assert (four.alpha, four.beta) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "H1000", "--model", "llama-3.1-8b"], r"--gpu: found 'H1000' "),
        (["--gpu", "H100", "--model", "nonesuch"], "--model: found 'nonesuch'"),
        (["--gpu", "H100", "--model", "llama-3.1-8b", "--tp", "3"], "--tp: found 3"),
        (["--gpu", "L4", "--model", "llama-3.1-70b"], "more --tp"),
        (["--tp", "2"], "--tp: found 2 without --gpu"),
    ],
)
def test_hardware_that_cannot_be_is_told(arguments: list[str], message: str) -> None:
    with pytest.raises((InputError, click.UsageError), match=message):
        settings_of(*arguments)
