"""What the watches have told us: every LLMDeployment, and every child and pod of one.

Objects are kept as compact JSON text without the bookkeeping of the API server: a tenth of the memory of decoded
dictionaries, and decoding one takes less than a request would.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo_operator.api import KIND
from octavo_operator.kube.field_ownership import foreign_additions, other_managers
from octavo_operator.render.names import FIELD_MANAGER, OWNER_LABEL

Key = tuple[str, str]  # namespace and name of an LLMDeployment
Json = dict[str, Any]


@dataclass(frozen=True)
class Observed:
    """One live object. `foreign` are pointers to what others added to its spec, `managers` their names."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str
    resource_version: str
    text: bytes
    foreign: tuple[str, ...] = ()
    managers: tuple[str, ...] = ()

    @classmethod
    def of(cls, kind: str, api_version: str, body: Mapping[str, Any]) -> Observed:
        meta = dict(body["metadata"])
        foreign: tuple[str, ...] = ()
        managers: tuple[str, ...] = ()
        if kind not in (KIND, "Pod", "PersistentVolumeClaim"):
            foreign = tuple(foreign_additions(body, FIELD_MANAGER))
            managers = tuple(other_managers(body, FIELD_MANAGER))
        meta.pop("managedFields", None)
        annotations = {
            k: v for k, v in (meta.get("annotations") or {}).items() if not k.startswith("kubectl.kubernetes.io/last")
        }
        meta["annotations"] = annotations
        text = json.dumps(
            {**body, "apiVersion": api_version, "kind": kind, "metadata": meta}, separators=(",", ":"), default=dict
        ).encode()
        return cls(
            api_version, kind, meta["namespace"], meta["name"], meta["uid"], meta["resourceVersion"], text, foreign,
            managers,
        )  # fmt: skip

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
        self._gone: OrderedDict[tuple[str, str, str], int] = OrderedDict()  # versions at which objects ended

    def knows(self, kind: str, body: Mapping[str, Any]) -> bool:
        """Whether this is old news: of the version that is here, or of one before it or before the object's end.

        What happens reaches us by several ways: watches, listings, and the answers to our own writes. An answer can
        arrive after the watch has told that the object was deleted; without a memory of that it would be here for good.
        """
        meta = body["metadata"]
        return self._is_old((kind, meta["namespace"], meta["name"]), int(meta["resourceVersion"]))

    def _is_old(self, place: tuple[str, str, str], version: int) -> bool:
        known = self._objects.get(place)
        return version <= max(int(known[0].resource_version) if known else 0, self._gone.get(place, 0))

    def put(self, one: Observed) -> Key | None:
        """Remembers it; the LLMDeployment to look at, or None when nothing is new."""
        if self._is_old((one.kind, one.namespace, one.name), int(one.resource_version)):
            return None
        return self._set(one)

    def _set(self, one: Observed) -> Key | None:
        place = (one.kind, one.namespace, one.name)
        known = self._objects.get(place)
        owner = one.owner
        if known and known[1] != owner and known[1]:
            self._children[known[1]].discard(place)
        self._objects[place] = (one, owner)
        if owner:
            self._children[owner].add(place)
        return owner

    def drop(self, kind: str, namespace: str, name: str, uid: str, version: str | None = None) -> Key | None:
        """Forgets it, if it is still the one of `uid`; the LLMDeployment to look at. `version`: at which it ended."""
        place = (kind, namespace, name)
        known = self._objects.get(place)
        if known and known[0].uid != uid:
            known = None
        ended = int(version) if version else int(known[0].resource_version) if known else 0
        self._gone[place] = max(ended, self._gone.pop(place, 0))
        if len(self._gone) > 4096:
            self._gone.popitem(last=False)
        if known is None:
            return None
        del self._objects[place]
        owner = known[1]
        if owner:
            self._children[owner].discard(place)
            if not self._children[owner]:
                del self._children[owner]
        return owner

    def listing(self, kind: str, namespace: str | None = None) -> Listing:
        """To be asked for before a complete listing of a kind begins. `namespace`: None lists all of them."""
        return Listing(self, kind, namespace)

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


class Listing:
    """A complete list of one kind that is being read, page by page, while watches go on telling.

    It was read after all that was known when it began, so it replaces that, whatever the versions say: they go back
    when etcd is restored from a backup. Only what was told since then may be newer, and there versions decide.
    """

    def __init__(self, store: Store, kind: str, namespace: str | None) -> None:
        self._store, self._kind = store, kind
        self._before = {
            place: one
            for place, (one, _) in store._objects.items()
            if place[0] == kind and namespace in (None, place[1])
        }
        self._ended_before = {
            place: version
            for place, version in store._gone.items()
            if place[0] == kind and namespace in (None, place[1])
        }
        self._left = dict(self._before)
        self._changed: set[Key] = set()

    def add(self, api_version: str, body: Mapping[str, Any]) -> None:
        meta = body["metadata"]
        place = (self._kind, meta["namespace"], meta["name"])
        self._left.pop(place, None)
        known = self._store._objects.get(place)
        live, before = known[0] if known else None, self._before.get(place)
        if live is before and self._store._gone.get(place) == self._ended_before.get(place):
            if live is not None and (live.uid, live.resource_version) == (meta["uid"], meta["resourceVersion"]):
                return
            self._store._gone.pop(place, None)
            owner = self._store._set(Observed.of(self._kind, api_version, body))
        elif self._store.knows(self._kind, body):
            return
        else:
            owner = self._store.put(Observed.of(self._kind, api_version, body))
        self._changed.update(key for key in (owner, known[1] if known else None) if key)

    def finish(self, version: str | None = None) -> set[Key]:
        """The list was complete: what is not in it is gone. The LLMDeployments to look at. `version`: of the list;
        None: the cluster does not know the kind."""
        for place, one in self._left.items():
            ended = min(int(one.resource_version), int(version)) if version else None
            if owner := self._store.drop(*place, one.uid, str(ended) if ended else None):
                self._changed.add(owner)
        if version:  # ends of a history that is no more must not hide what comes now
            for place, ended in self._ended_before.items():
                if self._store._gone.get(place) == ended > int(version):
                    self._store._gone[place] = int(version)
        return self._changed
