"""Names of the resource, and small types that several field groups share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo_operator.api.schema import spec_field

GROUP = "octavo.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMDeployment"
PLURAL = "llmdeployments"
OWNER_LABEL = f"{GROUP}/llmdeployment"  # on every child and pod; watches select by it
FIELD_MANAGER = "octavo-operator"  # of server-side apply

Amount = int | str  # a Kubernetes quantity: 20Gi, 2, 500m

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
