"""The HTTP application and its routes."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp

import draftwire
from draftwire.runtime.addresses import is_loopback
from draftwire.runtime.interceptor import ServiceGate
from draftwire.runtime.metrics_endpoint import MetricsPage
from draftwire.runtime.served_request import REQUEST_ID
from draftwire_gateway.auth.access import Access
from draftwire_gateway.body_budget import BodyBudget
from draftwire_gateway.config import GatewayConfig
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.body import DetokenizeBody, TokenizeBody
from draftwire_gateway.http.body_reading import BodyReader, header
from draftwire_gateway.http.error_bodies import UNAVAILABLE_RETRY_S, body_of
from draftwire_gateway.http.model_list import ListDrafters, listed_models, model_named
from draftwire_gateway.http.openapi_document import openapi_document
from draftwire_gateway.http.playground_pages import HEADERS, Page, read_pages
from draftwire_gateway.http.refusal import RefusedError
from draftwire_gateway.http.request_guard import Guard
from draftwire_gateway.http.request_observer import RequestObserver
from draftwire_gateway.http.route_names import route_of
from draftwire_gateway.http.routes import CHAT, COMPLETIONS, RESPONSES
from draftwire_gateway.http.streaming import GeneratingRoute
from draftwire_gateway.http.text_routes import TextRoute, detokenize, tokenize


def make_app(
    core: GatewayCore,
    drafters: ListDrafters,
    access: Access,
    gate: ServiceGate,
    pages: Mapping[str, Page] | None = None,
) -> FastAPI:
    """Returns the application. `pages` are static files by path; by default, those of the playground."""
    app = FastAPI(title="draftwire", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(Guard, gate=gate, hosts=_hosts(core.config), origins=core.config.origins)
    if core.config.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=core.config.origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["retry-after", "retry-after-ms", REQUEST_ID],
        )
    pages = read_pages() if pages is None else pages
    app.add_middleware(  # the outermost: what the others refuse is counted too
        RequestObserver,
        route_of=partial(route_of, files=frozenset(pages)),
        metrics=core.metrics,
        logs=core.config.access_log,
    )
    app.add_exception_handler(HTTPException, _no_route)
    bodies = BodyReader(
        core.config.connections.max_message_bytes, ignores_unknown=core.config.unknown_parameters == "ignore"
    )
    waiting = BodyBudget()
    common = (core, drafters, access, bodies)
    applications: dict[str, ASGIApp] = {
        "/v1/completions": GeneratingRoute(COMPLETIONS, *common, waiting),
        "/v1/chat/completions": GeneratingRoute(CHAT, *common, waiting),
        "/v1/responses": GeneratingRoute(RESPONSES, *common, waiting),
        "/tokenize": TextRoute(TokenizeBody, tokenize, *common),
        "/detokenize": TextRoute(DetokenizeBody, detokenize, *common),
    }
    for path, application in applications.items():
        app.router.routes.append(StarletteRoute(path, application, methods=["POST"]))
    _add_description(app)
    _add_models(app, partial(listed_models, core, drafters, int(time.time())), access)
    _add_state(app, core, access, gate)
    for path, page in pages.items():
        app.add_api_route(path, partial(_page, page), methods=["GET"], response_model=None)
    return app


def _hosts(config: GatewayConfig) -> frozenset[str] | None:
    """Returns the names under which HTTP is answered; None if under all: see `GatewayConfig.http_allowed_hosts`."""
    believes_this_machine = not config.needs_tokens and is_loopback(config.server.host)
    return config.allowed_hosts if config.allowed_hosts or believes_this_machine else None


def _add_description(app: FastAPI) -> None:
    @cache
    def making() -> asyncio.Task[Response]:
        return asyncio.create_task(make())

    async def make() -> Response:
        return _json(await asyncio.to_thread(openapi_document))  # which takes a moment

    @app.get("/openapi.json", response_model=None)
    async def openapi() -> Response:
        return await asyncio.shield(making())  # one task for all requests, also for those that come meanwhile


def _add_models(app: FastAPI, models: Callable[[], list[dict[str, Any]]], access: Access) -> None:
    @app.get("/v1/models", response_model=None)
    async def list_models(request: Request) -> Response:
        access.authenticate(header(request.scope, "authorization"))
        return _json({"object": "list", "data": models()})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def retrieve_model(request: Request, name: str) -> Response:
        access.authenticate(header(request.scope, "authorization"))
        return _json(model_named(name, models()))


def _add_state(app: FastAPI, core: GatewayCore, access: Access, gate: ServiceGate) -> None:
    page = MetricsPage(core.metrics.registry)

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return _json({"version": draftwire.__version__})

    def state(reason: str) -> Response:
        if not reason:
            return _json({"status": "ok"})
        return _json({"status": reason}, 503, {"retry-after": f"{UNAVAILABLE_RETRY_S:.0f}"})

    @app.api_route("/ready", methods=["GET", "HEAD"], response_model=None)
    async def ready() -> Response:
        return state(gate.unready)

    @app.api_route("/ping", methods=["GET", "HEAD", "POST"], response_model=None)
    @app.api_route("/health", methods=["GET", "HEAD"], response_model=None)
    async def health() -> Response:
        return state(gate.refusal)

    @app.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        access.authenticate(header(request.scope, "authorization"))
        return Response(await page.text(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


async def _page(page: Page) -> Response:
    return Response(page.content, headers={**HEADERS, "content-type": page.content_type})


async def _no_route(_request: Request, error: Exception) -> Response:
    """Returns unknown routes and methods as errors in OpenAI's format."""
    assert isinstance(error, HTTPException)
    messages = {404: "there is no such route", 405: "the route does not take this method"}
    refusal = RefusedError(error.status_code, messages.get(error.status_code, "the request is not understood"))
    headers = {**(error.headers or {}), "content-type": "application/json"}
    return Response(body_of(refusal), error.status_code, headers)


def _json(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    fields = {**(headers or {}), "content-type": "application/json", "cache-control": "no-store"}
    return Response(json.dumps(value, ensure_ascii=False), status, fields)
