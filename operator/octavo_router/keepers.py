"""Find the replica that keeps what a request names. Pure.

Responses, conversations, files and batches stay in the engine that made them.

Their ids begin with a hash of the address of the engine (`octavo/entrypoints/replica.py`), so every router finds it
again without asking anybody. An id only chooses among the replicas that are there.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import ipaddress
import re
from collections.abc import Iterable
from typing import Any

_NAME = r"([a-z2-7]{8})[0-9a-f]{32}"
_IN_PATH = re.compile(rf"/v1/(?:responses/resp_|conversations/conv_|files/file-|batches/batch_){_NAME}(?:/.*)?")
_LISTS = re.compile("/v1/(files|batches)")
_FIELDS = {
    "previous_response_id": re.compile(f"resp_{_NAME}"),
    "conversation": re.compile(f"conv_{_NAME}"),
    "input_file_id": re.compile(f"file-{_NAME}"),
}
_ITEM = re.compile(rf"[a-z]+_{_NAME}[0-9a-f]{{2,}}")


@functools.lru_cache(1024)
def name_of(replica: str) -> str:
    """Return the name by which ids refer to the replica ADDRESS:PORT."""
    address, _, port = replica.rpartition(":")
    host = ipaddress.ip_address(address.removeprefix("[").removesuffix("]"))
    return base64.b32encode(hashlib.sha256(f"{host} {port}".encode()).digest()[:5]).decode().lower()


def keeper_of(name: str, replicas: Iterable[str]) -> str | None:
    """The one of the replicas that has this name; None: it is gone."""
    return next((one for one in replicas if name_of(one) == name), None)


def named_in_path(path: str) -> str:
    """The name of the replica that keeps what the path is about; empty: any will do."""
    found = _IN_PATH.fullmatch(path)
    return found[1] if found else ""


def named_in_body(request: dict[str, Any]) -> str:
    """The name of the replica that keeps what the body continues from; empty: any will do."""
    for field, form in _FIELDS.items():
        value = request.get(field)
        if isinstance(value, dict):  # of a conversation
            value = value.get("id")
        if isinstance(value, str) and (found := form.fullmatch(value)):
            return found[1]
    items = request.get("input")
    for item in reversed(items) if isinstance(items, list) else ():
        if (
            isinstance(item, dict)
            and item.get("type") == "item_reference"
            and (found := _ITEM.fullmatch(str(item.get("id"))))
        ):
            return found[1]
    return ""


def listed(method: str, path: str) -> str:
    """Return what the request lists of which each replica knows only its own: files or batches; empty: neither."""
    found = _LISTS.fullmatch(path) if method in ("GET", "HEAD") else None
    return found[1] if found else ""
