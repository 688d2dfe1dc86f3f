"""References in JSON schemas, by name, address or pointer, as pointers into the schema itself. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

from octavo.interface.json_schema import Schema, Steps, at_pointer, mapped

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_NAMES = ("$anchor", "$dynamicAnchor", "$recursiveAnchor")


def resolved(schema: Schema) -> Schema:
    """The schema with each reference to a part of it as a pointer (``#/$defs/x``), and without names and addresses of
    parts. References to other documents stay. Raises ValueError for one that leads nowhere."""
    return _References(schema).copy if isinstance(schema, dict) else schema


class _References:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._places: dict[str, str] = {"": ""}  # pointers of schemas, by their address
        self._dynamic: Counter[str] = Counter()  # how many parts have a name that may mean another in other places
        self._bases: dict[str, str] = {}  # addresses of the documents that schemas are of, by their pointer
        self._find(root, "", "")
        self.copy = self._rewritten(root, "")

    def _find(self, schema: Schema, pointer: str, base: str) -> None:
        if not isinstance(schema, dict):
            return
        name = schema.get("$id", schema.get("id"))
        if isinstance(name, str) and not name.startswith("#"):
            base = urldefrag(urljoin(base, name))[0]
            self._places.setdefault(base, pointer)
        elif isinstance(name, str):  # as older drafts name an anchor
            self._places.setdefault(base + name, pointer)
        self._bases[pointer] = base
        for key in _NAMES:
            if isinstance(anchor := schema.get(key), str):
                self._places.setdefault(f"{base}#{anchor}", pointer)
                if key == "$dynamicAnchor":
                    self._dynamic[anchor] += 1
        mapped(schema, lambda part, steps: self._find(part, pointer + _path(steps), base))

    def _rewritten(self, schema: Schema, pointer: str) -> Schema:
        if not isinstance(schema, dict):
            return schema
        copy = mapped(schema, lambda part, steps: self._rewritten(part, pointer + _path(steps)))
        for key in ("$id", *_NAMES):
            copy.pop(key, None)
        if isinstance(copy.get("id"), str):
            del copy["id"]
        for key in _REFERENCES:
            if isinstance(reference := schema.get(key), str):
                if key == "$dynamicRef" and self._dynamic[reference.rpartition("#")[2]] > 1:
                    continue
                target = self._target(reference, self._bases[pointer])
                if target is not None or key == "$ref":
                    copy.pop(key)
                    copy["$ref"] = reference if target is None else target
        return copy

    def _target(self, reference: str, base: str) -> str | None:
        """A pointer with its "#"; None for what is in another document."""
        address = base + reference if reference.startswith("#") else urljoin(base, reference)
        document, fragment = urldefrag(address)
        fragment = unquote(fragment)
        if document not in self._places:
            return None
        if fragment and not fragment.startswith("/"):
            found = self._places.get(f"{document}#{fragment}")
        else:
            found = self._places[document] + fragment
            try:
                at_pointer(self._root, found)
            except KeyError:
                found = None
        if found is None:
            raise ValueError(f"$ref {reference!r} leads to no part of the schema")
        return "#" + quote(found, safe="/~$!'()*+,;=:@&-._")


def _path(steps: Steps) -> str:
    return "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in steps)
