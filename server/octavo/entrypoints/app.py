"""The ASGI applications: which path leads to which handler."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from octavo.entrypoints import decisions, health, llama_cpp, models, pages
from octavo.entrypoints.anthropic import routes as anthropic
from octavo.entrypoints.batches import routes as batches
from octavo.entrypoints.errors import on_http_exception, on_unexpected
from octavo.entrypoints.ollama import routes as ollama
from octavo.entrypoints.openai import routes as openai
from octavo.entrypoints.openapi import document
from octavo.entrypoints.operation import Operation
from octavo.entrypoints.responses import routes as responses
from octavo.entrypoints.responses.background import Background
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.transport.middleware import ROUTE_PATH, RequestMiddleware
from octavo.entrypoints.transport.responses import JSON, route

STATE_OPERATIONS = health.OPERATIONS
WORK_OPERATIONS = (
    *pages.OPERATIONS,
    *openai.OPERATIONS,
    *responses.OPERATIONS,
    *decisions.OPERATIONS,
    *anthropic.OPERATIONS,
    *models.OPERATIONS,
    *batches.OPERATIONS,
    *ollama.OPERATIONS,
    *llama_cpp.OPERATIONS,
)


def build_app(state: ServerState) -> Starlette:
    """The ASGI application of the main port. Where operators have a port of their own, the map of blocks is only there:
    it tells how busy others are."""
    maps = () if state.args.management_port is not None else (health.BLOCKS_ALONE,)
    operations = (*WORK_OPERATIONS, *STATE_OPERATIONS, *maps)
    return _build(state, "Octavo", operations, state.args.api_key, state.args.root_path)


def build_management_app(state: ServerState) -> Starlette:
    """The ASGI application of the management port: probes and metrics, without API keys."""
    return _build(state, "Octavo management", (*STATE_OPERATIONS, health.BLOCKS, *models.ADAPTER_OPERATIONS))


class _Route(Route):
    """Tells the middleware which route a request took."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        return match, {**child_scope, ROUTE_PATH: self.path}


def _build(
    state: ServerState, title: str, operations: Sequence[Operation], api_keys: Sequence[str] = (), root_path: str = ""
) -> Starlette:
    async def openapi(request: Request) -> Response:
        return JSON(document(operations, state, title, root_path))

    endpoints = [(operation.method, operation.path, operation.handler) for operation in operations]
    endpoints.append(("GET", "/icon.svg", pages.icon))
    if not state.args.disable_fastapi_docs:
        docs = [("/openapi.json", openapi), ("/docs", pages.docs), ("/docs/{name}", pages.docs_file)]
        endpoints += [("GET", path, handler) for path, handler in docs]
    app = Starlette(
        routes=[_Route(path, route(handler), methods=[method]) for method, path, handler in endpoints],
        middleware=_middleware(state, api_keys, root_path),
        exception_handlers={HTTPException: on_http_exception, Exception: on_unexpected},
    )
    app.router.redirect_slashes = False
    app.state.server, app.state.title, app.state.background = state, title, Background(state)
    return app


def _middleware(state: ServerState, api_keys: Sequence[str], root_path: str) -> list[Middleware]:
    """Outermost first."""
    inner = Middleware(RequestMiddleware, state=state, api_keys=api_keys, root_path=root_path)
    args = state.args
    if not args.allowed_origins:
        return [inner]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
        expose_headers=["x-request-id", "request-id", "metadata"],
    )
    return [cors, inner]  # a preflight request has no key
