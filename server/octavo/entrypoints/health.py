"""Routes for probes, operators and routers: liveness, readiness, load, metrics.

The management port needs no API key for them; /health, /livez and /readyz need none on the main port either.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from dataclasses import asdict, replace
from typing import Protocol

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.admission import num_queued
from octavo.entrypoints.errors import APIError
from octavo.entrypoints.operation import Operation
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.responses import JSON
from octavo.interface.block_map import count_blocks
from octavo.version import __version__


class Load(msgspec.Struct):
    """The body of /load."""

    server_load: int  # requests in progress
    num_queued: int  # their sequences that wait to be scheduled


class RunningRequest(msgspec.Struct):
    """A request that is being answered."""

    request_id: str  # of X-Request-Id; the answer's own id ends with it
    num_tokens: list[int]  # of each unfinished sample, the prompt's too


class Blocks(msgspec.Struct, omit_defaults=True):
    """The body of /octavo/blocks. Of ``num_blocks`` each is free, used or cached; ``shared`` are used, ``partial`` used
    or cached. ``cells``: a byte for each block, in base64, the first that of block 1: how many hold it in six bits,
    then whether the prefix cache offers it, then whether it offers less than a whole block. ``unfilled``: places for
    tokens in used blocks where no token is yet."""

    block_size: int
    num_blocks: int
    free: int
    used: int
    shared: int
    cached: int
    partial: int
    unfilled: int
    cells: str
    running: list[RunningRequest]
    request_id: str | None = None
    block_ids: list[list[int]] | None = None  # that each sample of the request holds, in order


class Version(msgspec.Struct):
    """The body of /version."""

    version: str


class Probed(Protocol):
    """Answers to probes: a server, or a node beside one."""

    @property
    def has_ended(self) -> bool:
        """It can never be alive again."""

    def why_not_alive(self) -> str | None:
        """Say why the liveness probe fails; None if it does not."""

    def why_not_ready(self) -> str | None:
        """Say why the readiness probe fails; None if it does not."""


def _probed(request: Request) -> Probed:
    state: Probed = request.app.state.server
    return state


async def _check_alive(state: Probed) -> None:
    """Raises a 503 if the core is dead, frozen or stalled."""
    reason = state.why_not_alive()
    if reason is not None and not state.has_ended:
        # This process itself may have been blocked: read what has arrived meanwhile, and check again.
        await asyncio.sleep(0.05)
        reason = state.why_not_alive()
    if reason is not None:
        raise APIError(503, f"Not alive: {reason}", code="not_alive")


def _check_ready(state: Probed) -> None:
    reason = state.why_not_ready()
    if reason is not None:
        raise APIError(503, f"Not ready: {reason}", code="not_ready", headers={"retry-after": "1"})


async def livez(request: Request) -> Response:
    """200 while the engine makes progress, loads, or is idle."""
    await _check_alive(_probed(request))
    return Response("ok", media_type="text/plain")


async def readyz(request: Request) -> Response:
    """200 while requests are admitted."""
    _check_ready(_probed(request))
    return Response("ok", media_type="text/plain")


async def health(request: Request) -> Response:
    """Alive and ready."""
    state = _probed(request)
    await _check_alive(state)
    _check_ready(state)
    return Response(media_type="text/plain")


async def ping(request: Request) -> Response:
    """SageMaker's health check; as /health."""
    return await health(request)


async def metrics(request: Request) -> Response:
    """Prometheus' text format; with ``name[]``, as Prometheus' clients have it, the samples of these names alone."""
    names = request.query_params.getlist("name[]")
    text = await asyncio.to_thread(state_of(request).metrics.expose, names)  # thousands of lines
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def blocks(request: Request) -> Response:
    """The KV cache's blocks: how many are what, a byte for each, and with ``request_id`` those that a request holds."""
    return JSON(await _blocks(request))


async def blocks_alone(request: Request) -> Response:
    """Answer as `blocks`, without the requests that run: by its id one gets at another's stored response."""
    found = await _blocks(request)
    found.running = []
    return JSON(found)


async def _blocks(request: Request) -> Blocks:
    state = state_of(request)
    ready, block_size = state.engine.ready, state.engine.config.cache.block_size
    if ready is None:
        raise APIError(503, "Not ready: the model is loading", code="not_ready", headers={"retry-after": "1"})
    cells, request_id = state.engine.client.read_block_map(), request.query_params.get("request_id")
    samples = None if request_id is None else await _blocks_of(state, request_id)
    counts, num_tokens = count_blocks(cells), state.engine.num_tokens()
    unfilled = ready.kv_groups * sum(-count % block_size for samples_of in num_tokens.values() for count in samples_of)
    running = [
        RunningRequest(known_as, [count for name in engine_ids for count in num_tokens.get(name, ())])
        for known_as, engine_ids in state.engine_ids.items()
    ]
    return Blocks(
        block_size,
        **asdict(counts),
        unfilled=min(unfilled, counts.used * block_size),
        cells=b64encode(cells).decode(),
        running=[one for one in running if one.num_tokens],
        request_id=request_id,
        block_ids=samples,
    )


async def _blocks_of(state: ServerState, request_id: str) -> list[list[int]]:
    """``request_id``: of an answer ("cmpl-...") or of X-Request-Id."""
    known = state.engine_ids
    engine_ids = known.get(request_id) or known.get(request_id.partition("-")[2], [])
    return [ids for engine_id in engine_ids for ids in await state.engine.client.block_ids(engine_id)]


async def version(request: Request) -> Response:
    """The server's version."""
    return JSON(Version(__version__))


async def load(request: Request) -> Response:
    """Requests in progress, and their sequences that wait to be scheduled."""
    state = state_of(request)
    return JSON(Load(state.num_responding, num_queued(state)))


OPERATIONS = (
    Operation("GET", "/health", health, "Check that the server is alive and ready", open=True),
    Operation("GET", "/livez", livez, "Check that the engine makes progress or is idle", open=True),
    Operation("GET", "/readyz", readyz, "Check that the model is loaded and requests are accepted", open=True),
    Operation("GET", "/ping", ping, "Check that the server is alive and ready"),
    Operation("GET", "/metrics", metrics, "Get metrics in Prometheus' text format"),
    Operation("GET", "/load", load, "Get the number of requests in progress", answer=Load),
    Operation("GET", "/version", version, "Get the server's version", answer=Version),
)
BLOCKS = Operation("GET", "/octavo/blocks", blocks, "Show the blocks of the KV cache", answer=Blocks)
BLOCKS_ALONE = replace(BLOCKS, handler=blocks_alone, name="blocks")  # of the main port
