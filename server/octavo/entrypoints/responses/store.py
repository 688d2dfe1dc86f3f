"""Responses in the store of the server, whose tables hold them as JSON."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import json
from pydantic import Field, TypeAdapter

from octavo.entrypoints.errors import APIError, shown
from octavo.entrypoints.replica import elsewhere, new_id
from octavo.entrypoints.responses.items import ResponseObject
from octavo.entrypoints.responses.protocol import Item
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.storage.store import Store, StoreError
from octavo.entrypoints.storage.tables import Entry, StoredItem, Tables, account_of
from octavo.metrics.stats import Tenant

logger = logging.getLogger(__name__)

RESPONSE, CONVERSATION = "resp_", "conv_"  # with which ids begin
_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "tool_search_call": "tsc_",
    "tool_search_output": "tso_",
    "additional_tools": "at_",
}
_ITEM: TypeAdapter[Item] = TypeAdapter(Annotated[Item, Field(discriminator="type")])


@dataclass(frozen=True)
class Turn:
    """A response and what belongs to it. ``items``: those that it answers, of which the last ``num_new`` came with the
    request; ``output``: those that it says; ``conversation``: the id of the one that it belongs to."""

    response: ResponseObject
    items: Sequence[Item]
    num_new: int
    output: Sequence[Item]
    tenant: Tenant | None
    conversation: str | None

    def write(self, tables: Tables, tag: str) -> None:
        """Store the response, unless it is not to be stored, and add its items to its conversation: both or neither."""
        said = [StoredItem(_written(item), item.id) for item in self.output]
        if self.response.store:
            tables.put(replace(entry_of(self.response, self.items, self.tenant), output=said))
        if self.conversation is not None:
            new = in_conversation(self.items[len(self.items) - self.num_new :], tag)
            tables.append(self.conversation, self.tenant, [*new, *said])


def entry_of(response: ResponseObject, items: Iterable[Item], tenant: Tenant | None) -> Entry:
    """The response as it is, with the items that it answers."""
    asked = [StoredItem(_written(item)) for item in items]
    whole = json.encode(response)
    return Entry(response.id, account_of(tenant), response.created_at, response.status, whole, asked)


async def keep(state: ServerState, turn: Turn) -> bool:
    """Store a response, and add to its conversation. Where that fails the log says so, and the answer is still given:
    returns False."""
    try:
        await state.store.run(lambda tables: tables.write(lambda: turn.write(tables, state.store_tag)))
    except StoreError as error:
        logger.error("response %s is not stored: %s", turn.response.id, error.why)
        return False
    return True


def in_conversation(items: Iterable[Item], tag: str) -> list[StoredItem]:
    """Items of a client as a conversation keeps them, under ids of their own: a client's may be anybody's."""
    made = list[StoredItem]()
    for item in items:
        prefix = _PREFIXES.get(item.type, "item_")
        item_id = new_id(prefix, tag) + "00"
        made.append(StoredItem(_written(item.model_copy(update={"id": item_id})), item_id))
    return made


async def find(store: Store, entry_id: str, tenant: Tenant | None, prefix: str = RESPONSE) -> Entry | None:
    """The response, or with the ``prefix`` of one the conversation, that the tenant may have. Raises StoreError."""
    if not entry_id.startswith(prefix):
        return None
    return await store.run(lambda tables: tables.get(entry_id, tenant))


def no_conversation(state: ServerState, conversation_id: str, param: str) -> APIError:
    """The error for a conversation that is not kept; ``param``: the field that names it."""
    why = elsewhere(conversation_id, state.store_tag) or "it was deleted, has expired, or made room for others"
    message = f"conversation {shown(conversation_id)} is not found: {why}"
    return APIError(404, message, param=param, code="conversation_not_found")


async def find_item(store: Store, item_id: str, tenant: Tenant | None) -> Item | None:
    """An item that the tenant may have, of the output of a response. Raises StoreError."""
    body = await store.run(lambda tables: tables.item(item_id, tenant))
    return None if body is None else _ITEM.validate_json(body)


def read_items(stored: Iterable[StoredItem]) -> list[Item]:
    """The items, as a request brings them."""
    return [_ITEM.validate_json(item.body) for item in stored]


def _written(item: Item) -> bytes:
    return item.model_dump_json(exclude_none=True).encode()
