"""One inference request from its arrival to its last byte.

Parse, classify, refuse what no group can hold, find a place (or wait for one), send it to the replica with the hint,
and pass the answer on as it comes. Until the first byte of the answer has arrived a failed replica means another one;
status and headers are therefore held back until then. The work runs beside a watch on the client, whose going ends
the work, and with it the upstream request, at once. Everything that was counted up is counted down in `__call__` and
in the lease, whichever way a request ends.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import aclosing
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from kvantile_router import ask as asking
from kvantile_router import reply as replies
from kvantile_router.ask import Ask
from kvantile_router.attempt import FULL, Opened, open_answer, relay_stream, relay_whole, request_headers
from kvantile_router.classify import CharactersPerToken, Facts
from kvantile_router.clock import Clock
from kvantile_router.errors import (
    BadRequestError,
    DeadlinePassedError,
    ReplicaFailedError,
    RouterError,
    UnknownModelError,
)
from kvantile_router.fleet import Fleet
from kvantile_router.intake import ApiKeys, ClientGone, check_path, read_body, unless_gone
from kvantile_router.lobby import Lobby
from kvantile_router.metrics import CLIENT_GONE, Metrics
from kvantile_router.observer import Observer
from kvantile_router.placement import Lease, Placement, Wanted
from kvantile_router.reply import Reply
from kvantile_router.reserve import Size, hint_for, longest_tokens, outgoing_body
from kvantile_router.stream import EventReader, Outcome
from kvantile_router.table import ClassRoutes
from kvantile_router.upstream import RawHeaders, Upstream

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Exchange:
    """A request on its way through the gateway; times are plan seconds."""

    path: str
    headers: asking.Headers
    raw_headers: RawHeaders
    request_id: str
    arrival_s: float
    reply: Reply
    class_name: str = ""
    group: str = ""


class Gateway:
    """The ASGI application of the inference paths."""

    def __init__(
        self,
        *,
        placement: Placement,
        lobby: Lobby,
        fleet: Fleet,
        upstream: Upstream,
        observer: Observer,
        metrics: Metrics,
        clock: Clock,
        max_body_bytes: int,
        deadline_s: float | None,
        replica_header: bool,
        keys: ApiKeys,
    ) -> None:
        self.placement = placement
        self.lobby = lobby
        self.fleet = fleet
        self.observer = observer
        self.metrics = metrics
        self._upstream = upstream
        self._clock = clock
        self._max_body_bytes = max_body_bytes
        self._deadline_s = deadline_s
        self._replica_header = replica_header
        self._keys = keys
        self._characters = CharactersPerToken()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        exchange = self._exchange(scope, send)
        status = 500
        self.metrics.in_flight.inc()
        try:
            await self._serve(exchange, receive)
            status = exchange.reply.status or CLIENT_GONE
        except ClientGone:
            status = CLIENT_GONE
            log.debug("client went", extra={"request": exchange.request_id})
        except RouterError as error:
            status = exchange.reply.status or error.status
            await exchange.reply.fail(error)
        finally:
            self.metrics.in_flight.dec()
            self.metrics.requests.labels(exchange.class_name, exchange.group, str(status)).inc()

    def _exchange(self, scope: Scope, send: Send) -> Exchange:
        raw_headers: RawHeaders = scope["headers"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in raw_headers}
        request_id = headers.get("x-request-id", "")
        if not 0 < len(request_id) <= 128 or not request_id.isascii() or not request_id.isprintable():
            request_id = uuid.uuid4().hex
        reply = Reply(send, knows_chunks=scope["http_version"] != "1.0")
        reply.labels[replies.REQUEST_ID] = request_id.encode()
        return Exchange(scope["path"], headers, raw_headers, request_id, self._clock(), reply)

    async def _serve(self, exchange: Exchange, receive: Receive) -> None:
        self._keys.check(exchange.headers.get("authorization", ""))
        check_path(exchange.path)
        raw = await read_body(receive, self._max_body_bytes, exchange.headers.get("content-length"))
        ask = asking.parse(exchange.path, exchange.headers, raw)
        if ask.model != self.placement.table.model:
            raise UnknownModelError(f"model: {ask.model[:200]!r} is not served here", param="model")
        size = self._size(ask)
        routes = self._classify(ask, size)
        exchange.class_name = routes.name
        exchange.reply.labels[replies.CLASS] = routes.name.encode()
        self.observer.arrived(routes.name, exchange.arrival_s)
        self._refuse_too_big(routes, size)
        await unless_gone(receive, self._answer_in_time(exchange, ask, routes, size))

    def _size(self, ask: Ask) -> Size:
        prompt = ask.prompt_token_ids + self._characters.tokens(ask.prompt_characters)
        return Size(prompt, ask.sequences, ask.max_tokens)

    def _classify(self, ask: Ask, size: Size) -> ClassRoutes:
        return self.placement.table.classify(
            Facts(ask.path, ask.model, ask.headers, size.prompt_tokens, ask.max_tokens, ask.tools, ask.system)
        )

    def _refuse_too_big(self, routes: ClassRoutes, size: Size) -> None:
        table = self.placement.table
        groups = [table.groups[name] for name in routes.routes]
        if groups and not any(table.holds(group.name, size) for group in groups):
            longest = max(longest_tokens(group, table.plan.model.max_model_len) for group in groups)
            named = "max_tokens" if size.prompt_tokens <= longest else "messages"
            raise BadRequestError(
                f"{named}: about {size.prompt_tokens} prompt tokens and max_tokens {size.max_tokens or 0} "
                f"are more than the {longest} that any replica can hold",
                param=named,
            )

    async def _answer_in_time(self, exchange: Exchange, ask: Ask, routes: ClassRoutes, size: Size) -> None:
        deadline_s = routes.rules.slo.deadline_seconds or self._deadline_s
        left_s = None if deadline_s is None else exchange.arrival_s + deadline_s - self._clock()
        try:
            async with asyncio.timeout(None if left_s is None else self._clock.wall_s(left_s)):
                await self._answer(exchange, ask, routes, size)
        except TimeoutError:
            raise DeadlinePassedError(f"no complete answer within {deadline_s:g} s") from None

    async def _answer(self, exchange: Exchange, ask: Ask, routes: ClassRoutes, size: Size) -> None:
        """Finds a place and passes the answer on, on another replica for as long as nothing has come."""
        wanted = Wanted(routes.name, size, exchange.arrival_s, ask.prefix)
        failure: ReplicaFailedError | None = None
        while failure is None or self.placement.has_untried(wanted):
            with await self.lobby.acquire(wanted) as lease:
                if failure is None:
                    self.metrics.queue.labels(routes.name).observe(self._clock() - exchange.arrival_s)
                try:
                    opened = await self._open(exchange, ask, routes, lease)
                except ReplicaFailedError as error:
                    log.warning("replica failed", extra={"url": lease.replica.url, "reason": error.reason})
                    self.metrics.retries.labels(error.reason).inc()
                    wanted.tried.append(lease.replica)
                    failure = error
                    continue
                async with aclosing(opened):
                    self._label(exchange, lease)
                    await self._pass_on(exchange, ask, size, opened, lease)
                return
        raise failure

    async def _open(self, exchange: Exchange, ask: Ask, routes: ClassRoutes, lease: Lease) -> Opened:
        ttft_left_s = exchange.arrival_s + routes.rules.slo.ttft_seconds - self._clock()
        said = hint_for(lease.route, ask.max_tokens, ttft_left_s)
        allowed = self.placement.table.plan.router.allow_hints
        body = outgoing_body(ask, said, client_hints_allowed=allowed) if ask.is_planned else ask.raw
        headers = request_headers(exchange.raw_headers, exchange.request_id)
        dispatched_s = self._clock()
        try:
            opened = await open_answer(self._upstream, lease.replica.url, ask.path, headers, body)
        except ReplicaFailedError as error:
            if error.status != FULL:
                self.fleet.failed(lease.replica)
            raise
        self._note_status(lease, opened.answer.status)
        if opened.streams:
            self.lobby.first_token(lease.route.group, self._clock() - dispatched_s)
        return opened

    def _note_status(self, lease: Lease, status: int) -> None:
        """A 4xx is the client's and says nothing about the replica."""
        if status >= 500:
            self.fleet.failed(lease.replica)
        elif status < 400:
            lease.replica.breaker.succeeded()

    def _label(self, exchange: Exchange, lease: Lease) -> None:
        exchange.group = lease.route.group
        exchange.reply.labels[replies.GROUP] = lease.route.group.encode()
        if self._replica_header:
            exchange.reply.labels[replies.REPLICA] = lease.replica.url.encode()

    async def _pass_on(self, exchange: Exchange, ask: Ask, size: Size, opened: Opened, lease: Lease) -> None:
        """Relays an answer whose first piece is here, and learns from it however it ends."""
        first_s = self._clock()
        self.metrics.ttft.labels(exchange.class_name).observe(first_s - exchange.arrival_s)
        outcome, complete = Outcome(), False
        try:
            if opened.streams:
                await relay_stream(exchange.reply, opened, EventReader(outcome, strip_usage=not ask.wants_usage))
            else:
                await relay_whole(exchange.reply, opened, outcome)
            complete = True
        except ReplicaFailedError:
            self.fleet.failed(lease.replica)
            raise
        finally:
            if ask.is_planned and opened.answer.status == 200:
                self._learn(exchange, ask, size, outcome, complete=complete, seconds=self._clock() - first_s)

    def _learn(
        self, exchange: Exchange, ask: Ask, size: Size, outcome: Outcome, *, complete: bool, seconds: float
    ) -> None:
        """`seconds` passed since the first byte. A cut answer tells at least how long it had become."""
        tokens, name = outcome.seen_tokens, exchange.class_name
        self.metrics.output_tokens.labels(name).inc(tokens)
        if outcome.prompt_tokens is not None:
            self._characters.observe(ask.prompt_characters, outcome.prompt_tokens - ask.prompt_token_ids)
        if ask.sequences != 1 or tokens == 0:
            return
        censored = not complete or outcome.cut_by_length or outcome.failed
        self.observer.answered(name, outcome.prompt_tokens or size.prompt_tokens, tokens, censored=censored)
        if ask.streams and tokens > 1:
            self.metrics.tpot.labels(name).observe(seconds / (tokens - 1))
