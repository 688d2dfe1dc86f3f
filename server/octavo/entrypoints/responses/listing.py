"""Pages of items, as the routes of responses and conversations list them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.entrypoints.errors import bad_request, shown
from octavo.entrypoints.responses.items import ResponseItems

_MOST_LISTED = 100
ITEMS_QUERY: dict[str, dict[str, Any]] = {
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string", "description": "the id of an item: those behind it are listed"},
    "limit": {"type": "integer", "minimum": 1, "maximum": _MOST_LISTED},
}


def page_of(items: list[dict[str, Any]], query: Mapping[str, str]) -> ResponseItems:
    """The page of ``items``, oldest first, that the query asks for; the newest first unless it says otherwise. Raises
    APIError."""
    if query.get("order", "desc") not in ("asc", "desc"):
        raise bad_request(f"order must be asc or desc, got {shown(query['order'])}", "order")
    if query.get("order", "desc") == "desc":
        items = items[::-1]
    limit = query.get("limit", "20")
    if not (limit.isdecimal() and limit.isascii() and 1 <= int(limit[:4]) <= _MOST_LISTED):
        raise bad_request(f"limit must be between 1 and {_MOST_LISTED}, got {shown(limit)}", "limit")
    if (after := query.get("after")) is not None:
        at = next((number for number, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise bad_request(f"after must be the id of one of the items, got {shown(after)}", "after")
        items = items[at + 1 :]
    found = items[: int(limit)]
    first, last = (found[0]["id"], found[-1]["id"]) if found else ("", "")
    return ResponseItems(found, first, last, len(items) > len(found))
