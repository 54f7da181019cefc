"""The emulator's process: how it starts, refuses to start, and ends."""

from __future__ import annotations

import signal
import socket
import subprocess

import httpx
import pytest

from tests.integration.engine.process import COMMAND, STOP_WITHIN_S, emulator

STREAM = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}


def test_sigterm_lets_streams_end_and_takes_no_more() -> None:
    with (
        emulator(alpha=0.01) as running,
        httpx.stream("POST", f"{running.url}/v1/completions", json=STREAM) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines)
        running.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert running.process.wait(STOP_WITHIN_S) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.url}/health")


def test_the_grace_period_bounds_the_stop() -> None:
    with (
        emulator(alpha=0.1, grace_period=1) as running,
        httpx.stream("POST", f"{running.url}/v1/completions", json={**STREAM, "max_tokens": 1000}) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines)
        running.process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
        assert running.process.wait(STOP_WITHIN_S) == 0


def test_a_port_in_use_is_told_and_ends_with_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run([*COMMAND, "--port", str(port)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert f"127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-tokens", "0"], "--kv-tokens"),
        (["--kv-tokens", "8", "--block-size", "16"], "at least one block"),
        (["--speed", "nan"], "--speed"),
        (["--order", "random"], "--order"),
        (["--config", "no-such-file.toml"], "no-such-file.toml"),
    ],
)
def test_a_wrong_setting_is_told_and_ends_with_2(arguments: list[str], message: str) -> None:
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
