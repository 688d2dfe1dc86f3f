"""Compares desired with live objects. Pure; tolerates what the API server does: it adds defaults, drops empty values
and normalises quantities."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Any

Json = Any

# Merge keys of lists; the first that all items have is used.
_KEYS = ("name", "containerPort", "mountPath", "uid", "topologyKey", "port", "ip")
_QUANTITY_PARENTS = frozenset({"limits", "requests"})
_QUANTITY_FIELDS = frozenset({"sizeLimit", "storage", "averageValue", "tolerance"})
_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50,
    "Ei": Decimal(2) ** 60,
}


def digest(value: Json, length: int = 16) -> str:
    """First `length` hex digits of a hash of any JSON, stable across processes."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def quantity(value: Json) -> Decimal:
    """Value of a Kubernetes quantity such as 20Gi. Raises ValueError."""
    text = str(value)
    number = text.rstrip("".join({letter for suffix in _SUFFIXES for letter in suffix}))
    if text.endswith("E") and number:
        suffix = "E"
    else:
        suffix = text[len(number) :]
    if not number or suffix not in _SUFFIXES:
        try:
            return Decimal(text)  # 1e3
        except InvalidOperation:
            raise ValueError(f"not a quantity: {value!r}") from None
    try:
        return Decimal(number) * _SUFFIXES[suffix]
    except InvalidOperation:
        raise ValueError(f"not a quantity: {value!r}") from None


def first_difference(desired: Json, live: Json, path: str = "") -> str | None:
    """JSON pointer to the first value of `desired` that `live` lacks; None: it has all. Other values are ignored."""
    if isinstance(desired, dict):
        if not isinstance(live, dict):
            return None if not desired and live is None else path
        for key, value in desired.items():
            where = f"{path}/{key}"
            if key not in live:
                if not _is_empty(value):
                    return where
            elif _is_quantity(path, key) and _same_quantity(value, live[key]):
                continue
            elif found := first_difference(value, live[key], where):
                return found
        return None
    if isinstance(desired, list):
        if not isinstance(live, list):
            return None if not desired and live is None else path
        return _list_difference(desired, live, path)
    return None if desired == live else path


def overlay(desired: Json, live: Json) -> Json:
    """`live` with the values of `desired`: `first_difference` finds nothing then."""
    if isinstance(desired, dict) and isinstance(live, dict):
        return {**live, **{key: overlay(value, live.get(key)) for key, value in desired.items()}}
    if isinstance(desired, list) and isinstance(live, list):
        return _list_overlay(desired, live)
    return copy.deepcopy(desired)


def _list_overlay(desired: list[Json], live: list[Json]) -> list[Json]:
    key = _item_key(desired)
    if key is None:
        if len(desired) != len(live):
            return copy.deepcopy(desired)
        return [overlay(one, other) for one, other in zip(desired, live, strict=True)]
    by_key = {str(item[key]): item for item in live if isinstance(item, dict) and key in item}
    wanted = {str(item[key]) for item in desired}
    rest = [item for item in live if not (isinstance(item, dict) and key in item and str(item[key]) in wanted)]
    return [*(overlay(item, by_key.get(str(item[key]))) for item in desired), *rest]


def without(value: Json, pointers: Iterable[str]) -> Json:
    """A copy without what the JSON pointers name, deepest first, as `foreign_additions` returns them."""
    out = copy.deepcopy(value)
    for pointer in pointers:
        here = out
        *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])
        for part in parents:
            here = here[int(part) if isinstance(here, list) else part]
        del here[int(last) if isinstance(here, list) else last]
    return out


def _list_difference(desired: list[Json], live: list[Json], path: str) -> str | None:
    key = _item_key(desired)
    if key is None:
        if len(desired) != len(live):
            return path
        pairs = zip(desired, live, strict=True)
        return next((d for i, (a, b) in enumerate(pairs) if (d := first_difference(a, b, f"{path}/{i}"))), None)
    by_key = {str(item[key]): item for item in live if isinstance(item, dict) and key in item}
    for item in desired:
        where = f"{path}/{item[key]}"
        if str(item[key]) not in by_key:
            return where
        if found := first_difference(item, by_key[str(item[key])], where):
            return found
    return None


def _item_key(desired: list[Json]) -> str | None:
    """The merge key of the items, whose values are unique as text (patches may set any type); None: by index."""
    key = next((k for k in _KEYS if desired and all(isinstance(item, dict) and k in item for item in desired)), None)
    return None if key is None or len({str(item[key]) for item in desired}) < len(desired) else key


def _is_empty(value: Json) -> bool:
    return value is None or value in ("", 0, False) or value == [] or value == {}


def _is_quantity(path: str, key: str) -> bool:
    return path.rpartition("/")[2] in _QUANTITY_PARENTS or key in _QUANTITY_FIELDS


def _same_quantity(one: Json, other: Json) -> bool:
    try:
        return quantity(one) == quantity(other)
    except ValueError:
        return False
