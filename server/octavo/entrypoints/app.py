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

from octavo.entrypoints import health, pages
from octavo.entrypoints.errors import on_http_exception, on_unexpected
from octavo.entrypoints.openai import chat, completions, embeddings, models, scoring, tokenization
from octavo.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from octavo.entrypoints.openai.responses import ChatCompletion, Completion, ModelCard, ModelList
from octavo.entrypoints.openapi import Operation, document
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.transport.middleware import ROUTE_PATH, RequestMiddleware
from octavo.entrypoints.transport.responses import JSON, route

STATE_OPERATIONS = (
    Operation("GET", "/health", health.health, "Alive and ready", open=True),
    Operation("GET", "/livez", health.livez, "Making progress, or nothing to do", open=True),
    Operation("GET", "/readyz", health.readyz, "Loaded and taking requests", open=True),
    Operation("GET", "/ping", health.ping, "Alive and ready"),
    Operation("GET", "/metrics", health.metrics, "Metrics in Prometheus' text format"),
    Operation("GET", "/load", health.load, "How much is being served", answer=health.Load),
    Operation("GET", "/version", health.version, "The server's version", answer=health.Version),
)
WORK_OPERATIONS = (
    Operation("GET", "/", pages.index, "This server at a glance", answer="text/html"),
    Operation(
        "POST", "/v1/completions", completions.create_completion, "Complete a text",
        body=CompletionRequest, answer=Completion, streams=True,
    ),
    Operation(
        "POST", "/v1/chat/completions", chat.create_chat_completion, "Answer a conversation",
        body=ChatCompletionRequest, answer=ChatCompletion, streams=True,
    ),
    Operation(
        "POST", "/v1/embeddings", embeddings.create_embeddings, "Vectors of texts",
        body=embeddings.EmbeddingRequest, answer=embeddings.EmbeddingList,
    ),
    *(
        Operation("POST", path, scoring.rerank, "Documents in the order of their relevance to a query",
                  body=scoring.RerankRequest, answer=scoring.RerankResponse, name="rerank" + path.replace("/", "_"))
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    *(
        Operation("POST", path, scoring.create_score, "How well texts go together",
                  body=scoring.ScoreRequest, answer=scoring.ScoreList, name="score" + path.replace("/", "_"))
        for path in ("/v1/score", "/score")
    ),
    Operation(
        "POST", "/classify", scoring.classify, "Classes of texts",
        body=scoring.ClassifyRequest, answer=scoring.ClassificationList,
    ),
    Operation("GET", "/v1/models", models.list_models, "The models served", answer=ModelList),
    Operation("GET", "/v1/models/{model_id:path}", models.retrieve_model, "One of them", answer=ModelCard),
    Operation(
        "POST", "/tokenize", tokenization.tokenize, "Token ids of a text or a conversation",
        body=tokenization.TokenizeRequest, answer=tokenization.TokenizeResponse,
    ),
    Operation(
        "POST", "/detokenize", tokenization.detokenize, "The text of token ids",
        body=tokenization.DetokenizeRequest, answer=tokenization.DetokenizeResponse,
    ),
)  # fmt: skip


def build_app(state: ServerState) -> Starlette:
    """The ASGI application of the main port."""
    return _build(state, "Octavo", (*WORK_OPERATIONS, *STATE_OPERATIONS), state.args.api_key, state.args.root_path)


def build_management_app(state: ServerState) -> Starlette:
    """The ASGI application of the management port: probes and metrics, without API keys."""
    return _build(state, "Octavo management", STATE_OPERATIONS)


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
    app.state.server, app.state.title = state, title
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
        expose_headers=["x-request-id"],
    )
    return [cors, inner]  # a preflight request has no key
