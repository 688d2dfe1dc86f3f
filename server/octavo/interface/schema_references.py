"""References in JSON schemas, by name, address or pointer, as pointers into the schema itself. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

from octavo.interface.json_schema import Schema, Steps, at_pointer, mapped

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_NAMES = ("$anchor", "$dynamicAnchor", "$recursiveAnchor")
# Keywords that are left out, renamed or said in others where a grammar does not hold them (see `schema_keywords`).
_UNSTABLE = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "dependentSchemas",
        "dependencies",
        "propertyNames",
        "contains",
        "patternProperties",
        "additionalProperties",
        "unevaluatedProperties",
        "unevaluatedItems",
    }
)


def resolved(schema: Schema) -> Schema:
    """The schema with each reference to a part of it as a pointer (``#/$defs/x``), and without names and addresses of
    parts. A part that is referred to and may be left out where it stands (``#/not``) moves into ``$defs``. References
    to other documents stay. Raises ValueError for one that leads nowhere."""
    return _References(schema).copy if isinstance(schema, dict) else schema


class _References:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        definitions = root.get("$defs")
        self._definitions: dict[str, Any] = definitions if isinstance(definitions, dict) else {}
        self._places: dict[str, str] = {"": ""}  # pointers of schemas, by their address
        self._dynamic: Counter[str] = Counter()  # how many parts have a name that may mean another in other places
        # By their pointers, the schemas, the addresses of their documents, and whether they may be left out.
        self._found: dict[str, tuple[dict[str, Any], str, bool]] = {}
        self._find(root, "", "", False)
        self._moved: dict[str, str] = {}  # names in $defs, by the pointers that they had
        self._find_moved()
        self.copy = self._copied(root, "")
        if self._moved:
            parts = {name: self._copied(self._found[old][0], old) for old, name in self._moved.items()}
            self.copy["$defs"] = {**(self.copy["$defs"] if self._definitions else {}), **parts}

    def _find_moved(self) -> None:
        names = set(self._definitions)
        for schema, base, _ in list(self._found.values()):
            for _, _, place in self._targets(schema, base):
                if place in self._found and self._found[place][2] and place not in self._moved:
                    name = place[1:].replace("/", ".").replace("~", "-")
                    while name in names:
                        name += "_"
                    names.add(name)
                    self._moved[place] = name

    def _find(self, schema: Schema, pointer: str, base: str, unstable: bool) -> None:
        if not isinstance(schema, dict):
            return
        name = schema.get("$id", schema.get("id"))
        if isinstance(name, str) and not name.startswith("#"):
            base = urldefrag(urljoin(base, name))[0]
            self._places.setdefault(base, pointer)
        elif isinstance(name, str):  # as older drafts name an anchor
            self._places.setdefault(base + name, pointer)
        self._found[pointer] = schema, base, unstable
        for key in _NAMES:
            if isinstance(anchor := schema.get(key), str):
                self._places.setdefault(f"{base}#{anchor}", pointer)
                if key == "$dynamicAnchor":
                    self._dynamic[anchor] += 1
        mapped(
            schema,
            lambda part, steps: self._find(part, pointer + _path(steps), base, unstable or steps[0] in _UNSTABLE),
        )

    def _rewritten(self, schema: Schema, pointer: str) -> Schema:
        if not isinstance(schema, dict):
            return schema
        return {"$ref": self._pointer(pointer)} if pointer in self._moved else self._copied(schema, pointer)

    def _copied(self, schema: dict[str, Any], pointer: str) -> dict[str, Any]:
        copy = mapped(schema, lambda part, steps: self._rewritten(part, pointer + _path(steps)))
        for key in ("$id", *_NAMES):
            copy.pop(key, None)
        if isinstance(copy.get("id"), str):
            del copy["id"]
        if "json-schema.org/" not in str(copy.get("$schema")):  # no dialect that llguidance knows
            copy.pop("$schema", None)
        for key, reference, place in self._targets(schema, self._found[pointer][1]):
            copy.pop(key)
            copy["$ref"] = reference if place is None else self._pointer(place)
        return copy

    def _targets(self, schema: dict[str, Any], base: str) -> Iterator[tuple[str, str, str | None]]:
        """The schema's references that can be said by a pointer: keyword, value and place."""
        for key in _REFERENCES:
            if isinstance(reference := schema.get(key), str):
                if key == "$dynamicRef" and self._dynamic[reference.rpartition("#")[2]] > 1:
                    continue
                place = self._place(reference, base)
                if place is not None or key == "$ref":
                    yield key, reference, place

    def _pointer(self, place: str) -> str:
        """Return the pointer with its "#"."""
        place = f"/$defs/{self._moved[place]}" if place in self._moved else place
        return "#" + quote(place, safe="/~$!'()*+,;=:@&-._")

    def _place(self, reference: str, base: str) -> str | None:
        """None for what is in another document."""
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
        return found


def _path(steps: Steps) -> str:
    return "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in steps)
