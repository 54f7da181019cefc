"""The connections to replicas: one request out, status, headers and bytes back.

This is the seam behind which a relay on bare sockets can stand one day, so nothing above knows of httpx. Its
transports are used without its client, whose cookies, redirects and decoding a gateway must not have; there is one per
replica, because a pool looks through all of its connections for every request. There is no time-out on an answer: how
long one may take is the caller's to say.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import cast
from urllib.parse import quote

import httpx

from kvantile_router.errors import ReplicaFailedError

RawHeaders = list[tuple[bytes, bytes]]

CONNECT_TIMEOUT_S = 3.0
"""A machine that is gone does not even refuse; a live one answers well below a second."""
KEEPALIVE_S = 3.0
"""Below the five seconds after which uvicorn, and so vLLM, hangs up on idle connections."""

_TIMEOUTS = {"timeout": httpx.Timeout(None, connect=CONNECT_TIMEOUT_S).as_dict()}
_PLAIN = "/:@!$&'()*+,;=~"
"""What a path may hold as it is, beside letters, digits and `-._`."""
_NO_CONNECTION = (httpx.ConnectError, httpx.ConnectTimeout)


class Answer:
    """A replica's answer: `status` and `headers` have come, the body comes in `chunks`. It must be closed."""

    def __init__(self, url: str, response: httpx.Response) -> None:
        self._url = url
        self._stream = cast("httpx.AsyncByteStream", response.stream)
        self.status = response.status_code
        self.headers: RawHeaders = response.headers.raw

    def header(self, name: bytes) -> bytes:
        """The first value of a header given in lower case; empty when it is absent."""
        return next((value for key, value in self.headers if key.lower() == name), b"")

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The body as it arrives. Raises ReplicaFailedError when the connection breaks off."""
        try:
            async for chunk in self._stream:
                yield chunk
        except httpx.TransportError as error:
            raise _failure(self._url, error) from error

    async def aclose(self) -> None:
        """Ends the exchange; a body that has not come whole is cut, which tells the replica to stop."""
        await self._stream.aclose()


class Upstream:
    """Connections to all replicas."""

    def __init__(self) -> None:
        self._transports: dict[str, httpx.AsyncHTTPTransport] = {}

    async def post(self, url: str, path: str, headers: RawHeaders, body: bytes) -> Answer:
        """Sends a request to the replica at `url` and waits for status and headers. Raises ReplicaFailedError.

        `path` is decoded, as ASGI has it; quoting leaves nothing in it that would end the path.
        """
        return await self._send(url, httpx.Request("POST", url + quote(path, _PLAIN), headers=headers, content=body))

    async def status(self, url: str, path: str) -> int:
        """The status of a GET on a connection of its own. Raises ReplicaFailedError."""
        answer = await self._send(url, httpx.Request("GET", url + path, headers={"connection": "close"}))
        await answer.aclose()
        return answer.status

    async def keep_only(self, urls: set[str]) -> None:
        """Closes the connections to all replicas but `urls`; to the others nothing may be in flight."""
        for url in self._transports.keys() - urls:
            await self._transports.pop(url).aclose()

    async def aclose(self) -> None:
        """Closes all connections."""
        await self.keep_only(set())

    async def _send(self, url: str, request: httpx.Request) -> Answer:
        request.extensions = _TIMEOUTS
        try:
            return Answer(url, await self._transport(url).handle_async_request(request))
        except httpx.TransportError as error:
            raise _failure(url, error) from error
        except AttributeError as error:
            # On uvloop a connection that is reset as soon as it is made has no socket any more when httpcore asks for
            # its peer, and anyio does not expect that.
            raise ReplicaFailedError(f"replica {url} hung up at once", reason="unreachable", status=503) from error

    def _transport(self, url: str) -> httpx.AsyncHTTPTransport:
        transport = self._transports.get(url)
        if transport is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEPALIVE_S)
            transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)
            self._transports[url] = transport
        return transport


def _failure(url: str, error: httpx.TransportError) -> ReplicaFailedError:
    if isinstance(error, _NO_CONNECTION):
        return ReplicaFailedError(f"replica {url} cannot be reached", reason="unreachable", status=503)
    return ReplicaFailedError(f"replica {url} broke off its answer", reason="broken")
