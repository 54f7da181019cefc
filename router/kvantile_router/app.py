"""The gateway's surface: which path does what.

Inference paths go to `Gateway`, a bare ASGI application that FastAPI only mounts; everything else is small JSON. The
order matters: the models list is ours, every other POST under /v1 is passed on as it is.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from kvantile_router.ask import PLANNED_PATHS
from kvantile_router.errors import RouterError
from kvantile_router.gateway import Gateway
from kvantile_router.intake import ApiKeys
from kvantile_router.reply import error_headers
from kvantile_router.status import models_json, plan_json

PASSED_ON = ("/tokenize", "/detokenize", "/v1/{rest:path}")


def make_app(gateway: Gateway, keys: ApiKeys) -> FastAPI:
    """The application around a gateway."""
    app = FastAPI(title="Kvantile gateway", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_status(app, gateway)
    _add_models(app, gateway, keys)
    app.router.routes += [Route(path, gateway, methods=["POST"]) for path in (*PLANNED_PATHS, *PASSED_ON)]
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RouterError, _router_error)
    app.add_exception_handler(Exception, _own_fault)
    return app


def _add_status(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.get("/readyz")
    async def readyz() -> PlainTextResponse:
        ready = any(gateway.fleet.ready(name) for name in gateway.placement.table.groups)
        return PlainTextResponse("ok\n" if ready else "no replica is ready\n", 200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        gateway.metrics.read(gateway.fleet, gateway.lobby)
        return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/plan")
    async def plan() -> JSONResponse:
        return JSONResponse(plan_json(gateway.placement.table, gateway.fleet))

    @app.get("/observations")
    async def observations() -> JSONResponse:
        return JSONResponse(gateway.observer.observations().to_json())


def _add_models(app: FastAPI, gateway: Gateway, keys: ApiKeys) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> JSONResponse:
        keys.check(request.headers.get("authorization", ""))
        return JSONResponse({"object": "list", "data": [models_json(gateway.placement.table)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> JSONResponse:
        keys.check(request.headers.get("authorization", ""))
        if name != gateway.placement.table.model:
            raise HTTPException(404, f"model: {name[:200]!r} is not served here")
        return JSONResponse(models_json(gateway.placement.table))


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for it
    kinds = {404: "not_found_error", 405: "invalid_request_error"}
    body: dict[str, Any] = {"message": error.detail, "type": kinds.get(error.status_code, "internal_error")}
    body |= {"param": None, "code": error.status_code}
    return JSONResponse({"error": body}, error.status_code, headers=error.headers)


async def _own_fault(_: Request, __: Exception) -> JSONResponse:
    """For what nobody foresaw: the server logs it with its traceback, the client still gets OpenAI's JSON."""
    return JSONResponse(RouterError("the gateway failed").to_json(), RouterError.status)


async def _router_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RouterError)  # noqa: S101 - registered for it
    answer = JSONResponse(error.to_json(), error.status)
    for name, value in error_headers(error):
        answer.headers[name.decode()] = value.decode()
    return answer
