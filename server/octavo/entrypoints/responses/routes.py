"""POST /v1/responses, and the routes of stored responses"""

from __future__ import annotations

from typing import Any

from msgspec import Raw, Struct, json
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.dialect import CheckedRequest, Dialect, read_request
from octavo.entrypoints.errors import APIError, bad_request, shown
from octavo.entrypoints.operation import Operation, answering
from octavo.entrypoints.replica import elsewhere
from octavo.entrypoints.responses import conversations
from octavo.entrypoints.responses.answers import whole
from octavo.entrypoints.responses.background import Background
from octavo.entrypoints.responses.events import ResponseEvents
from octavo.entrypoints.responses.items import DeletedResponse, InputTokenCount, ResponseItems, ResponseObject, listed
from octavo.entrypoints.responses.listing import ITEMS_QUERY, page_of
from octavo.entrypoints.responses.prepare import PreparedResponse, count_tokens, prepare
from octavo.entrypoints.responses.protocol import InputTokensRequest, ResponsesRequest
from octavo.entrypoints.responses.store import find, read_items
from octavo.entrypoints.state import state_of
from octavo.entrypoints.storage.tables import Entry
from octavo.entrypoints.tenants import current_tenant
from octavo.entrypoints.transport.responses import JSON

_MOST_DIGITS = 16  # of the number of an event
STREAM_QUERY: dict[str, dict[str, Any]] = {
    "stream": {"type": "boolean", "description": "of a response in the background: its events"},
    "starting_after": {"type": "integer", "minimum": 0, "description": "the number of the last event that is known"},
}


async def prepare_or_queue(checked: CheckedRequest[ResponsesRequest]) -> PreparedResponse | Response:
    """Prepare a response, or put it into the background. Raises ValueError, APIError."""
    prepared = await prepare(checked)
    return await _background(checked.http).accept(prepared) if checked.body.background else prepared


RESPONSES = Dialect("create_response", ResponsesRequest, prepare_or_queue, whole, ResponseEvents)


async def count_input_tokens(request: Request) -> Response:
    """Handle POST /v1/responses/input_tokens."""
    return JSON(InputTokenCount(await count_tokens(await read_request(request, InputTokensRequest))))


async def retrieve_response(request: Request) -> Response:
    """Handle GET /v1/responses/{response_id}."""
    entry, query = await _stored(request), request.query_params
    if query.get("stream") not in ("true", "1"):
        return JSON(Raw(entry.body))
    if not _is_in_background(entry):
        raise bad_request(
            f"stream is for responses that were created with background, and {entry.id} was not: drop it", "stream"
        )
    after = query.get("starting_after", "")
    if not (after.isdecimal() and after.isascii() and len(after) < _MOST_DIGITS) and after:
        raise bad_request(f"starting_after must be the number of an event, got {shown(after)}", "starting_after")
    return _background(request).stream(entry.id, int(after or -1))


async def delete_response(request: Request) -> Response:
    """Handle DELETE /v1/responses/{response_id}."""
    entry = await _stored(request)
    await state_of(request).store.run(lambda tables: tables.delete(entry.id, current_tenant.get()))
    return JSON(DeletedResponse(entry.id))


async def cancel_response(request: Request) -> Response:
    """Handle POST /v1/responses/{response_id}/cancel, which is for responses in the background."""
    entry = await _stored(request)
    if not _is_in_background(entry):
        raise bad_request(
            f"response {entry.id} is {entry.status} and cannot be cancelled, since it was created without background; "
            "to stop one that is under way, close its connection",
            "response_id",
        )
    left = await _background(request).cancel(entry.id)
    return JSON(Raw((left or entry).body))


async def compact_response(request: Request) -> Response:
    """Handle POST /v1/responses/compact, whose summary would be another server's to read."""
    raise APIError(404, 'compact is not supported: send truncation "auto", or the items that are to stay')


async def list_input_items(request: Request) -> Response:
    """Handle GET /v1/responses/{response_id}/input_items."""
    entry = await _stored(request)
    items = [listed(item, number) for number, item in enumerate(read_items(entry.input))]
    return JSON(page_of(items, request.query_params))


def _background(request: Request) -> Background:
    background: Background = request.app.state.background
    return background


def _is_in_background(entry: Entry) -> bool:
    return bool(json.decode(entry.body, type=ResponseFlags).background)


class ResponseFlags(Struct):
    """Says how a stored response is made."""

    background: bool = False


async def _stored(request: Request) -> Entry:
    response_id = request.path_params["response_id"]
    entry = await find(state_of(request).store, response_id, current_tenant.get())
    if entry is None:
        why = elsewhere(response_id, state_of(request).store_tag)
        why = why or "it was not stored, was deleted, has expired, or made room for others"
        raise APIError(
            404, f"response {shown(response_id)} is not found: {why}", param="response_id", code="response_not_found"
        )
    return entry


OPERATIONS = (
    answering("/v1/responses", RESPONSES, "Create a response", ResponseObject),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        count_input_tokens,
        "Count a response's input tokens",
        body=InputTokensRequest,
        answer=InputTokenCount,
    ),
    Operation(
        "POST",
        "/v1/responses/compact",
        compact_response,
        "Not supported: compaction is refused",
        answer=ResponseObject,
    ),
    Operation(
        "GET",
        "/v1/responses/{response_id}",
        retrieve_response,
        "Retrieve a stored response",
        answer=ResponseObject,
        streams="text/event-stream",
        query=STREAM_QUERY,
    ),
    Operation(
        "DELETE",
        "/v1/responses/{response_id}",
        delete_response,
        "Delete a stored response",
        answer=DeletedResponse,
    ),
    Operation(
        "POST",
        "/v1/responses/{response_id}/cancel",
        cancel_response,
        "Cancel a response in the background",
        answer=ResponseObject,
    ),
    Operation(
        "GET",
        "/v1/responses/{response_id}/input_items",
        list_input_items,
        "List a response's input items",
        answer=ResponseItems,
        query=ITEMS_QUERY,
    ),
    *conversations.OPERATIONS,
)
