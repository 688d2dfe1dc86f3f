"""/v1/files and /v1/batches"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from octavo.entrypoints.admission import check_serving
from octavo.entrypoints.batches.answers import BatchAnswer, BatchList, FileAnswer, FileDeleted, FileList
from octavo.entrypoints.batches.service import MAX_UPLOAD_BYTES, BatchService
from octavo.entrypoints.batches.store import LIFETIME
from octavo.entrypoints.errors import APIError, bad_request, shown
from octavo.entrypoints.fields.unsupported import UnsupportedFields
from octavo.entrypoints.fields.values import RequestBody
from octavo.entrypoints.operation import Operation
from octavo.entrypoints.state import state_of
from octavo.entrypoints.transport.multipart import Part, parse_form
from octavo.entrypoints.transport.request_body import read_body, read_bytes
from octavo.entrypoints.transport.responses import JSON

_MAX_LISTED = 10_000
_SHORTEST, _LONGEST = 3_600, LIFETIME * 4  # seconds that a file may be kept
_MAX_KEY, _MAX_VALUE = 64, 512  # characters of metadata, as OpenAI's
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"

FORM: dict[str, Any] = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"const": "batch"},
        "file": {"type": "string", "format": "binary"},
        _ANCHOR: {"const": "created_at"},
        _SECONDS: {"type": "integer", "minimum": _SHORTEST, "maximum": _LONGEST},
    },
    "dependentRequired": {_ANCHOR: [_SECONDS], _SECONDS: [_ANCHOR]},
}

_PAGE: dict[str, Any] = {
    "after": {"type": "string", "description": "the id of an entry: those behind it are listed"},
    "limit": {"type": "integer", "minimum": 1, "maximum": _MAX_LISTED},
}
FILES_QUERY = {**_PAGE, "order": {"enum": ["asc", "desc"]}, "purpose": {"type": "string"}}
BATCHES_QUERY = _PAGE

Entry = TypeVar("Entry", FileAnswer, BatchAnswer)


class BatchRequest(RequestBody):
    """POST /v1/batches"""

    UNSUPPORTED: ClassVar[UnsupportedFields] = UnsupportedFields({"output_expires_after": ()})

    input_file_id: str
    endpoint: Literal[
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/decisions",
        "/v1/score",
        "/score",
        "/v1/rerank",
        "/rerank",
        "/v2/rerank",
    ]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


def service_of(request: Request) -> BatchService:
    """The batches of this server, made with the first."""
    app = request.app
    if getattr(app.state, "batches", None) is None:
        app.state.batches = BatchService(app, state_of(request))
    service: BatchService = app.state.batches
    return service


async def upload_file(request: Request) -> Response:
    """Handle POST /v1/files."""
    service = service_of(request)
    with service.uploads.share() as share:
        body = await read_bytes(request, MAX_UPLOAD_BYTES, share)
        form = await asyncio.to_thread(parse_form, request.headers.get("content-type", ""), body)
        purpose = _text(form, "purpose", "")
        if purpose != "batch":
            raise bad_request(f"purpose must be batch, got {purpose!r}: files serve batches alone", "purpose")
        if "file" not in form:
            raise bad_request("file is required: the form has none", "file")
        file, seconds = form["file"], _lifetime(form)
        return JSON(await asyncio.to_thread(service.files.add, file.filename or "file", file.data, purpose, seconds))


def _text(form: dict[str, Part], name: str, default: str) -> str:
    """The beginning of a field, which is longer than any that is right."""
    return str(form[name].data[:100], "utf-8", "replace") if name in form else default


def _lifetime(form: dict[str, Part]) -> int:
    """Seconds that a file is kept. Raises APIError."""
    if (_ANCHOR in form) != (_SECONDS in form):
        raise bad_request("expires_after needs both of anchor and seconds", "expires_after")
    if _text(form, _ANCHOR, "created_at") != "created_at":
        raise bad_request("expires_after.anchor must be created_at", "expires_after.anchor")
    text = _text(form, _SECONDS, str(LIFETIME))
    if not (text.isdecimal() and text.isascii()) or not _SHORTEST <= int(text) <= _LONGEST:
        raise bad_request(f"expires_after.seconds must be {_SHORTEST} to {_LONGEST}, got {text[:20]}", "expires_after")
    return int(text)


async def list_files(request: Request) -> Response:
    """Handle GET /v1/files."""
    files = service_of(request).files.listed()
    if purpose := request.query_params.get("purpose"):
        files = [file for file in files if file.purpose == purpose]
    page, more = _page(request, files, _MAX_LISTED)
    return JSON(FileList(page, *_ends(page), more))


async def retrieve_file(request: Request) -> Response:
    """Handle GET /v1/files/{id}."""
    return JSON(service_of(request).files.get(request.path_params["file_id"]))


async def file_content(request: Request) -> Response:
    """Handle GET /v1/files/{id}/content."""
    files = service_of(request).files
    file = files.get(request.path_params["file_id"])
    path = files.path(file)
    if not path.exists():
        return Response(b"", media_type="application/octet-stream")
    return FileResponse(path, media_type="application/octet-stream", filename=file.filename)


async def delete_file(request: Request) -> Response:
    """Handle DELETE /v1/files/{id}."""
    service = service_of(request)
    file = service.files.get(request.path_params["file_id"])
    service.check_unused(file.id)
    service.files.delete(file.id)
    return JSON(FileDeleted(file.id))


async def create_batch(request: Request) -> Response:
    """Handle POST /v1/batches."""
    state = state_of(request)
    check_serving(state)
    body = await read_body(request, BatchRequest, state)
    body.check()
    for key, value in (body.metadata or {}).items():
        if len(key) > _MAX_KEY or len(value) > _MAX_VALUE:
            raise bad_request(
                f"metadata takes keys of at most {_MAX_KEY} characters and values of at most {_MAX_VALUE}, got "
                f"{len(key)} and {len(value)}",
                "metadata",
            )
    return JSON(service_of(request).create(body.input_file_id, body.endpoint, body.metadata))


async def list_batches(request: Request) -> Response:
    """Handle GET /v1/batches."""
    page, more = _page(request, service_of(request).listed(), 20)
    return JSON(BatchList(page, *_ends(page), more))


async def retrieve_batch(request: Request) -> Response:
    """Handle GET /v1/batches/{id}."""
    return JSON(service_of(request).get(request.path_params["batch_id"]))


async def cancel_batch(request: Request) -> Response:
    """Handle POST /v1/batches/{id}/cancel."""
    return JSON(service_of(request).cancel(request.path_params["batch_id"]))


def _page(request: Request, entries: Sequence[Entry], default: int) -> tuple[list[Entry], bool]:
    """The entries after ``after``, ``limit`` of them, and whether there are more. Raises APIError."""
    query = request.query_params
    if query.get("order", "desc") not in ("asc", "desc"):
        raise bad_request(f"order must be asc or desc, got {shown(query['order'])}", "order")
    if query.get("order") == "asc":
        entries = entries[::-1]
    text = query.get("limit", str(default))
    if not (text.isdecimal() and text.isascii() and len(text) < 9) or not 1 <= int(text) <= _MAX_LISTED:
        raise bad_request(f"limit must be 1 to {_MAX_LISTED}, got {text[:20]}", "limit")
    start = 0
    if after := query.get("after"):
        at = next((i for i, entry in enumerate(entries) if entry.id == after), None)
        if at is None:
            raise APIError(404, f"after names no entry of the list: {after[:100]!r}", param="after")
        start = at + 1
    page = list(entries[start : start + int(text)])
    return page, len(entries) > start + len(page)


def _ends(page: Sequence[Any]) -> tuple[str | None, str | None]:
    return (page[0].id, page[-1].id) if page else (None, None)


OPERATIONS = (
    Operation("POST", "/v1/files", upload_file, "Upload a file", form=FORM, answer=FileAnswer),
    Operation(
        "GET",
        "/v1/files",
        list_files,
        "List files",
        answer=FileList,
        query=FILES_QUERY,
    ),
    Operation("GET", "/v1/files/{file_id}", retrieve_file, "Retrieve a file's metadata", answer=FileAnswer),
    Operation("GET", "/v1/files/{file_id}/content", file_content, "Download a file", answer="application/octet-stream"),
    Operation("DELETE", "/v1/files/{file_id}", delete_file, "Delete a file", answer=FileDeleted),
    Operation(
        "POST",
        "/v1/batches",
        create_batch,
        "Create a batch",
        body=BatchRequest,
        answer=BatchAnswer,
    ),
    Operation("GET", "/v1/batches", list_batches, "List batches", answer=BatchList, query=BATCHES_QUERY),
    Operation("GET", "/v1/batches/{batch_id}", retrieve_batch, "Retrieve a batch", answer=BatchAnswer),
    Operation("POST", "/v1/batches/{batch_id}/cancel", cancel_batch, "Cancel a batch", answer=BatchAnswer),
)
