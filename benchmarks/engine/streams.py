"""Two thousand streams of one emulator at real-time pace: how late do tokens reach their clients?

The emulator's application runs in a process of its own, the clients in this one, which does nothing but note when
bytes come. Both read the same monotonic clock. A chunk belongs to the latest step that was delivered before it came;
its lag is counted from the end of that step on the virtual time line. Step times are the emulator's defaults (an 8B
model on one A100): steps of 2,000 sequences take 0.22 s, about 9,000 tokens a second.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import time
from bisect import bisect_right
from multiprocessing.connection import Connection

import numpy as np
import uvicorn
import uvloop

from benchmarks.optimizer.row import Row, Run, Setting, Target
from kvantile_engine.emulator.engine import Engine
from kvantile_engine.emulator.scheduler import Step
from kvantile_engine.emulator.service import build_app
from kvantile_engine.emulator.settings import Settings
from kvantile_optimizer.errors import WorkError

STREAMS, QUICK_STREAMS = 2_000, 50
MEASURED_S, QUICK_S = 20.0, 2.0
SETTLING_S = 60.0
"""The longest that all streams may take to begin."""
SETTINGS = Settings(max_num_seqs=4096, max_num_batched_tokens=4096, kv_tokens=4_000_000)
BODY = json.dumps({"prompt": "Tell me", "max_tokens": 16_000, "ignore_eos": True, "stream": True}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: emulator\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


class RecordedEngine(Engine):
    """Keeps when each step ended on the virtual time line and when its tokens were handed out, both monotonic."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.ends: list[float] = []
        self.delivered: list[float] = []
        self._line_began = time.monotonic() - self.line.now() / settings.speed

    def _deliver(self, step: Step, end: float) -> None:
        self.ends.append(self._line_began + end / self.settings.speed)
        self.delivered.append(time.monotonic())
        super()._deliver(step, end)


def _emulate(listener: socket.socket, pipe: Connection) -> None:
    """The emulator's process: serves, and answers the pipe twice with what was recorded and its processor time."""

    async def serve() -> None:
        engine = RecordedEngine(SETTINGS)
        config = uvicorn.Config(build_app(engine), lifespan="off", access_log=False, log_level="critical")
        tasks = [asyncio.create_task(engine.run()), asyncio.create_task(uvicorn.Server(config).serve([listener]))]
        for _ in range(2):
            await asyncio.to_thread(pipe.recv)
            pipe.send((engine.ends, engine.delivered, time.process_time()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    uvloop.run(serve())


class Client(asyncio.Protocol):
    """Notes when anything comes."""

    def __init__(self) -> None:
        self.came: list[float] = []

    def data_received(self, data: bytes) -> None:  # noqa: ARG002 - asyncio's signature
        self.came.append(time.monotonic())


async def _measure(port: int, pipe: Connection, count: int, seconds: float) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    pairs = [await loop.create_connection(Client, "127.0.0.1", port) for _ in range(count)]
    clients = [client for _, client in pairs]
    for transport, _ in pairs:
        transport.write(REQUEST)
    until = time.monotonic() + SETTLING_S
    while any(len(client.came) < 3 for client in clients):
        if time.monotonic() > until:
            raise WorkError(f"not all of {count} streams began within {SETTLING_S:.0f} s")
        await asyncio.sleep(0.1)
    pipe.send("begin")
    (_, _, cpu_before), began = pipe.recv(), time.monotonic()
    await asyncio.sleep(seconds)
    pipe.send("end")
    (ends, delivered, cpu_after), ended = pipe.recv(), time.monotonic()
    for transport, _ in pairs:
        transport.abort()
    came = [moment for client in clients for moment in client.came if began <= moment < began + seconds]
    lag_ms = 1e3 * np.array([moment - ends[bisect_right(delivered, moment) - 1] for moment in came])
    steps = [(end, out) for end, out in zip(ends, delivered, strict=True) if began <= out < began + seconds]
    return {
        "median": float(np.median(lag_ms)),
        "p99": float(np.percentile(lag_ms, 99)),
        "step p99": float(np.percentile([1e3 * (out - end) for end, out in steps], 99)),
        "tokens/s": len(came) / seconds,
        "core": (cpu_after - cpu_before) / (ended - began),
    }


def streams(setting: Setting, seed: int) -> Run:  # noqa: ARG001 - a row's signature
    """Lag of token times against the virtual time line, and how busy the emulator's core was."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with socket.create_server(("127.0.0.1", 0), backlog=STREAMS) as listener:
        process = context.Process(target=_emulate, args=(listener, theirs), daemon=True)
        process.start()
        try:
            count, seconds = (QUICK_STREAMS, QUICK_S) if setting.quick else (STREAMS, MEASURED_S)
            figures = uvloop.run(_measure(listener.getsockname()[1], ours, count, seconds))
        finally:
            process.terminate()
            process.join()
    return Run(figures, {"streams": ", ".join(f"{name} {value:,.2f}" for name, value in figures.items())})


ROWS = (
    Row(
        "streams",
        f"{STREAMS:,} streams of one emulator at real-time pace, lag of tokens",
        (
            Target("median", 100, "at most", "{:.1f} ms", what="median"),
            Target("p99", 220, "at most", "{:.1f} ms", what="P99 (a step is 220 ms)"),
            Target("core", 1.0, "at most", "{:.2f}", what="cores that the emulator needs"),
        ),
        streams,
        limit_s=400,
        alone=True,
    ),
)
