"""The way of every request that the engine answers, whichever API it comes by.

A dialect says what differs: the body, what the engine is to run, and how the answer is written, whole and as a stream.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.admission import check_model, check_serving
from octavo.entrypoints.fields.values import ModelBody
from octavo.entrypoints.generation.heard import listener
from octavo.entrypoints.generation.pooled import run_pooled
from octavo.entrypoints.generation.run import Generation
from octavo.entrypoints.generation.stream import EVENT_STREAM, Events, EventStream
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.request_body import Path, read_body
from octavo.entrypoints.transport.responses import JSON, unless_disconnected
from octavo.entrypoints.transport.sse import COMMENT
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.pooling_params import check_generates
from octavo.interface.sampling_params import RequestOutputKind

Body = TypeVar("Body", bound=ModelBody)


@dataclass(frozen=True)
class CheckedRequest(Generic[Body]):
    """A request whose body fits its type and names a model that is served. ``began``: seconds since the epoch."""

    http: Request
    state: ServerState
    body: Body
    began: float


@dataclass
class Prepared(Generic[Body]):
    """The requests that the engine is to run. A dialect's own class adds what its answers need."""

    checked: CheckedRequest[Body]
    requests: list[EngineCoreRequest]
    texts: list[str | None] = field(default_factory=list, kw_only=True)  # of the prompts; empty: none is kept

    def __post_init__(self) -> None:
        self.state, self.body = self.checked.state, self.checked.body

    @property
    def streams(self) -> bool:
        """The answer is a stream: the engine sends deltas."""
        return self.requests[0].sampling_params.output_kind is RequestOutputKind.DELTA

    @property
    def answering_name(self) -> str:
        """The name in responses: the model's, or the adapter's that answers."""
        adapter = self.requests[0].adapter
        return self.state.model_name if adapter is None else adapter.name

    def generation(self) -> Generation:
        """Admit the requests. Raises APIError."""
        heard = listener(self.state.replay, getattr(self, "rendered", None), self.requests[0])
        return Generation(self.state, self.requests, self.texts or [None] * len(self.requests), heard=heard)


Run = TypeVar("Run", bound=Prepared[Any])


@dataclass(frozen=True)
class Dialect(Generic[Body, Run]):
    """A route that the engine answers. ``name``: the operationId.

    ``prepare`` turns a checked body into what the engine runs, or into a response if nothing has to run. ``whole``
    makes the body of a response from the requests' final outputs; ``events`` writes a stream. A dialect without
    ``events`` pools: ``whole`` gets vectors. With ``run``, which runs the requests in its own way, it gets the outputs
    that this returns. ``images`` are the paths of images in a body; ``any_type`` accepts any Content-Type.
    ``media_type``: of a stream, or of the responses that ``whole`` makes itself. ``ping``: says in a stream that the
    connection lives; empty where its form has no words for that.
    """

    name: str
    body: type[Body]
    prepare: Callable[[CheckedRequest[Body]], Awaitable[Run | Response]]
    whole: Callable[[Run, list[Any]], Awaitable[Any]]
    events: Callable[[Run], Events] | None = None
    images: Collection[Path] = ()
    any_type: bool = False
    media_type: str = EVENT_STREAM
    run: Callable[[Run], Awaitable[list[Any]]] | None = None
    ping: bytes = COMMENT

    @property
    def generates(self) -> bool:
        """True if tokens are sampled, or would be."""
        return self.events is not None or self.run is not None


async def respond(request: Request, dialect: Dialect[Body, Run]) -> Response:
    """Answer a request. Raises ValueError, APIError."""
    state, events = state_of(request), dialect.events
    check_serving(state)
    checked = await read_request(request, dialect.body, dialect.images, dialect.any_type, dialect.generates)
    if dialect.generates:
        check_generates(state.engine.config.model.pooler)
    prepared = await dialect.prepare(checked)
    if isinstance(prepared, Response):
        return prepared
    if events is not None and prepared.streams:
        head_after = state.args.stream_head_after
        generation = await prepared.generation().start()
        return EventStream(generation, events(prepared), dialect.media_type, head_after, dialect.ping)
    return await unless_disconnected(request, _whole(dialect, prepared))


async def read_request(
    request: Request, body: type[Body], images: Collection[Path] = (), any_type: bool = False, generates: bool = True
) -> CheckedRequest[Body]:
    """Read and check a body. ``generates``: the request may be for an adapter. Raises APIError."""
    began, state = time.time(), state_of(request)
    read = await read_body(request, body, state, any_type, images)
    read.check()
    check_model(state, read.model, generates)
    return CheckedRequest(request, state, read, began)


async def _whole(dialect: Dialect[Body, Run], prepared: Run) -> Response:
    if dialect.run is not None:
        outputs = await dialect.run(prepared)
    elif dialect.events is None:
        outputs = await run_pooled(prepared.state, prepared.requests)
    else:
        with prepared.generation() as generation:
            await generation.start()
            outputs = await generation.final_outputs()
    answer = await dialect.whole(prepared, outputs)
    return answer if isinstance(answer, Response) else JSON(answer)
