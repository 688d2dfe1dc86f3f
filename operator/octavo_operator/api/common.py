"""Names of the resource, and small types that several field groups share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from octavo_operator.api.schema import SpecError, spec_field

GROUP = "octavo.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMDeployment"
PLURAL = "llmdeployments"
OWNER_LABEL = f"{GROUP}/llmdeployment"  # on every child and pod of an LLMDeployment
GATEWAY_LABEL = f"{GROUP}/llmgateway"  # on every object and pod of an LLMGateway
FIELD_MANAGER = "octavo-operator"  # of server-side apply
RESTARTED_AT = "kubectl.kubernetes.io/restartedAt"  # annotation: all pods are replaced when it changes
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"  # FIELD_MANAGER on all objects and pods; watches select by it

Key = tuple[str, str]  # namespace and name of an LLMDeployment; of an LLMGateway, gateway_key()

Amount = int | str  # a Kubernetes quantity: 20Gi, 2, 500m


_GATEWAY_PREFIX = "llmgateway/"  # no name has a slash


@dataclass(frozen=True)
class Owner:
    """An LLMDeployment or an LLMGateway, as the owner of the objects that are made for it."""

    name: str
    namespace: str
    uid: str
    generation: int
    status: dict[str, Any] = field(compare=False)  # as it was observed

    kind: ClassVar[str]
    label: ClassVar[str]  # that its objects have, with its name

    @property
    def key(self) -> Key:
        """Its key in the queue and in the store."""
        is_gateway = self.label == GATEWAY_LABEL
        return gateway_key(self.namespace, self.name) if is_gateway else (self.namespace, self.name)

    def owner_reference(self) -> dict[str, Any]:
        """Return the entry for metadata.ownerReferences of its children."""
        reference = {"apiVersion": API_VERSION, "kind": self.kind, "name": self.name, "uid": self.uid}
        return {**reference, "controller": True, "blockOwnerDeletion": True}


@dataclass(frozen=True)
class InvalidOwner(Owner):
    """An object whose stored spec is older than the CRD's current rules, and does not parse by them."""

    error: str

    @classmethod
    def of(cls, data: Mapping[str, Any], error: SpecError) -> Self:
        """Keep the identity of an object of the API whose spec does not parse, and the error."""
        return cls(*identity(data), str(error))


def identity(data: Mapping[str, Any]) -> tuple[str, str, str, int, dict[str, Any]]:
    """Return the fields of `Owner` of an object of the API."""
    meta = data["metadata"]
    return meta["name"], meta["namespace"], meta["uid"], meta.get("generation", 1), data.get("status") or {}


def gateway_key(namespace: str, name: str) -> Key:
    """The key of an LLMGateway, which is no LLMDeployment's: both may have one name."""
    return namespace, _GATEWAY_PREFIX + name


def gateway_name(key: Key) -> str | None:
    """The name of the LLMGateway; None: the key is an LLMDeployment's."""
    return key[1].removeprefix(_GATEWAY_PREFIX) if key[1].startswith(_GATEWAY_PREFIX) else None


SECRET_NAME: dict[str, Any] = {"pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
KEY: dict[str, Any] = {"pattern": r"^[-._a-zA-Z0-9]+$", "maxLength": 253}
SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}
BY_NAME: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
MAP: dict[str, Any] = {"maxProperties": 64}
INT_OR_PERCENT: dict[str, Any] = {
    "x-kubernetes-int-or-string": True,
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "pattern": r"^(100|[0-9]{1,2})%$",
    "minimum": 0,
    "maximum": 1000,
}


@dataclass(frozen=True, kw_only=True)
class SecretKey:
    """A key of a Secret in the same namespace."""

    name: str = spec_field("Name of a Secret in the same namespace.", **SECRET_NAME)
    key: str = spec_field("Key in the Secret.", default="token", **KEY)


@dataclass(frozen=True, kw_only=True)
class ConfigMapKey:
    """A key of a ConfigMap in the same namespace."""

    name: str = spec_field("Name of a ConfigMap in the same namespace.", **SECRET_NAME)
    key: str = spec_field("Key in the ConfigMap.", default="chat_template.jinja", **KEY)
