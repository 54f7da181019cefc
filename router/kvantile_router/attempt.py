"""One attempt to have a replica answer: send the request, wait for the first piece, pass the rest on.

`open_answer` returns once something of the body is here (all of it, where it does not stream), so that whatever fails
before can be tried elsewhere without the client noticing. The relays write to the client what comes and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from kvantile_router import reply as replies
from kvantile_router.errors import ReplicaFailedError, RouterError
from kvantile_router.reply import Reply
from kvantile_router.stream import EventReader, Outcome, read_answer
from kvantile_router.upstream import Answer, RawHeaders, Upstream

FULL = 503
"""What engines say when their own queue is full; not a fault."""
RETRIED_STATUSES = frozenset((502, FULL, 504))
_NOT_SENT = replies.HOP_BY_HOP | {
    b"accept-encoding",
    b"authorization",
    b"content-length",
    b"expect",
    b"host",
    b"x-kvantile-class",
    replies.REQUEST_ID,
}
"""Headers of one hop, those made anew, and the client's credentials, which are the gateway's business only."""


@dataclass(slots=True)
class Opened:
    """An answer whose first piece has come: the whole body where it does not stream."""

    answer: Answer
    streams: bool
    first: bytes
    rest: AsyncGenerator[bytes]

    async def aclose(self) -> None:
        """Ends the exchange with the replica."""
        await self.rest.aclose()
        await self.answer.aclose()


class ReplicaError(RouterError):
    """A replica's own error that is not in OpenAI's shape; `status` is the replica's."""

    type = "upstream_error"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def request_headers(client: RawHeaders, request_id: str) -> RawHeaders:
    """What a replica gets of the client's headers. Compression is refused: the gateway reads along."""
    kept = replies.passed_on(client, _NOT_SENT)
    return [*kept, (replies.REQUEST_ID, request_id.encode()), (b"accept-encoding", b"identity")]


async def open_answer(upstream: Upstream, url: str, path: str, headers: RawHeaders, body: bytes) -> Opened:
    """Sends a request and waits for the first piece. Raises ReplicaFailedError where another replica may help."""
    answer = await upstream.post(url, path, headers, body)
    try:
        return await _first_piece(url, answer)
    except BaseException:
        await answer.aclose()
        raise


async def _first_piece(url: str, answer: Answer) -> Opened:
    if answer.status in RETRIED_STATUSES:
        raise ReplicaFailedError(f"replica {url} answered {answer.status}", reason="unavailable", status=answer.status)
    chunks = answer.chunks()
    streams = answer.header(b"content-type").startswith(b"text/event-stream")
    if streams:
        return Opened(answer, streams, await anext(chunks, b""), chunks)
    return Opened(answer, streams, b"".join([chunk async for chunk in chunks]), chunks)


async def relay_whole(reply: Reply, opened: Opened, outcome: Outcome) -> None:
    """Passes on an answer in one piece.

    Raises ReplicaError for an error that has another shape than OpenAI's, and for a redirect: it names the replica,
    and a client that follows it goes past the gateway.
    """
    answer, body = opened.answer, opened.first
    if 300 <= answer.status < 400:
        raise ReplicaError("the path is only known in another form (perhaps without a slash at its end)", 404)
    if answer.status >= 400 and not _is_openai_error(body):
        text = body[:500].decode(errors="replace").strip()
        raise ReplicaError(f"the replica answered {answer.status}: {text}", answer.status)
    read_answer(body, outcome)
    await reply.whole(answer.status, replies.passed_on(answer.headers), body)


async def relay_stream(reply: Reply, opened: Opened, reader: EventReader) -> None:
    """Passes on events until the stream or an error event ends them. Raises ReplicaFailedError when it breaks off."""
    answer = opened.answer
    await reply.start(answer.status, replies.passed_on(answer.headers), streams=True)
    chunk: bytes | None = opened.first
    while chunk is not None and not reader.failed:
        await reply.write(reader.feed(chunk))
        reply.stream_is_done = reader.done
        chunk = await anext(opened.rest, None)
    await reply.write(reader.flush())
    await reply.end()


def _is_openai_error(body: bytes) -> bool:
    try:
        data = json.loads(body)
    except ValueError:
        return False
    return isinstance(data, dict) and isinstance(data.get("error"), dict)
