# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""routing, service, auth, networkPolicy: access to the pods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo_operator.api import kubernetes_schemas as k8s
from octavo_operator.api.common import KEY, MAP, SECRET_NAME, Amount
from octavo_operator.api.resources import RESOURCE_MAP, WHOLE_BYTES, Resources
from octavo_operator.api.schema import Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class ClientIP:
    """`spec.routing.clientIP`."""

    timeout_seconds: int = spec_field(
        "Seconds after which an idle client loses its affinity.", default=10800, minimum=1, maximum=86400
    )


@dataclass(frozen=True, kw_only=True)
class RouterResources(Resources):
    """`spec.routing.prefix.resources`."""

    requests: dict[str, Amount] = spec_field(
        "Resources that the scheduler reserves for a router. Default: cpu 100m, memory 128Mi.",
        default={},
        override=RESOURCE_MAP,
        rules=(WHOLE_BYTES,),
    )
    limits: dict[str, Amount] = spec_field(
        "Maximum resources of a router. Default: memory 1Gi.", default={}, override=RESOURCE_MAP, rules=(WHOLE_BYTES,)
    )


@dataclass(frozen=True, kw_only=True)
class PickerResources(Resources):
    """`spec.routing.prefix.pickerResources`."""

    requests: dict[str, Amount] = spec_field(
        "Resources that the scheduler reserves for a picker. Default: cpu 50m, memory 64Mi.",
        default={},
        override=RESOURCE_MAP,
        rules=(WHOLE_BYTES,),
    )
    limits: dict[str, Amount] = spec_field(
        "Maximum resources of a picker. Default: memory 256Mi.", default={}, override=RESOURCE_MAP, rules=(WHOLE_BYTES,)
    )


@dataclass(frozen=True, kw_only=True)
class Affinity:
    """Settings and size of routers that route by prefix: `spec.routing.prefix`, and those of a gateway."""

    session_headers: tuple[str, ...] = spec_field(
        (
            "Request headers that identify a conversation; the first one present wins. Without one, "
            "prompt_cache_key or the beginning of the conversation identifies it."
        ),
        default=("x-session-id",),
        maxItems=4,
        items_schema={"type": "string", "pattern": "^[A-Za-z0-9-]{1,64}$"},
    )
    load_factor: int | None = spec_field(
        "Maximum load of a replica, in percent of the mean: above it, requests go to the next one. Default: 125 by the "
        "router's picker, 110 while the picker does not answer.",
        default=None,
        minimum=110,
        maximum=1000,
    )
    key_bytes: int = spec_field(
        "Bytes of a completion's prompt that have to be equal for the same replica.",
        default=2048,
        minimum=64,
        maximum=65536,
    )
    resources: RouterResources = spec_field("CPU and memory of each router.", default=RouterResources)
    picker_resources: PickerResources = spec_field(
        "CPU and memory of the picker beside each router.", default=PickerResources
    )


@dataclass(frozen=True, kw_only=True)
class Hold:
    """`spec.routing.prefix.hold`: requests that wait while there is no replica."""

    max_requests: int = spec_field(
        "Requests that may wait in one router; more get 503.", default=256, minimum=1, maximum=4096
    )
    max_seconds: int = spec_field(
        "Seconds for which a request may wait; then it gets 503.", default=300, minimum=1, maximum=540
    )


@dataclass(frozen=True, kw_only=True)
class Prefix(Affinity):
    """`spec.routing.prefix`: the routers."""

    replicas: int = spec_field("Number of routers.", default=2, minimum=1, maximum=16)
    hold: Hold = spec_field("Requests that wait for the first replica, with autoscaling.minReplicas 0.", default=Hold)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """`spec.routing`: which replica gets a request."""

    RULES: ClassVar = (
        Rule("self.strategy == 'clientIP' || !has(self.clientIP)", "routing.clientIP needs routing.strategy clientIP"),
        Rule("self.strategy == 'prefix' || !has(self.prefix)", "routing.prefix needs routing.strategy prefix"),
    )
    strategy: str = spec_field(
        "Routing of requests. none: to any replica. clientIP: requests of one client address to one replica. prefix: "
        "routers behind the same Service send each conversation to the replica whose cache knows its beginning.",
        default="none",
        enum=["none", "clientIP", "prefix"],
    )
    client_ip: ClientIP | None = spec_field("Settings of strategy clientIP.", default=None)
    prefix: Prefix | None = spec_field("Settings of strategy prefix.", default=None)

    @property
    def routers(self) -> Prefix | None:
        """Settings of the routers; None: there are none."""
        return (self.prefix or Prefix()) if self.strategy == "prefix" else None


