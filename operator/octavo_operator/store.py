"""What the watches have told us: every LLMDeployment, and every child and pod of one.

Objects are kept as compact JSON text without the bookkeeping of the API server: a tenth of the memory of decoded
dictionaries, and decoding one takes less than a request would.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo_operator.api import KIND
from octavo_operator.ownership import foreign_additions
from octavo_operator.render.names import FIELD_MANAGER, OWNER_LABEL

Key = tuple[str, str]  # namespace and name of an LLMDeployment
Json = dict[str, Any]


@dataclass(frozen=True)
class Observed:
    """One live object. `foreign` are pointers to what others added to its spec."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str
    resource_version: str
    text: bytes
    foreign: tuple[str, ...] = ()

    @classmethod
    def of(cls, kind: str, api_version: str, body: Mapping[str, Any]) -> Observed:
        meta = dict(body["metadata"])
        foreign = (
            () if kind in (KIND, "Pod", "PersistentVolumeClaim") else tuple(foreign_additions(body, FIELD_MANAGER))
        )
        meta.pop("managedFields", None)
        annotations = {
            k: v for k, v in (meta.get("annotations") or {}).items() if not k.startswith("kubectl.kubernetes.io/last")
        }
        meta["annotations"] = annotations
        text = json.dumps(
            {**body, "apiVersion": api_version, "kind": kind, "metadata": meta}, separators=(",", ":"), default=dict
        ).encode()
        return cls(
            api_version, kind, meta["namespace"], meta["name"], meta["uid"], meta["resourceVersion"], text, foreign
        )

    @property
    def body(self) -> Json:
        return json.loads(self.text)

    @property
    def owner(self) -> Key | None:
        """The LLMDeployment that this belongs to by its label."""
        if self.kind == KIND:
            return (self.namespace, self.name)
        name = (self.body["metadata"].get("labels") or {}).get(OWNER_LABEL)
        return (self.namespace, name) if name else None


class Store:
    """Objects by kind, namespace and name, found by their LLMDeployment."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str, str], tuple[Observed, Key | None]] = {}
        self._children: defaultdict[Key, set[tuple[str, str, str]]] = defaultdict(set)

    def put(self, one: Observed) -> Key | None:
        """Remembers it; the LLMDeployment to look at, or None when nothing is new."""
        place = (one.kind, one.namespace, one.name)
        known = self._objects.get(place)
        # Our own writes are known from their answers before the watch tells of them, and of what was before.
        if known and known[0].uid == one.uid and int(known[0].resource_version) >= int(one.resource_version):
            return None
        owner = one.owner
        if known and known[1] != owner and known[1]:
            self._children[known[1]].discard(place)
        self._objects[place] = (one, owner)
        if owner:
            self._children[owner].add(place)
        return owner

    def drop(self, kind: str, namespace: str, name: str, uid: str | None = None) -> Key | None:
        """Forgets it (only if it is still the one of `uid`); the LLMDeployment to look at."""
        place = (kind, namespace, name)
        known = self._objects.get(place)
        if known is None or (uid is not None and known[0].uid != uid):
            return None
        del self._objects[place]
        owner = known[1]
        if owner:
            self._children[owner].discard(place)
            if not self._children[owner]:
                del self._children[owner]
        return owner

    def places(self, kind: str) -> set[tuple[str, str, str]]:
        """What is known of a kind; to be asked before a listing begins, for `replace`."""
        return {place for place in self._objects if place[0] == kind}

    def replace(self, listed: Iterable[Observed], known_before: set[tuple[str, str, str]]) -> set[Key]:
        """Takes a complete list of one kind; the LLMDeployments to look at.

        What a watch has told of while the list was made is newer than the list, and stays.
        """
        changed = set()
        seen = set()
        for one in listed:
            seen.add((one.kind, one.namespace, one.name))
            if owner := self.put(one):
                changed.add(owner)
        for place in known_before - seen:
            if owner := self.drop(*place):
                changed.add(owner)
        return changed

    def get(self, kind: str, namespace: str, name: str) -> Observed | None:
        known = self._objects.get((kind, namespace, name))
        return known[0] if known else None

    def children(self, key: Key) -> list[Observed]:
        """All that belongs to an LLMDeployment, itself left out."""
        places = sorted(self._children.get(key, ()))
        return [self._objects[place][0] for place in places if place[0] != KIND]

    def deployments(self) -> list[Key]:
        """All LLMDeployments."""
        return [(namespace, name) for kind, namespace, name in self._objects if kind == KIND]

    def __len__(self) -> int:
        return len(self._objects)
