"""Responses that are kept, for requests that go on with them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from octavo.entrypoints.responses.answers import ResponseObject
from octavo.entrypoints.responses.protocol import Item

MAX_RESPONSES = 1_000
MAX_CHARACTERS = 64_000_000


@dataclass
class StoredResponse:
    """A response, the items that it answered (those of earlier responses too), and the items of its output."""

    response: ResponseObject
    input: list[Item]
    output: list[Item]
    size: int  # characters of both


class ResponseStore:
    """The last responses in memory. The one that has gone unused for longest makes room."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_responses, self._max_characters = max_responses, max_characters
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[str, Item] = {}  # of outputs, by id
        self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: StoredResponse) -> None:
        """Keep a response; one that is larger than all room is not kept."""
        self._entries[entry.response.id] = entry
        self._items |= {item.id: item for item in entry.output if item.id is not None}
        self._size += entry.size
        while len(self._entries) > self._max_responses or self._size > self._max_characters:
            self._forget(next(iter(self._entries)))

    def get(self, response_id: str) -> StoredResponse | None:
        """A response, which counts as a use of it."""
        entry = self._entries.get(response_id)
        if entry is not None:
            self._entries.move_to_end(response_id)
        return entry

    def item(self, item_id: str) -> Item | None:
        """An item of a kept response's output."""
        return self._items.get(item_id)

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
