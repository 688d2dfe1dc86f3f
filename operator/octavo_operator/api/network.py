# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""routing, service, auth, networkPolicy: how requests arrive, and whose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo_operator import kubernetes_schemas as k8s
from octavo_operator.api.common import KEY, MAP, SECRET_NAME
from octavo_operator.schema import Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class ClientIP:
    timeout_seconds: int = spec_field(
        "How long a client that sends nothing keeps its replica.", default=10800, minimum=1, maximum=86400
    )


@dataclass(frozen=True, kw_only=True)
class Routing:
    RULES: ClassVar = (
        Rule("self.strategy == 'clientIP' || !has(self.clientIP)", "routing.clientIP needs routing.strategy clientIP"),
    )
    strategy: str = spec_field(
        "Which replica gets a request: none, any of them; clientIP, the one that the same address had before.",
        default="none",
        enum=["none", "clientIP"],
    )
    client_ip: ClientIP | None = spec_field("Of strategy clientIP.", default=None)


@dataclass(frozen=True, kw_only=True)
class Service:
    type: str = spec_field("Kind of the Service.", default="ClusterIP", enum=["ClusterIP", "NodePort", "LoadBalancer"])
    port: int = spec_field("Port on which clients reach the model.", default=80, minimum=1, maximum=65535)
    annotations: dict[str, str] = spec_field("Annotations of the Service, for load balancers.", default={}, **MAP)


@dataclass(frozen=True, kw_only=True)
class ApiKeySecret:
    name: str = spec_field("Name of a Secret in the same namespace.", **SECRET_NAME)
    key: str = spec_field("Key of the Secret that holds the API key.", default="apiKey", **KEY)


@dataclass(frozen=True, kw_only=True)
class Auth:
    api_key_secret_ref: ApiKeySecret = spec_field("Clients must send this key (Authorization: Bearer ...).")


@dataclass(frozen=True, kw_only=True)
class NetworkPolicy:
    enabled: bool = spec_field("Guard the pods by a NetworkPolicy.", default=True)
    ingress_from: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Who may reach the API; absent: everybody.", default=(), maxItems=32, items_schema=k8s.NETWORK_PEER
    )
    management_from: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Who may reach health and metrics besides the node; absent: this namespace and those that the operator is "
        "told of.",
        default=(),
        maxItems=32,
        items_schema=k8s.NETWORK_PEER,
    )
    egress: tuple[dict, ...] | None = spec_field(  # type: ignore[type-arg]
        "What the pods may reach; absent: everything; []: nothing.",
        default=None,
        maxItems=32,
        items_schema=k8s.EGRESS_RULE,
    )
