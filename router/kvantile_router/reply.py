"""The answer to one client: headers once, then bytes, and an end that is right whatever has happened before it.

An error before the first byte is OpenAI's error JSON with its status; in the middle of a stream it is an error event
after which the stream ends without `[DONE]`. Written on bare ASGI: nothing between here and the socket may buffer.
Only a client of HTTP/1.0 gets its stream in one piece, since it knows no chunks and uvicorn would send it some.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from starlette.types import Send

from kvantile_router.errors import RouterError

REQUEST_ID, CLASS, GROUP, REPLICA, REASON = (
    b"x-request-id",
    b"x-kvantile-class",
    b"x-kvantile-group",
    b"x-kvantile-replica",
    b"x-kvantile-reason",
)
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_PASSED_ON = HOP_BY_HOP | {b"content-length", b"date", b"server", REQUEST_ID, CLASS, GROUP, REPLICA}
"""Headers of one hop, those that are written anew, and ours."""

RawHeaders = list[tuple[bytes, bytes]]


def passed_on(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes] = _NOT_PASSED_ON) -> RawHeaders:
    """End-to-end headers, names in lower case: without those in `dropped` and those that `connection` lists."""
    lowered = [(name.lower(), value) for name, value in headers]
    listed = {item.strip().lower() for name, value in lowered if name == b"connection" for item in value.split(b",")}
    return [(name, value) for name, value in lowered if name not in dropped and name not in listed]


class Reply:
    """What goes back. `labels` are headers that every answer carries; `status` is None until something was sent."""

    def __init__(self, send: Send, *, knows_chunks: bool = True) -> None:
        self._send = send
        self._held: tuple[RawHeaders, list[bytes]] | None = None
        self._knows_chunks = knows_chunks
        self.labels: dict[bytes, bytes] = {}
        self.status: int | None = None
        self.stream_is_done = False
        self._streams = False
        self._ended = False

    async def start(self, status: int, headers: RawHeaders, *, streams: bool) -> None:
        """Sends status and headers."""
        self.status, self._streams = status, streams
        if streams and not self._knows_chunks:
            self._held = headers, []
            return
        await self._send(
            {"type": "http.response.start", "status": status, "headers": headers + list(self.labels.items())}
        )

    async def write(self, data: bytes) -> None:
        """Sends a piece of the body; nothing for an empty one, which would end some clients' reading."""
        if data and self._held is not None:
            self._held[1].append(data)
        elif data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Ends the answer."""
        if self._held is not None and self.status is not None:
            (headers, pieces), self._held = self._held, None
            await self.whole(self.status, headers, b"".join(pieces))
            return
        self._ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Sends an answer in one piece."""
        await self.start(status, [*headers, (b"content-length", str(len(body)).encode())], streams=False)
        self._ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: RouterError) -> None:
        """Tells the client of an error in the way that is still open; of nothing once the answer has ended."""
        if self.status is None:
            await self.whole(error.status, error_headers(error), json.dumps(error.to_json()).encode())
        elif not self._ended:
            if self._streams and not self.stream_is_done:
                await self.write(b"data: " + json.dumps(error.to_json()).encode() + b"\n\n")
            await self.end()


def error_headers(error: RouterError) -> RawHeaders:
    """Headers of an error's answer; 429 and 503 say why and when to come back, 408 waits for no rest."""
    headers = [(b"content-type", b"application/json")]
    if error.reason is not None:
        headers.append((REASON, error.reason.encode()))
    if error.status in (429, 503):
        headers.append((b"retry-after", str(error.retry_after_s or 1).encode()))
    if error.status == 408:
        headers.append((b"connection", b"close"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
