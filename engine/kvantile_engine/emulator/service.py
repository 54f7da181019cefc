"""The HTTP surface: OpenAI's completions, what vLLM serves beside them, and two addresses of our own.

Starlette routes; every error is in OpenAI's JSON shape. `GET /emulator/trace` gives the memory over time and
`POST /emulator/reset` empties cache and counters between two runs.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvantile_engine.emulator import history, text
from kvantile_engine.emulator.engine import Engine
from kvantile_engine.emulator.fields import RequestError
from kvantile_engine.emulator.metrics import EngineCollector
from kvantile_engine.emulator.requests import detokenized, parse, tokenized
from kvantile_engine.emulator.responses import CompletionResponse

LARGEST_BODY_BYTES = 32 * 2**20
"""Eight million tokens: more than any context, little enough to be read by one process."""

Endpoint = Callable[[Request], Awaitable[Response]]


def build_app(engine: Engine) -> Starlette:
    """The application; `engine.run` must be running beside it."""
    service = Service(engine)
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))

    async def metrics(request: Request) -> Response:  # noqa: ARG001 - Starlette's signature
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    routes: list[tuple[str, Endpoint, list[str]]] = [
        ("/v1/chat/completions", service.chat, ["POST"]),
        ("/v1/completions", service.completions, ["POST"]),
        ("/v1/models", service.models, ["GET"]),
        ("/tokenize", service.tokenize, ["POST"]),
        ("/detokenize", service.detokenize, ["POST"]),
        ("/health", service.health, ["GET"]),
        ("/ping", service.health, ["GET", "POST"]),
        ("/version", service.version, ["GET"]),
        ("/metrics", metrics, ["GET"]),
        ("/emulator/trace", service.trace, ["GET"]),
        ("/emulator/reset", service.reset, ["POST"]),
    ]
    return Starlette(
        routes=[Route(path, endpoint, methods=methods) for path, endpoint, methods in routes],
        exception_handlers={RequestError: _refuse, HTTPException: _no_such_way, ClientDisconnect: _nobody_there},
    )


@dataclass(frozen=True, slots=True)
class Service:
    """The endpoints of one engine."""

    engine: Engine

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._complete(request, chat=True)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._complete(request, chat=False)

    async def models(self, request: Request) -> Response:  # noqa: ARG002 - Starlette's signature, here and below
        """GET /v1/models."""
        settings = self.engine.settings
        card = {
            "id": settings.public_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "kvantile",
            "root": settings.model,
            "parent": None,
            "max_model_len": settings.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """GET /health and /ping."""
        return Response()

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        """GET /version."""
        return JSONResponse({"version": self.engine.settings.vllm_version})

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        ids = text.token_ids(tokenized(await _body(request), self.engine.settings))
        longest = self.engine.settings.max_model_len
        return JSONResponse({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": None})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        return JSONResponse({"prompt": text.shown(detokenized(await _body(request), self.engine.settings))})

    async def trace(self, request: Request) -> Response:  # noqa: ARG002
        """GET /emulator/trace: samples over time, in the order of `columns`."""
        engine = self.engine
        size = engine.settings.block_size
        return JSONResponse(
            {
                "columns": history.COLUMNS,
                "samples": engine.history.samples,
                "engineSecondsNow": engine.line.now() - engine.history.origin_s,
                "speed": engine.settings.speed,
                "kvTokens": engine.settings.total_blocks * size,
                "blockSize": size,
            }
        )

    async def reset(self, request: Request) -> Response:  # noqa: ARG002
        """POST /emulator/reset: 409 while a request is inside."""
        if not self.engine.reset():
            raise RequestError("requests are being served", status=HTTPStatus.CONFLICT, kind="ConflictError")
        return JSONResponse({"reset": True})

    async def _complete(self, request: Request, *, chat: bool) -> Response:
        completion = parse(await _body(request), chat=chat, settings=self.engine.settings)
        if (status := self.engine.lottery.refusal()) is not None:
            raise RequestError("failed on purpose (--fail 5xx)", status=status, kind=HTTPStatus(status).phrase)
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        headers = {"x-request-id": request_id} if self.engine.settings.enable_request_id_headers else {}
        return CompletionResponse(self.engine, completion, request_id, headers)


async def _body(request: Request) -> bytes:
    """The whole body. Raises RequestError for one that is too large to be meant."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > LARGEST_BODY_BYTES:
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            raise RequestError(f"a body of at most {LARGEST_BODY_BYTES} bytes", status=status, kind=status.phrase)
    return bytes(body)


async def _refuse(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature, as below
    assert isinstance(error, RequestError)  # noqa: S101 - the table above says so
    return _error(error)


async def _no_such_way(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - the table above says so
    message = f"{request.method} {request.url.path}: {error.detail}"
    refusal = RequestError(message, status=error.status_code, kind=HTTPStatus(error.status_code).phrase)
    return _error(refusal, error.headers)


def _error(refusal: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """In ASCII: a message may repeat half a surrogate pair of the client's, which no other encoding writes."""
    return Response(json.dumps(refusal.body), refusal.status, headers, "application/json")


async def _nobody_there(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=HTTPStatus.BAD_REQUEST)
