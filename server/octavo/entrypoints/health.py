"""Is it alive, is it ready, how much is it doing: for probes, operators and routers. None of these needs a key on the
management port; the three health routes need none anywhere."""

from __future__ import annotations

import asyncio

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.errors import APIError
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.responses import JSON
from octavo.version import __version__


class Load(msgspec.Struct):
    server_load: int  # requests that are being answered
    num_queued: int  # sequences of them that wait for a place


class Version(msgspec.Struct):
    version: str


async def _check_alive(state: ServerState) -> None:
    """Fails when the core is dead, frozen or stalled."""
    reason = state.why_not_alive()
    if reason is not None and state.engine.dead is None:
        # This process itself may have been held up: let what has arrived in the meantime be read, and look again.
        await asyncio.sleep(0.05)
        reason = state.why_not_alive()
    if reason is not None:
        raise APIError(503, f"Not alive: {reason}", code="not_alive")


def _check_ready(state: ServerState) -> None:
    reason = state.why_not_ready()
    if reason is not None:
        raise APIError(503, f"Not ready: {reason}", code="not_ready", headers={"retry-after": "1"})


async def livez(request: Request) -> Response:
    """200 while the engine makes progress (or loads, or has nothing to do)."""
    await _check_alive(state_of(request))
    return Response("ok", media_type="text/plain")


async def readyz(request: Request) -> Response:
    """200 while new requests are taken."""
    _check_ready(state_of(request))
    return Response("ok", media_type="text/plain")


async def health(request: Request) -> Response:
    """Alive and ready."""
    state = state_of(request)
    await _check_alive(state)
    _check_ready(state)
    return Response(media_type="text/plain")


async def ping(request: Request) -> Response:
    """What SageMaker calls; as /health."""
    return await health(request)


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    text = await asyncio.to_thread(state_of(request).metrics.expose)  # thousands of lines, while tokens are waited for
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def version(request: Request) -> Response:
    return JSON(Version(__version__))


async def load(request: Request) -> Response:
    """Requests that are being served, and the sequences of them that wait for a place."""
    state = state_of(request)
    return JSON(Load(state.num_responding, state.num_queued()))