@dataclass(frozen=True, kw_only=True)
class EndpointPicker:
    """`spec.inferencePool.endpointPickerRef`."""

    name: str = spec_field("Name of its Service, in the same namespace.", **SECRET_NAME)
    port: int = spec_field("Port of its Service.", default=9002, minimum=1, maximum=65535)


@dataclass(frozen=True, kw_only=True)
class InferencePool:
    """`spec.inferencePool`: for gateways of the Gateway API."""

    endpoint_picker_ref: EndpointPicker = spec_field(
        "Endpoint picker that a gateway asks for a replica. If it does not answer, the gateway chooses one itself."
    )


@dataclass(frozen=True, kw_only=True)
class Service:
    """`spec.service`: the Service in front of the pods."""

    RULES: ClassVar = (
        Rule(
            "!has(self.loadBalancerClass) || self.type == 'LoadBalancer'",
            "service.loadBalancerClass needs service.type LoadBalancer",
        ),
        Rule(
            "!has(self.externalTrafficPolicy) || self.type != 'ClusterIP'",
            "service.externalTrafficPolicy needs service.type NodePort or LoadBalancer",
        ),
        Rule(
            "self.type != 'LoadBalancer' || oldSelf.type != 'LoadBalancer' || (has(self.loadBalancerClass) == "
            "has(oldSelf.loadBalancerClass) && (!has(self.loadBalancerClass) || self.loadBalancerClass == "
            "oldSelf.loadBalancerClass))",
            "service.loadBalancerClass cannot be changed, as a Service's cannot; switch service.type to "
            "ClusterIP first",
        ),
    )
    type: str = spec_field("Type of the Service.", default="ClusterIP", enum=["ClusterIP", "NodePort", "LoadBalancer"])
    port: int = spec_field("Port of the Service.", default=80, minimum=1, maximum=65535)
    annotations: dict[str, str] = spec_field("Annotations of the Service, for load balancers.", default={}, **MAP)
    load_balancer_class: str | None = spec_field(
        "Load balancer implementation, with type LoadBalancer. It cannot be changed later.",
        default=None,
        minLength=1,
        maxLength=317,
    )
    external_traffic_policy: str | None = spec_field(
        "Nodes that accept external traffic. Cluster: all. Local: those with a pod, and client addresses are kept. For "
        "types NodePort and LoadBalancer.",
        default=None,
        enum=["Cluster", "Local"],
    )


@dataclass(frozen=True, kw_only=True)
class ApiKeySecret:
    """`spec.auth.apiKeySecretRef`."""

    name: str = spec_field("Name of a Secret in the same namespace.", **SECRET_NAME)
    key: str = spec_field("Key of the Secret that holds the API key.", default="apiKey", **KEY)


@dataclass(frozen=True, kw_only=True)
class Auth:
    """`spec.auth`: the API key of requests."""

    api_key_secret_ref: ApiKeySecret = spec_field(
        "Secret with the API key that clients must send (Authorization: Bearer ...)."
    )


@dataclass(frozen=True, kw_only=True)
class NetworkPolicy:
    """`spec.networkPolicy`: ingress to and egress from the pods."""

    enabled: bool = spec_field("Create a NetworkPolicy for the pods.", default=True)
    ingress_from: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Peers that may reach the API. Default: all.", default=(), maxItems=32, items_schema=k8s.NETWORK_PEER
    )
    management_from: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Peers that may reach health and metrics, besides the node. Default: this namespace and the operator's "
        "managementNamespaces.",
        default=(),
        maxItems=32,
        items_schema=k8s.NETWORK_PEER,
    )
    egress: tuple[dict, ...] | None = spec_field(  # type: ignore[type-arg]
        "Egress rules of the pods. Default: everything is allowed; []: nothing.",
        default=None,
        maxItems=32,
        items_schema=k8s.EGRESS_RULE,
    )
