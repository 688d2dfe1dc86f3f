"""POST /v1/responses, and the routes of stored responses"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.dialect import Dialect, read_request
from octavo.entrypoints.errors import APIError, bad_request, shown
from octavo.entrypoints.operation import Operation, answering
from octavo.entrypoints.replica import elsewhere
from octavo.entrypoints.responses.answers import whole
from octavo.entrypoints.responses.events import ResponseEvents
from octavo.entrypoints.responses.items import DeletedResponse, InputTokenCount, ResponseItems, ResponseObject, listed
from octavo.entrypoints.responses.prepare import count_tokens, prepare, store_of
from octavo.entrypoints.responses.protocol import InputTokensRequest, ResponsesRequest
from octavo.entrypoints.responses.store import StoredResponse
from octavo.entrypoints.state import state_of
from octavo.entrypoints.tenants import current_tenant
from octavo.entrypoints.transport.responses import JSON

RESPONSES = Dialect("create_response", ResponsesRequest, prepare, whole, ResponseEvents)
_MOST_LISTED = 100
ITEMS_QUERY: dict[str, dict[str, Any]] = {
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string", "description": "the id of an item: those behind it are listed"},
    "limit": {"type": "integer", "minimum": 1, "maximum": _MOST_LISTED},
}


async def count_input_tokens(request: Request) -> Response:
    """Handle POST /v1/responses/input_tokens."""
    return JSON(InputTokenCount(await count_tokens(await read_request(request, InputTokensRequest))))


async def retrieve_response(request: Request) -> Response:
    """Handle GET /v1/responses/{response_id}."""
    if request.query_params.get("stream") in ("true", "1"):
        raise bad_request("stream is not supported for responses that are kept: drop it", "stream")
    return JSON(_stored(request).response)


async def delete_response(request: Request) -> Response:
    """Handle DELETE /v1/responses/{response_id}."""
    entry = _stored(request)
    store_of(request).delete(entry.response.id)
    return JSON(DeletedResponse(entry.response.id))


async def cancel_response(request: Request) -> Response:
    """Handle POST /v1/responses/{response_id}/cancel, which is for responses in the background."""
    entry = _stored(request)
    raise bad_request(
        f"response {entry.response.id} is {entry.response.status} and cannot be cancelled: background is not built; "
        "to stop one that is under way, close its connection",
        "response_id",
    )


async def compact_response(request: Request) -> Response:
    """Handle POST /v1/responses/compact, whose summary would be another server's to read."""
    raise APIError(404, 'compact is not supported: send truncation "auto", or the items that are to stay')


async def list_input_items(request: Request) -> Response:
    """Handle GET /v1/responses/{response_id}/input_items."""
    entry = _stored(request)
    asked = request.query_params
    items = [listed(item, number) for number, item in enumerate(entry.input)]
    if asked.get("order", "desc") not in ("asc", "desc"):
        raise bad_request(f"order must be asc or desc, got {shown(asked['order'])}", "order")
    if asked.get("order", "desc") == "desc":
        items.reverse()
    limit = asked.get("limit", "20")
    if not (limit.isdecimal() and limit.isascii() and 1 <= int(limit[:4]) <= _MOST_LISTED):
        raise bad_request(f"limit must be between 1 and {_MOST_LISTED}, got {shown(limit)}", "limit")
    if (after := asked.get("after")) is not None:
        at = next((number for number, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise bad_request(f"after must be the id of an item of this response, got {shown(after)}", "after")
        items = items[at + 1 :]
    found = items[: int(limit)]
    first, last = (found[0]["id"], found[-1]["id"]) if found else ("", "")
    return JSON(ResponseItems(found, first, last, len(items) > len(found)))


def _stored(request: Request) -> StoredResponse:
    response_id = request.path_params["response_id"]
    entry = store_of(request).get(response_id, current_tenant.get())
    if entry is None:
        why = elsewhere(response_id, state_of(request).replica_tag)
        why = why or "it was not stored, was deleted, or made room for others"
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
        "Not supported: there are no background responses",
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
)
