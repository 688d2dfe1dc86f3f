"""Routes for probes, operators and routers: liveness, readiness, load, metrics.

The management port needs no API key for them; /health, /livez and /readyz need none on the main port either.
"""

from __future__ import annotations

import asyncio

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.admission import num_queued
from octavo.entrypoints.errors import APIError
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.responses import JSON
from octavo.version import __version__


class Load(msgspec.Struct):
    """The body of /load."""

    server_load: int  # requests in progress
    num_queued: int  # their sequences that wait to be scheduled


class Version(msgspec.Struct):
    """The body of /version."""

    version: str


async def _check_alive(state: ServerState) -> None:
    """Raises a 503 if the core is dead, frozen or stalled."""
    reason = state.why_not_alive()
    if reason is not None and state.engine.dead is None:
        # This process itself may have been blocked: read what has arrived meanwhile, and check again.
        await asyncio.sleep(0.05)
        reason = state.why_not_alive()
    if reason is not None:
        raise APIError(503, f"Not alive: {reason}", code="not_alive")


def _check_ready(state: ServerState) -> None:
    reason = state.why_not_ready()
    if reason is not None:
        raise APIError(503, f"Not ready: {reason}", code="not_ready", headers={"retry-after": "1"})


async def livez(request: Request) -> Response:
    """200 while the engine makes progress, loads, or is idle."""
    await _check_alive(state_of(request))
    return Response("ok", media_type="text/plain")


async def readyz(request: Request) -> Response:
    """200 while requests are admitted."""
    _check_ready(state_of(request))
    return Response("ok", media_type="text/plain")


async def health(request: Request) -> Response:
    """Alive and ready."""
    state = state_of(request)
    await _check_alive(state)
    _check_ready(state)
    return Response(media_type="text/plain")


async def ping(request: Request) -> Response:
    """SageMaker's health check; as /health."""
    return await health(request)


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    text = await asyncio.to_thread(state_of(request).metrics.expose)  # thousands of lines
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def version(request: Request) -> Response:
    """The server's version."""
    return JSON(Version(__version__))


async def load(request: Request) -> Response:
    """Requests in progress, and their sequences that wait to be scheduled."""
    state = state_of(request)
    return JSON(Load(state.num_responding, num_queued(state)))
