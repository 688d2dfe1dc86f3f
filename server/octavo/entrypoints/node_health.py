"""Answers probes on nodes of an engine that do not serve: /health, /livez and /readyz, as node 0 has them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from socket import socket

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from octavo.entrypoints import health
from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.errors import on_http_exception, on_unexpected
from octavo.entrypoints.transport.http_server import make_http_server, quiet_access_log
from octavo.entrypoints.transport.responses import route

_ROUTES = (("/health", health.health), ("/livez", health.livez), ("/readyz", health.readyz))


def answer_probes(state: health.Probed, args: ServerArgs, sockets: Sequence[socket]) -> None:
    """Answer on ``sockets``, of the main port and, if there is one, of the management port, as long as this process
    lives. A thread does it: the main one waits for other ranks. Raises ConfigError for a bad certificate."""
    app = Starlette(
        routes=[Route(path, route(handler), methods=["GET"]) for path, handler in _ROUTES],
        exception_handlers={HTTPException: on_http_exception, Exception: on_unexpected},
    )
    app.router.redirect_slashes = False
    app.state.server = state
    servers = [make_http_server(app, args, main=i == 0) for i in range(len(sockets))]
    quiet_access_log()

    async def run() -> None:
        await asyncio.gather(*(server.serve(sockets=[sock]) for server, sock in zip(servers, sockets, strict=True)))

    threading.Thread(target=asyncio.run, args=(run(),), name="probes", daemon=True).start()
