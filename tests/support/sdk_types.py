"""Strict comparison of answers with an SDK's own types: nothing may be missing, of another type, or unknown to them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

import httpx
from pydantic import BaseModel, TypeAdapter


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def fits(kind: Any, raw: str | bytes, extras: Collection[str] = ()) -> Any:
    """The value as a ``kind``. SDKs allow unknown fields, for newer servers: here they fail, but for ``extras``."""
    value = _adapter(kind).validate_json(raw, strict=True)
    unknown = [path for path in unknown_fields(value, json.loads(raw)) if path.rpartition(".")[2] not in extras]
    assert not unknown, f"{unknown} in {raw!r}"
    return value


def unknown_fields(value: Any, given: Any, path: str = "") -> Iterator[str]:
    """The paths of the fields ``given`` that the types of the parsed ``value`` do not have."""
    if isinstance(value, BaseModel):
        names = {field.alias or name: name for name, field in type(value).model_fields.items()}
        for key, inner in given.items():
            if key not in names:
                yield f"{path}.{key}"
            else:
                yield from unknown_fields(getattr(value, names[key]), inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, (item, inner) in enumerate(zip(value, given, strict=True)):
            yield from unknown_fields(item, inner, f"{path}.{i}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from unknown_fields(item, given[key], f"{path}.{key}")


def named_events(url: str, body: dict[str, Any], **options: Any) -> list[tuple[str, str]]:
    """The events of a stream as (name, data); each name is the type in its data."""
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60, **options) as response:
        text = response.read().decode()
        assert response.status_code == 200, text
    *events, rest = text.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        assert json.loads(data[6:])["type"] == name[7:]
        found.append((name[7:], data[6:]))
    return found
