# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""LLMGateway: one address for the LLMDeployments of a namespace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_operator.api import kubernetes_schemas as k8s
from octavo_operator.api.common import (
    BY_NAME,
    GATEWAY_LABEL,
    MAP,
    RESTARTED_AT,
    SECRET_NAME,
    SET,
    InvalidOwner,
    Owner,
    identity,
)
from octavo_operator.api.network import Affinity, ApiKeySecret, Service
from octavo_operator.api.schema import Rule, from_json, spec_field

KIND = "LLMGateway"
PLURAL = "llmgateways"
_MODEL: dict[str, Any] = {"minLength": 1, "maxLength": 253}
_HOST: dict[str, Any] = {"minLength": 1, "maxLength": 253}
_BY_LLMDEPLOYMENT: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["llmdeployment"]}


@dataclass(frozen=True, kw_only=True)
class Alias:
    """`spec.aliases[]`."""

    RULES: ClassVar = (Rule("self.name != self.model", "aliases: name and model must differ"),)
    name: str = spec_field("Model name in requests.", **_MODEL)
    model: str = spec_field("Name of a model that an LLMDeployment serves.", **_MODEL)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """`spec.splits[].backends[]`."""

    llmdeployment: str = spec_field("Name of an LLMDeployment.", minLength=1, maxLength=40)
    weight: int = spec_field("Share of the conversations, relative to the other backends.", minimum=0, maximum=1000)


@dataclass(frozen=True, kw_only=True)
class Split:
    """`spec.splits[]`: a model name that several LLMDeployments share."""

    RULES: ClassVar = (Rule("self.backends.exists(b, b.weight > 0)", "splits: every weight is 0; raise one"),)
    name: str = spec_field("Model name in requests.", **_MODEL)
    backends: tuple[Backend, ...] = spec_field(
        "LLMDeployments that share it, by weight. A conversation stays with one.",
        minItems=1,
        maxItems=8,
        **_BY_LLMDEPLOYMENT,
    )


@dataclass(frozen=True, kw_only=True)
class TLSSecret:
    """`spec.tls.secretRef`."""

    name: str = spec_field("Name of a Secret in the same namespace, with tls.crt and tls.key.", **SECRET_NAME)


@dataclass(frozen=True, kw_only=True)
class TLS:
    """`spec.tls`."""

    secret_ref: TLSSecret = spec_field("Secret with the certificate. A renewed one is used without a restart.")


@dataclass(frozen=True, kw_only=True)
class ParentRef:
    """`spec.httpRoute.parentRefs[]`."""

    name: str = spec_field("Name of a Gateway.", **SECRET_NAME)
    namespace: str | None = spec_field("Its namespace. Default: this one.", default=None, maxLength=63)
    section_name: str | None = spec_field("Its listener. Default: all.", default=None, maxLength=253)


@dataclass(frozen=True, kw_only=True)
class HTTPRoute:
    """`spec.httpRoute`."""

    parent_refs: tuple[ParentRef, ...] = spec_field("Gateways.", minItems=1, maxItems=8)
    hostnames: tuple[str, ...] = spec_field(
        "Host names.", maxItems=8, minItems=1, items_schema={"type": "string", **_HOST}
    )
    scheme: str = spec_field("Protocol of the Gateways' listeners.", default="https", enum=["https", "http"])


