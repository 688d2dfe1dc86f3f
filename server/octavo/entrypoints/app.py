"""The application: which path leads to which handler."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from octavo import __version__
from octavo.entrypoints import health
from octavo.entrypoints.http import Handler, route
from octavo.entrypoints.middleware import Gate
from octavo.entrypoints.openai import chat, completions, models, tokenization
from octavo.entrypoints.openai.errors import on_http_exception, on_unexpected
from octavo.entrypoints.state import ServerState


def build_app(state: ServerState) -> FastAPI:
    """Everything that the main port serves."""
    args = state.args
    app = _new_app(state, "Octavo", args.api_key, root_path=args.root_path)
    _add_health(app)
    _add(app, "POST", "/v1/completions", completions.create_completion)
    _add(app, "POST", "/v1/chat/completions", chat.create_chat_completion)
    _add(app, "POST", "/tokenize", tokenization.tokenize)
    _add(app, "POST", "/detokenize", tokenization.detokenize)
    _add(app, "GET", "/v1/models", models.list_models)
    _add(app, "GET", "/v1/models/{model_id:path}", models.retrieve_model)
    return app


def build_management_app(state: ServerState) -> FastAPI:
    """The second port, for probes, monitors and operators: no work, no key."""
    app = _new_app(state, "Octavo management", ())
    _add_health(app)
    return app


def _new_app(state: ServerState, title: str, api_keys: Any, root_path: str = "") -> FastAPI:
    args = state.args
    middleware = [Middleware(Gate, state=state, api_keys=api_keys)]
    if args.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=args.allowed_origins,
            allow_methods=args.allowed_methods,
            allow_headers=args.allowed_headers,
            allow_credentials=args.allow_credentials,
            expose_headers=["x-request-id"],
        )
        middleware.insert(0, cors)  # outermost: a preflight has no key
    app = FastAPI(
        title=title,
        version=__version__,
        middleware=middleware,
        root_path=root_path,
        exception_handlers={HTTPException: on_http_exception, Exception: on_unexpected},
        redirect_slashes=False,
    )
    app.state.server = state
    return app


def _add_health(app: FastAPI) -> None:
    for path, handler in (
        ("/health", health.health),
        ("/livez", health.livez),
        ("/readyz", health.readyz),
        ("/ping", health.health),
        ("/metrics", health.metrics),
        ("/load", health.load),
        ("/version", health.version),
    ):
        _add(app, "GET", path, handler)


def _add(app: FastAPI, method: str, path: str, handler: Handler) -> None:
    app.add_api_route(path, route(handler), methods=[method])
