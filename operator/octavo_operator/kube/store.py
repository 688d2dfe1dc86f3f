"""The objects as watches, listings and our own writes reported them last: LLMDeployments, LLMGateways, what they own.

Objects are kept as compact JSON text without managedFields: a tenth of the memory of decoded dictionaries, and decoding
one takes less time than a request would.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo_operator.api import FIELD_MANAGER, KIND, OWNER_LABEL, gateway
from octavo_operator.api import Key as Key
from octavo_operator.api.common import GATEWAY_LABEL, gateway_key
from octavo_operator.kube.field_ownership import foreign_additions, other_managers

ObjectRef = tuple[str, str]  # kind and name of an object of an owner
Json = dict[str, Any]

OWNER_KINDS = (KIND, gateway.KIND)


@dataclass(frozen=True)
class Observed:
    """One live object. `foreign`: JSON pointers to what other managers added to its spec; `managers`: their names."""

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
        """Take over an object of the API; list items lack kind and apiVersion."""
        meta = dict(body["metadata"])
        foreign: tuple[str, ...] = ()
        managers: tuple[str, ...] = ()
        if kind not in (*OWNER_KINDS, "Pod", "PersistentVolumeClaim", "Job"):
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
            api_version,
            kind,
            meta["namespace"],
            meta["name"],
            meta["uid"],
            meta["resourceVersion"],
            text,
            foreign,
            managers,
        )

    @property
    def body(self) -> Json:
        """The decoded object: a new one each time."""
        body: Json = json.loads(self.text)
        return body

    @property
    def owner(self) -> Key | None:
        """The LLMDeployment or LLMGateway that it belongs to by its label."""
        if self.kind == KIND:
            return self.namespace, self.name
        if self.kind == gateway.KIND:
            return gateway_key(self.namespace, self.name)
        labels = self.body["metadata"].get("labels") or {}
        if name := labels.get(OWNER_LABEL):
            return self.namespace, name
        name = labels.get(GATEWAY_LABEL)
        return gateway_key(self.namespace, name) if name else None


class Store:
    """Objects by kind, namespace and name, found by their owner."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str, str], tuple[Observed, Key | None]] = {}
        self._children: defaultdict[Key, set[tuple[str, str, str]]] = defaultdict(set)
        self._owners: defaultdict[tuple[str, str], set[str]] = defaultdict(set)  # names by kind and namespace
        self._deleted: OrderedDict[tuple[str, str, str], int] = OrderedDict()  # and at which resourceVersion

    def is_stale(self, kind: str, body: Mapping[str, Any]) -> bool:
        """True if `body` is not newer than the stored object, or than its deletion.

        Watches, listings and responses to our own writes overtake each other. A response can arrive after the watch
        reported the deletion; without a record of that, the object would stay here for good.
        """
        meta = body["metadata"]
        return self._is_known((kind, meta["namespace"], meta["name"]), int(meta["resourceVersion"]))

    def _is_known(self, identity: tuple[str, str, str], version: int) -> bool:
        known = self._objects.get(identity)
        return version <= max(int(known[0].resource_version) if known else 0, self._deleted.get(identity, 0))

    def put(self, one: Observed) -> Key | None:
        """Stores it. Returns the owner to reconcile, or None when the object is stale."""
        if self._is_known((one.kind, one.namespace, one.name), int(one.resource_version)):
            return None
        return self._set(one)

    def _set(self, one: Observed) -> Key | None:
        identity = (one.kind, one.namespace, one.name)
        known = self._objects.get(identity)
        owner = one.owner
        if known and known[1] != owner and known[1]:
            self._children[known[1]].discard(identity)
        self._objects[identity] = (one, owner)
        if one.kind in OWNER_KINDS:
            self._owners[one.kind, one.namespace].add(one.name)
        if owner:
            self._children[owner].add(identity)
        return owner

    def delete(self, kind: str, namespace: str, name: str, uid: str, version: str | None = None) -> Key | None:
        """Removes it, if it is still the one of `uid`. `version`: resourceVersion of the deletion. Returns the
        owner to reconcile."""
        identity = (kind, namespace, name)
        known = self._objects.get(identity)
        if known and known[0].uid != uid:
            known = None
        deleted = int(version) if version else int(known[0].resource_version) if known else 0
        self._deleted[identity] = max(deleted, self._deleted.pop(identity, 0))
        if len(self._deleted) > 4096:
            self._deleted.popitem(last=False)
        if known is None:
            return None
        del self._objects[identity]
        self._owners.get((kind, namespace), set()).discard(name)
        owner = known[1]
        if owner:
            self._children[owner].discard(identity)
            if not self._children[owner]:
                del self._children[owner]
        return owner

    def listing(self, kind: str, namespace: str | None = None) -> Listing:
        """Begin a complete listing of a kind. `namespace`: None for all."""
        return Listing(self, kind, namespace)

    def get(self, kind: str, namespace: str, name: str) -> Observed | None:
        """The object as it was reported last."""
        known = self._objects.get((kind, namespace, name))
        return known[0] if known else None

    def children(self, key: Key) -> list[Observed]:
        """Children and pods of an owner."""
        identities = sorted(self._children.get(key, ()))
        return [self._objects[identity][0] for identity in identities if identity[0] not in OWNER_KINDS]

    def deployments(self) -> list[Key]:
        """All LLMDeployments."""
        return [(namespace, name) for kind, namespace, name in self._objects if kind == KIND]

    def owner_keys(self) -> list[Key]:
        """Return the keys of all LLMDeployments and LLMGateways."""
        kinds = {KIND: lambda namespace, name: (namespace, name), gateway.KIND: gateway_key}
        return [kinds[kind](namespace, name) for kind, namespace, name in self._objects if kind in kinds]

    def owners(self, kind: str, namespace: str) -> list[Observed]:
        """The LLMDeployments or the LLMGateways of a namespace."""
        return [self._objects[kind, namespace, name][0] for name in sorted(self._owners.get((kind, namespace), ()))]

    def of_kind(self, kind: str) -> list[Observed]:
        """All objects of a kind. Looks at every object there is."""
        return [one for identity, (one, _) in self._objects.items() if identity[0] == kind]

    def __len__(self) -> int:
        return len(self._objects)


