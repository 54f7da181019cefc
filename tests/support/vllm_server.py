"""Starts the real vLLM server on the CPU, with the plug-in, and reads its metrics.

The server says in its log when it listens; its model is `tiny_model`'s, its KV cache as small as a test asks for.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvantile_optimizer.local.supervise import free_port
from tests.support import real_vllm
from tests.support.gateways import eventually

HOST = "127.0.0.1"
MODEL = "tiny"
BLOCK_SIZE = 32
"""vLLM's CPU kernels take multiples of 32."""
READY = "Application startup complete"
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A server that listens at `url`; `log` is where it writes."""

    url: str
    log: Path

    def metric(self, name: str, **labels: str) -> float:
        """As `metric_of`."""
        return metric_of(self.url, name, **labels)


def metric_of(url: str, name: str, **labels: str) -> float:
    """The sum of the samples of that name that have these labels; 0 where there are none."""
    text = httpx.get(f"{url}/metrics", timeout=30.0).text
    found = 0.0
    for sample in re.finditer(rf"^{re.escape(name)}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE):
        if all(f'{label}="{value}"' in (sample[1] or "") for label, value in labels.items()):
            found += float(sample[2])
    return found


@contextmanager
def vllm_server(
    folder: Path, model: Path, *arguments: str, kv_blocks: int, plugin: bool = True, **env: str
) -> Iterator[VllmServer]:
    """The server from the moment it answers; its files go to `folder`. Without the `plugin` it is stock vLLM.

    Needs `real_vllm.python()`.
    """
    python, log = real_vllm.python(), folder / "vllm.log"
    assert python is not None, real_vllm.MISSING
    metrics = folder / "metrics"
    metrics.mkdir()
    port = free_port(HOST)
    command: list[str | Path] = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", MODEL),
        *("--host", HOST, "--port", str(port), "--load-format", "dummy", "--enforce-eager"),
        *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(kv_blocks + 1)),
        *(("--scheduler-cls", "kvantile_engine.ReservationScheduler") if plugin else ()),
        *arguments,
    ]
    with log.open("wb") as writing:
        process = subprocess.Popen(
            command,
            stdout=writing,
            stderr=subprocess.STDOUT,
            env=real_vllm.environment(PROMETHEUS_MULTIPROC_DIR=str(metrics), **env),
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, log)
        yield VllmServer(f"http://{HOST}:{port}", log)
    finally:
        _stop(process)


async def comes_to(server: VllmServer, value: float, name: str, **labels: str) -> None:
    """Waits until a metric has that value."""

    async def has() -> bool:
        return server.metric(name, **labels) == value

    await eventually(has, f"{name} came to {value}")


async def is_empty(server: VllmServer) -> None:
    """Waits until the engine holds nothing and has promised nothing."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    ours = ("kvantile:reserved_blocks", "kvantile:pooled_blocks")
    for name in (*names, *ours):
        await comes_to(server, 0, name)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the log says so; pytest-timeout ends a start that hangs."""
    # tail ends with the server, and its pipe wakes us: nothing is polled.
    with subprocess.Popen(
        ["tail", "--lines=+1", "--follow", f"--pid={process.pid}", log], stdout=subprocess.PIPE, text=True
    ) as tail:
        assert tail.stdout is not None
        ready = any(READY in line for line in tail.stdout)
        tail.kill()
    assert ready, "vLLM ended before it answered:\n" + log.read_text(encoding="utf-8", errors="replace")[-4000:]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Politely, then with all that it has started."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_TIMEOUT_S)
