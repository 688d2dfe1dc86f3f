"""The application: which path leads to which handler."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from octavo.entrypoints import health, pages
from octavo.entrypoints.errors import on_http_exception, on_unexpected
from octavo.entrypoints.openai import chat, completions, embeddings, models, tokenization
from octavo.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from octavo.entrypoints.openai.responses import ChatCompletion, Completion, ModelCard, ModelList
from octavo.entrypoints.openapi import Operation, document
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.transport.middleware import Gate
from octavo.entrypoints.transport.responses import route
from octavo.version import __version__

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


def build_app(state: ServerState) -> FastAPI:
    """Everything that the main port serves."""
    return _build(state, "Octavo", (*WORK_OPERATIONS, *STATE_OPERATIONS), state.args.api_key, state.args.root_path)


def build_management_app(state: ServerState) -> FastAPI:
    """The second port, for probes, monitors and operators: no work, no key."""
    return _build(state, "Octavo management", STATE_OPERATIONS)


def _build(
    state: ServerState, title: str, operations: Sequence[Operation], api_keys: Sequence[str] = (), root_path: str = ""
) -> FastAPI:
    app = FastAPI(
        title=title,
        version=__version__,
        middleware=_middleware(state, api_keys, root_path),
        exception_handlers={HTTPException: on_http_exception, Exception: on_unexpected},
        redirect_slashes=False,
        redoc_url=None,
        docs_url=None,  # it would load Swagger UI from elsewhere
        openapi_url=None if state.args.disable_fastapi_docs else "/openapi.json",
    )
    app.state.server = state
    routes = [(operation.method, operation.path, operation.handler) for operation in operations]
    routes.append(("GET", "/icon.svg", pages.icon))
    if not state.args.disable_fastapi_docs:
        routes += [("GET", "/docs", pages.docs), ("GET", "/docs/{name}", pages.docs_file)]
    for method, path, handler in routes:
        methods = ["GET", "HEAD"] if method == "GET" else [method]  # load balancers like to ask with HEAD
        app.add_api_route(path, route(handler), methods=methods, include_in_schema=False)
    app.openapi = lambda: document(operations, state, title, root_path)  # type: ignore[method-assign]
    return app


def _middleware(state: ServerState, api_keys: Sequence[str], root_path: str) -> list[Middleware]:
    """Outermost first."""
    gate = Middleware(Gate, state=state, api_keys=api_keys, root_path=root_path)
    args = state.args
    if not args.allowed_origins:
        return [gate]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
        expose_headers=["x-request-id"],
    )
    return [cors, gate]  # a preflight has no key
