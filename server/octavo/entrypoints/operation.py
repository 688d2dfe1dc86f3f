"""One method of one path: its handler and what the API's description says of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from pydantic import BaseModel

from octavo.entrypoints.dialect import Dialect, respond
from octavo.entrypoints.errors import ErrorResponse
from octavo.entrypoints.generation.stream import EVENT_STREAM
from octavo.entrypoints.transport.responses import Handler


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[BaseModel] | None = None
    answer: type[msgspec.Struct] | str = "text/plain"  # body of a 200: a struct as JSON, or a media type
    streams: str = ""  # the media type of a streamed response, or of another that is not JSON, where there is one
    error: type[msgspec.Struct] = ErrorResponse
    form: dict[str, Any] | None = None  # the schema of a form that is uploaded
    query: dict[str, dict[str, Any]] | None = None  # schemas of the query's parameters, none of them required
    open: bool = False  # needs no API key
    name: str = ""  # the operationId, where a handler has several paths

    @property
    def id(self) -> str:
        """The operationId."""
        return self.name or self.handler.__name__


def answering(
    path: str,
    dialect: Dialect[Any, Any],
    summary: str,
    answer: type[msgspec.Struct],
    error: type[msgspec.Struct] = ErrorResponse,
    name: str = "",
) -> Operation:
    """Describe a route that a dialect answers."""
    has_other = dialect.events is not None or dialect.media_type != EVENT_STREAM
    streams = dialect.media_type.partition(";")[0] if has_other else ""
    handler = partial(respond, dialect=dialect)
    return Operation("POST", path, handler, summary, dialect.body, answer, streams, error, name=name or dialect.name)