class Listing:
    """A complete list of one kind that is being read, page by page, while watches go on reporting.

    It is newer than all that was known when it started, so it replaces that, whatever the versions: they go back when
    etcd is restored from a backup. Only what was reported since then may be newer, and there versions decide.
    """

    def __init__(self, store: Store, kind: str, namespace: str | None) -> None:
        self._store, self._kind = store, kind
        self._before = {
            identity: one
            for identity, (one, _) in store._objects.items()
            if identity[0] == kind and namespace in (None, identity[1])
        }
        self._deleted_before = {
            identity: version
            for identity, version in store._deleted.items()
            if identity[0] == kind and namespace in (None, identity[1])
        }
        self._unlisted = dict(self._before)
        self._changed: set[Key] = set()

    def add(self, api_version: str, body: Mapping[str, Any]) -> None:
        """One object of the list."""
        meta = body["metadata"]
        identity = (self._kind, meta["namespace"], meta["name"])
        self._unlisted.pop(identity, None)
        known = self._store._objects.get(identity)
        live, before = known[0] if known else None, self._before.get(identity)
        if live is before and self._store._deleted.get(identity) == self._deleted_before.get(identity):
            if live is not None and (live.uid, live.resource_version) == (meta["uid"], meta["resourceVersion"]):
                return
            self._store._deleted.pop(identity, None)
            owner = self._store._set(Observed.of(self._kind, api_version, body))
        elif self._store.is_stale(self._kind, body):
            return
        else:
            owner = self._store.put(Observed.of(self._kind, api_version, body))
        self._changed.update(key for key in (owner, known[1] if known else None) if key)

    def finish(self, version: str | None = None) -> set[Key]:
        """The list is complete: what is not in it is deleted. `version`: of the list; None: the cluster does not have
        the kind. Returns the owners to reconcile."""
        for identity, one in self._unlisted.items():
            deleted = min(int(one.resource_version), int(version)) if version else None
            if owner := self._store.delete(*identity, one.uid, str(deleted) if deleted else None):
                self._changed.add(owner)
        if version:  # deletions of a history that was rolled back must not hide what comes now
            for identity, deleted in self._deleted_before.items():
                if self._store._deleted.get(identity) == deleted > int(version):
                    self._store._deleted[identity] = int(version)
        return self._changed