@dataclass(frozen=True, kw_only=True)
class Ingress:
    """`spec.ingress`."""

    host: str = spec_field("Host name.", **_HOST)
    class_name: str | None = spec_field("IngressClass. Default: the cluster's.", default=None, maxLength=253)
    tls_secret_ref: TLSSecret | None = spec_field("Secret with its certificate. Unset: plain HTTP.", default=None)
    annotations: dict[str, str] = spec_field("Annotations, for its controller.", default={}, **MAP)


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """`spec.tenants[]`: a holder of an API key."""

    name: str = spec_field(
        "Name, in metrics and limits.", pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", minLength=1, maxLength=63
    )
    api_key_secret_ref: ApiKeySecret = spec_field(
        "Secret with the API key that the tenant's clients send (Authorization: Bearer ...). A changed key is used "
        "without a restart."
    )
    requests_per_minute: int | None = spec_field(
        "Maximum number of requests a minute, of all routers together. Default: no limit.",
        default=None,
        minimum=1,
        maximum=1_000_000,
    )
    tokens_per_minute: int | None = spec_field(
        "Maximum number of tokens a minute, of prompts and answers. Default: no limit.",
        default=None,
        minimum=1,
        maximum=1_000_000_000,
    )
    max_concurrent: int | None = spec_field(
        "Maximum number of requests at the same time. Default: no limit.", default=None, minimum=1, maximum=100_000
    )
    models: tuple[str, ...] | None = spec_field(
        "Names of the models, or aliases, that the tenant may use. Default: all.",
        default=None,
        maxItems=256,
        items_schema={"type": "string", **_MODEL},
        **SET,
    )
    isolate_cache: bool = spec_field(
        "Do not share the prefix cache with other tenants. Prevents timing side channels.", default=False
    )


@dataclass(frozen=True, kw_only=True)
class LLMGatewaySpec:
    """The whole spec."""

    RULES: ClassVar = (
        Rule(
            "!has(self.tenants) || self.tenants.all(t, self.tenants.exists_one(u, u.apiKeySecretRef.name == "
            "t.apiKeySecretRef.name && u.apiKeySecretRef.key == t.apiKeySecretRef.key))",
            "tenants: two of them have the same apiKeySecretRef; a key tells one tenant from another",
        ),
    )
    selector: dict[str, Any] | None = spec_field(
        "Labels of the LLMDeployments to serve, of this namespace. Default: all.",
        default=None,
        override={**k8s.LABEL_SELECTOR, "description": "Labels of the LLMDeployments of this namespace. Default: all."},
    )
    replicas: int = spec_field("Number of routers.", default=2, minimum=1, maximum=16)
    aliases: tuple[Alias, ...] = spec_field("Additional model names.", default=(), maxItems=256, **BY_NAME)
    splits: tuple[Split, ...] = spec_field(
        "Model names that several LLMDeployments share, for a canary.", default=(), maxItems=64, **BY_NAME
    )
    service: Service = spec_field("Service in front of the routers.", default=Service)
    tls: TLS | None = spec_field("Serve HTTPS. Unset: plain HTTP.", default=None)
    tenants: tuple[Tenant, ...] = spec_field(
        "Holders of API keys. With none, requests are passed on as they are, and the models' own auth applies.",
        default=(),
        maxItems=128,
        **BY_NAME,
    )
    ingress: Ingress | None = spec_field("Create an Ingress.", default=None)
    http_route: HTTPRoute | None = spec_field("Create an HTTPRoute of the Gateway API.", default=None)
    routing: Affinity = spec_field("Choice of a model's replica.", default=Affinity)


@dataclass(frozen=True)
class LLMGateway(Owner):
    """One object of the API, with its spec parsed."""

    kind, label = KIND, GATEWAY_LABEL

    spec: LLMGatewaySpec
    deleting: bool = False
    restarted_at: str | None = None  # by the annotation RESTARTED_AT

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LLMGateway:
        """Parse an object of the API. Raises SpecError for a spec that does not fit the CRD's types."""
        meta = data["metadata"]
        return cls(
            *identity(data),
            from_json(LLMGatewaySpec, data.get("spec") or {}, "spec"),
            "deletionTimestamp" in meta,
            (meta.get("annotations") or {}).get(RESTARTED_AT) or None,
        )

    def selects(self, labels: Mapping[str, str]) -> bool:
        """True if an LLMDeployment of the same namespace, with these labels, is served."""
        selector = self.spec.selector or {}
        wanted = selector.get("matchLabels") or {}
        requirements = selector.get("matchExpressions") or []
        return wanted.items() <= labels.items() and all(_meets(labels, one) for one in requirements)


@dataclass(frozen=True)
class InvalidLLMGateway(InvalidOwner):
    """An LLMGateway whose stored spec does not parse by the CRD's current rules."""

    kind, label = KIND, GATEWAY_LABEL


def _meets(labels: Mapping[str, str], requirement: Mapping[str, Any]) -> bool:
    value, values = labels.get(requirement["key"]), requirement.get("values") or []
    match requirement["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case _:
            return value is None
