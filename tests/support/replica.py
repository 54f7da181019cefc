"""A stand-in replica whose every byte a test controls, on a real socket.

It speaks just enough HTTP/1.1. Each POST is handed to a script, which answers piece by piece through its `Exchange`;
the default script is an engine that streams two tokens. What was received stays in `received`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

MODEL = "model"


@dataclass(eq=False)
class Exchange:
    """One request to the stand-in, and the way to answer it. `gone` is set when the client hangs up."""

    path: str
    headers: dict[str, str]
    raw: bytes
    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.raw)
        return data

    @property
    def hint(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body.get("vllm_xargs", {})
        return found

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def respond(self, status: int, body: object, content_type: str = "application/json") -> None:
        """An answer in one piece; bytes go out as they are, everything else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(data)}\r\n\r\n"
        await self.write(head.encode() + data)

    async def start_stream(self) -> None:
        await self.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    async def send(self, data: bytes) -> None:
        """One chunk of a stream."""
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, data: object) -> None:
        await self.send(b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n")

    async def token(self, text: str, finish: str | None = None) -> None:
        await self.event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})

    async def usage(self, prompt: int, completion: int) -> None:
        """The usage chunk, if the request asks for it as an engine is asked."""
        if self.body.get("stream_options", {}).get("include_usage"):
            await self.event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})

    async def end_stream(self, *, done: bool = True) -> None:
        if done:
            await self.event(b"[DONE]")
        await self.write(b"0\r\n\r\n")

    def cut(self) -> None:
        """Hangs up in the middle."""
        self.writer.transport.abort()


Script = Callable[[Exchange], Awaitable[None]]


async def two_tokens(exchange: Exchange) -> None:
    """An engine that answers at once."""
    if not exchange.body.get("stream"):
        await exchange.respond(200, answer(2))
        return
    await exchange.start_stream()
    await exchange.token("a")
    await exchange.token("b", finish="stop")
    await exchange.usage(10, 2)
    await exchange.end_stream()


def answer(tokens: int, finish: str = "stop", prompt: int = 10) -> dict[str, Any]:
    """The JSON of an answer in one piece."""
    message = {"role": "assistant", "content": "x " * tokens}
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens},
    }


@dataclass(eq=False)
class StandIn:
    """The replica. `script` and `healthy` may change at any time; `arrived` hands out requests as they come."""

    script: Script = two_tokens
    healthy: bool = True
    received: list[Exchange] = field(default_factory=list)
    arrived: asyncio.Queue[Exchange] = field(default_factory=asyncio.Queue)
    port: int = 0
    _server: asyncio.Server | None = None
    _connections: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listens: on a free port the first time, on the same one after `stop`."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Dies: refuses new connections and breaks off those that are open."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()
        if self._server is not None:
            await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while await self._serve(reader, writer):
                    pass
        finally:
            self._connections.discard(writer)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        exchange = Exchange(path, headers, raw, writer)
        if method == "GET":
            await exchange.respond(200 if self.healthy else 503, {})
            return headers.get("connection") != "close"
        self.received.append(exchange)
        self.arrived.put_nowait(exchange)
        return await self._run_script(exchange, reader)

    async def _run_script(self, exchange: Exchange, reader: asyncio.StreamReader) -> bool:
        """Runs the script while watching the connection; a byte that comes meanwhile would be a test's mistake."""
        script = asyncio.ensure_future(self.script(exchange))
        watch = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({script, watch}, return_when=asyncio.FIRST_COMPLETED)
            if script.done():
                script.result()
                return await self._next_byte(watch, reader)
            exchange.gone.set()
            return False
        finally:
            script.cancel()
            watch.cancel()
            await asyncio.wait({script, watch})

    async def _next_byte(self, watch: asyncio.Future[bytes], reader: asyncio.StreamReader) -> bool:
        """Whether another request follows on the connection; its first byte is put back."""
        byte = await asyncio.shield(watch)
        if byte:
            reader._buffer[:0] = byte  # type: ignore[attr-defined] # asyncio has no way to peek
        return bool(byte)


@asynccontextmanager
async def stand_in(script: Script = two_tokens) -> AsyncIterator[StandIn]:
    """A running stand-in."""
    replica = StandIn(script)
    await replica.start()
    try:
        yield replica
    finally:
        await replica.stop()
