"""What stands between the socket and the request: keys, the body's length, and the watch on the client.

The watch is a task of its own because a client that goes must be noticed also while nothing flows, and ASGI tells it
only to whoever waits for it.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Coroutine, Sequence

from starlette.types import Receive

from kvantile_router.errors import TooLargeError, TooSlowError, UnauthorizedError, UnknownPathError

BODY_PAUSE_S = 30.0
"""On the wall, between two pieces of a body: who stalls longer holds up memory, and the gateway's end, for nothing."""


class ClientGone(Exception):  # noqa: N818 - an event, not an error
    """The client has closed its connection."""


class ApiKeys:
    """The keys that clients may use; none means that nobody is asked."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, authorization: str) -> None:
        """Raises UnauthorizedError unless it is `Bearer KEY`. Every key is compared, each in constant time."""
        if not self._keys:
            return
        scheme, _, given = authorization.partition(" ")
        found = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(found):
            raise UnauthorizedError("a valid key is needed: Authorization: Bearer KEY")


def check_path(path: str) -> None:
    """Raises UnknownPathError for a path with dots: on a replica it would lead to what is not for clients."""
    if not {".", ".."}.isdisjoint(path.split("/")):
        raise UnknownPathError("the path must not have the steps . and ..")


async def read_body(
    receive: Receive, max_bytes: int, content_length: str | None, pause_s: float = BODY_PAUSE_S
) -> bytes:
    """The request's body.

    Raises TooLargeError, before reading where the length is announced, TooSlowError and ClientGone.
    """
    if content_length is not None and content_length.isdecimal() and int(content_length) > max_bytes:
        raise TooLargeError(f"the body is longer than {max_bytes} bytes")
    parts, length = [], 0
    while True:
        try:
            async with asyncio.timeout(pause_s):
                message = await receive()
        except TimeoutError:
            raise TooSlowError(f"nothing more of the body came for {pause_s:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        length += len(part)
        if length > max_bytes:
            raise TooLargeError(f"the body is longer than {max_bytes} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def unless_gone(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Does `work`; cancels it and raises ClientGone when the client goes first. The body must have been read."""
    working = asyncio.create_task(work, name="request")
    watching = asyncio.create_task(_gone(receive), name="client watch")
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.wait({working, watching})
    working.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
