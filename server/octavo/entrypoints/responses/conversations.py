"""/v1/conversations: items that stay together, and that responses go on with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Raw, Struct, field, json
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.errors import APIError, bad_request, shown
from octavo.entrypoints.operation import Operation
from octavo.entrypoints.replica import new_id
from octavo.entrypoints.responses.items import ResponseItems, listed
from octavo.entrypoints.responses.listing import ITEMS_QUERY, page_of
from octavo.entrypoints.responses.protocol import InputItem, Item, ItemReferenceParam, Metadata
from octavo.entrypoints.responses.store import (
    CONVERSATION,
    find,
    find_item,
    in_conversation,
    no_conversation,
    read_items,
)
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.storage.tables import Entry, account_of
from octavo.entrypoints.tenants import current_tenant
from octavo.entrypoints.transport.request_body import read_body
from octavo.entrypoints.transport.responses import JSON

MAX_ITEMS = 20  # of one request, as OpenAI's
_Items = Annotated[list[InputItem], Field(max_length=MAX_ITEMS)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class CreateConversationRequest(_Body):
    """POST /v1/conversations"""

    items: _Items | None = None
    metadata: Metadata | None = None


class UpdateConversationRequest(_Body):
    """POST /v1/conversations/{conversation_id}"""

    metadata: Metadata | None


class AddItemsRequest(_Body):
    """POST /v1/conversations/{conversation_id}/items"""

    items: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS)]


class ConversationObject(Struct):
    """The response of /v1/conversations."""

    id: str
    created_at: int
    metadata: dict[str, str] = field(default_factory=dict)
    object: str = "conversation"


class DeletedConversation(Struct):
    """The response of DELETE /v1/conversations/{conversation_id}."""

    id: str
    object: str = "conversation.deleted"
    deleted: bool = True


class ConversationItem(Struct):
    """An item of a conversation, with the fields of its type."""

    id: str
    type: str


async def create_conversation(request: Request) -> Response:
    """Handle POST /v1/conversations."""
    state = state_of(request)
    body = await read_body(request, CreateConversationRequest, state)
    items = in_conversation(await _resolved(state, body.items or []), state.store_tag)
    made = ConversationObject(new_id(CONVERSATION, state.store_tag), int(time.time()), body.metadata or {})
    owner = account_of(current_tenant.get())
    entry = Entry(made.id, owner, made.created_at, "", json.encode(made), output=items)
    await state.store.run(lambda tables: tables.put(entry))
    return JSON(made)


async def retrieve_conversation(request: Request) -> Response:
    """Handle GET /v1/conversations/{conversation_id}."""
    return JSON(Raw((await _stored(request)).body))


async def update_conversation(request: Request) -> Response:
    """Handle POST /v1/conversations/{conversation_id}, which replaces its metadata."""
    body = await read_body(request, UpdateConversationRequest, state_of(request))
    entry = await _stored(request)
    made = json.decode(entry.body, type=ConversationObject)
    made.metadata = body.metadata or {}
    tenant, whole = current_tenant.get(), json.encode(made)
    if not await state_of(request).store.run(lambda tables: tables.update(made.id, tenant, whole)):
        raise _not_found(request)
    return JSON(made)


async def delete_conversation(request: Request) -> Response:
    """Handle DELETE /v1/conversations/{conversation_id}. Responses that went on with it stay."""
    entry, tenant = await _stored(request), current_tenant.get()
    await state_of(request).store.run(lambda tables: tables.delete(entry.id, tenant))
    return JSON(DeletedConversation(entry.id))


async def list_conversation_items(request: Request) -> Response:
    """Handle GET /v1/conversations/{conversation_id}/items."""
    return JSON(page_of(_listed(await _stored(request)), request.query_params))


async def create_conversation_items(request: Request) -> Response:
    """Handle POST /v1/conversations/{conversation_id}/items."""
    state, tenant = state_of(request), current_tenant.get()
    body = await read_body(request, AddItemsRequest, state)
    entry = await _stored(request)
    items = in_conversation(await _resolved(state, body.items), state.store_tag)
    if not await state.store.run(lambda tables: tables.append(entry.id, tenant, items)):
        raise _not_found(request)
    added = [listed(item, number) for number, item in enumerate(read_items(items))]
    return JSON(ResponseItems(added, added[0]["id"], added[-1]["id"], False))


async def retrieve_conversation_item(request: Request) -> Response:
    """Handle GET /v1/conversations/{conversation_id}/items/{item_id}."""
    items, item_id = _listed(await _stored(request)), request.path_params["item_id"]
    found = next((item for item in items if item["id"] == item_id), None)
    if found is None:
        raise _no_item(item_id)
    return JSON(found)


async def delete_conversation_item(request: Request) -> Response:
    """Handle DELETE /v1/conversations/{conversation_id}/items/{item_id}. Returns the conversation."""
    entry, item_id, tenant = await _stored(request), request.path_params["item_id"], current_tenant.get()
    if not await state_of(request).store.run(lambda tables: tables.remove(entry.id, tenant, item_id)):
        raise _no_item(item_id)
    return JSON(Raw(entry.body))


def _listed(entry: Entry) -> list[dict[str, Any]]:
    return [listed(item, number) for number, item in enumerate(read_items(entry.output))]


async def _resolved(state: ServerState, items: Sequence[Item | ItemReferenceParam]) -> list[Item]:
    """The items, those in the place of references. Raises APIError naming one that is not kept."""
    found = list[Item]()
    for number, item in enumerate(items):
        if isinstance(item, ItemReferenceParam):
            kept = await find_item(state.store, item.id, current_tenant.get())
            if kept is None:
                where = f"items.{number}"
                raise bad_request(f"{where}: item {shown(item.id)} is not found; send the item itself", where)
            item = kept
        found.append(item)
    return found


async def _stored(request: Request) -> Entry:
    conversation_id = request.path_params["conversation_id"]
    entry = await find(state_of(request).store, conversation_id, current_tenant.get(), CONVERSATION)
    if entry is None:
        raise _not_found(request)
    return entry


def _not_found(request: Request) -> APIError:
    return no_conversation(state_of(request), request.path_params["conversation_id"], "conversation_id")


def _no_item(item_id: str) -> APIError:
    message = f"item {shown(item_id)} is not found in this conversation: it was deleted, or is in another one"
    return APIError(404, message, param="item_id", code="item_not_found")


_ONE = "/v1/conversations/{conversation_id}"
_ITEM = _ONE + "/items/{item_id}"
OPERATIONS = (
    Operation(
        "POST",
        "/v1/conversations",
        create_conversation,
        "Create a conversation",
        body=CreateConversationRequest,
        answer=ConversationObject,
    ),
    Operation("GET", _ONE, retrieve_conversation, "Retrieve a conversation", answer=ConversationObject),
    Operation(
        "POST",
        _ONE,
        update_conversation,
        "Replace a conversation's metadata",
        body=UpdateConversationRequest,
        answer=ConversationObject,
    ),
    Operation("DELETE", _ONE, delete_conversation, "Delete a conversation", answer=DeletedConversation),
    Operation(
        "GET",
        _ONE + "/items",
        list_conversation_items,
        "List a conversation's items",
        answer=ResponseItems,
        query=ITEMS_QUERY,
    ),
    Operation(
        "POST",
        _ONE + "/items",
        create_conversation_items,
        "Add items to a conversation",
        body=AddItemsRequest,
        answer=ResponseItems,
    ),
    Operation("GET", _ITEM, retrieve_conversation_item, "Retrieve an item", answer=ConversationItem),
    Operation("DELETE", _ITEM, delete_conversation_item, "Delete an item", answer=ConversationObject),
)
