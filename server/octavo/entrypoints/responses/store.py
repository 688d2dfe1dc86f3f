"""Responses that are kept, for requests that go on with them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from octavo.entrypoints.responses.items import ResponseObject
from octavo.entrypoints.responses.protocol import Item
from octavo.metrics.stats import Tenant

MAX_RESPONSES = 1_000
MAX_CHARACTERS = 64_000_000


@dataclass
class StoredResponse:
    """A response, the items that it answered (those of earlier responses too), and the items of its output."""

    response: ResponseObject
    input: list[Item]
    output: list[Item]
    size: int  # characters of both
    tenant: Tenant | None = None  # whose it is


class ResponseStore:
    """The last responses in memory. The one that has gone unused for longest makes room."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_responses, self._max_characters = max_responses, max_characters
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[str, tuple[Item, Tenant | None]] = {}  # of outputs, by id
        self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: StoredResponse) -> None:
        """Keep a response; one that is larger than all room is not kept."""
        self._entries[entry.response.id] = entry
        self._items |= {item.id: (item, entry.tenant) for item in entry.output if item.id is not None}
        self._size += entry.size
        while len(self._entries) > self._max_responses or self._size > self._max_characters:
            self._forget(next(iter(self._entries)))

    def get(self, response_id: str, tenant: Tenant | None = None) -> StoredResponse | None:
        """A response that the tenant may have, which counts as a use of it. Without a tenant nobody asks through a
        gateway: who knows the id may have it."""
        entry = self._entries.get(response_id)
        if entry is None or tenant not in (None, entry.tenant):
            return None
        self._entries.move_to_end(response_id)
        return entry

    def item(self, item_id: str, tenant: Tenant | None = None) -> Item | None:
        """An item of the output of a kept response that the tenant may have."""
        item, owner = self._items.get(item_id, (None, None))
        return item if tenant in (None, owner) else None

    def delete(self, response_id: str) -> bool:
        """Forget a response. False if there is none."""
        if response_id not in self._entries:
            return False
        self._forget(response_id)
        return True

    def _forget(self, response_id: str) -> None:
        entry = self._entries.pop(response_id)
        self._size -= entry.size
        for item in entry.output:
            self._items.pop(item.id or "", None)
