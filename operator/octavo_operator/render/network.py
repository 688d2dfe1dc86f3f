"""The Service and the NetworkPolicy of the pods."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.api.common import GATEWAY_LABEL
from octavo_operator.config import OperatorConfig
from octavo_operator.render import names, snippets
from octavo_operator.render.group_policy import group_egress, group_ingress
from octavo_operator.render.router.objects import Stage

Json = dict[str, Any]

GATEWAYS: Json = {  # routers of the namespace's LLMGateways
    "podSelector": {
        "matchLabels": {names.COMPONENT_LABEL: names.ROUTER},
        "matchExpressions": [{"key": GATEWAY_LABEL, "operator": "Exists"}],
    }
}


def expected_service(deployment: LLMDeployment, config: OperatorConfig, stage: Stage) -> Json:
    """The Service that clients use, in front of the engine's pods or of the routers."""
    spec = deployment.spec
    ports = [
        {"name": "http", "port": spec.service.port, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}
    ]
    if has_service_monitor(deployment) and not stage.has_routers:
        # Prometheus uses the port's name, so any number will do that is not the API's.
        number = names.MANAGEMENT_PORT + (spec.service.port == names.MANAGEMENT_PORT)
        ports.append({"name": "management", "port": number, "targetPort": "management", "protocol": "TCP"})
    body: Json = {
        "type": spec.service.type,
        "selector": names.selector(deployment, names.ROUTER if stage.is_routed else names.ENGINE),
        "ports": ports,
        **_session_affinity(deployment, stage),
    }
    if spec.service.load_balancer_class is not None:
        body["loadBalancerClass"] = spec.service.load_balancer_class
    if spec.service.external_traffic_policy is not None:
        body["externalTrafficPolicy"] = spec.service.external_traffic_policy
    out = names.manifest(deployment, "v1", "Service", {"spec": body})
    if annotations := snippets.written(spec.service.annotations, config):
        out["metadata"]["annotations"] = annotations
    return out


def client_affinity(seconds: int = 10800) -> Json:
    """Fields of a Service that sends what one address asks to one pod."""
    return {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}}}


def _session_affinity(deployment: LLMDeployment, stage: Stage) -> Json:
    """Routers do not tell each other which replica has a conversation, so one client is to keep to one router."""
    routing = deployment.spec.routing
    if routing.strategy == "clientIP":
        return client_affinity(routing.client_ip.timeout_seconds) if routing.client_ip else client_affinity()
    return client_affinity() if stage.is_routed else {"sessionAffinity": "None"}


def has_service_monitor(deployment: LLMDeployment) -> bool:
    """True if a Service has to name the port of the pods' metrics."""
    monitoring = deployment.spec.monitoring
    return monitoring.enabled and monitoring.kind == "ServiceMonitor"


def expected_network_policy(deployment: LLMDeployment, config: OperatorConfig, stage: Stage) -> Json | None:
    """The NetworkPolicy of the engine's pods; None: spec.networkPolicy.enabled is false."""
    policy = deployment.spec.network_policy
    if not policy.enabled:
        return None
    api: Json = {"ports": [{"port": "http", "protocol": "TCP"}]}
    routers = [*([router_peer(deployment)] if stage is not Stage.NONE else []), GATEWAYS]
    if stage is Stage.CLOSED and deployment.spec.inference_pool is None:  # its gateways ask the pods themselves
        api["from"] = routers
    elif policy.ingress_from:
        api["from"] = [*(dict(peer) for peer in policy.ingress_from), *routers]
    management_from = [dict(peer) for peer in policy.management_from] or default_management_peers(config)
    if policy.management_from:
        management_from += routers  # their health checks
    if deployment.spec.autoscaling or deployment.spec.adapters is not None:  # the operator asks the pods
        management_from = [*management_from, operator_peer(config)]
    body: Json = {
        "podSelector": {"matchLabels": names.selector(deployment)},
        "policyTypes": ["Ingress"],
        "ingress": [
            api,
            {"ports": [{"port": "management", "protocol": "TCP"}], "from": management_from},
            *group_ingress(deployment),
        ],
    }
    if policy.egress is not None:
        body["policyTypes"] = ["Ingress", "Egress"]
        body["egress"] = [
            *(dict(rule) for rule in policy.egress),
            *group_egress(deployment),
            *_media_egress(deployment),
        ]
    return names.manifest(deployment, "networking.k8s.io/v1", "NetworkPolicy", {"spec": body})


# Addresses that the engine itself refuses to dial, as far as they may be a cluster's: policies know no names.
_PRIVATE = {
    "0.0.0.0/0": ["10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"],
    "::/0": ["::1/128", "fc00::/7", "fe80::/10"],
}


def _media_egress(deployment: LLMDeployment) -> list[Json]:
    """Return the rules that pods which fetch images always need, whatever spec.networkPolicy.egress says."""
    multimodal = deployment.spec.engine.multimodal
    if multimodal is None or not multimodal.allowed_media_domains:
        return []
    public = [{"ipBlock": {"cidr": cidr, "except": private}} for cidr, private in _PRIVATE.items()]
    dns = {"ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]}
    return [{"ports": [{"port": 443, "protocol": "TCP"}], "to": public}, dns]


def expected_router_policy(deployment: LLMDeployment, config: OperatorConfig) -> Json | None:
    """The NetworkPolicy of the routers; None: spec.networkPolicy.enabled is false."""
    policy = deployment.spec.network_policy
    if not policy.enabled:
        return None
    api: Json = {"ports": [{"port": "http", "protocol": "TCP"}]}
    if policy.ingress_from:
        api["from"] = [dict(peer) for peer in policy.ingress_from]
    metrics_from = [dict(peer) for peer in policy.management_from] or default_management_peers(config)
    # The operator asks what is held, where replicas may be 0, and what Envoy has rejected.
    asks = [*metrics_from, *([operator_peer(config)] if deployment.routers_hold else [])]
    body: Json = {
        "podSelector": {"matchLabels": names.selector(deployment, names.ROUTER)},
        "policyTypes": ["Ingress"],
        "ingress": [
            api,
            {"ports": [{"port": "metrics", "protocol": "TCP"}], "from": metrics_from},
            {"ports": [{"port": "management", "protocol": "TCP"}], "from": asks},
            {"ports": [{"port": "control", "protocol": "TCP"}], "from": [operator_peer(config)]},
        ],
    }
    if policy.egress is not None:  # what the engine's pods may reach is no matter of theirs
        engine = {"podSelector": {"matchLabels": names.selector(deployment)}}
        body["policyTypes"] = ["Ingress", "Egress"]
        body["egress"] = [
            {
                "ports": [{"port": port, "protocol": "TCP"} for port in (names.API_PORT, names.MANAGEMENT_PORT)],
                "to": [engine],
            },
            {"ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]},
        ]
    return names.manifest(
        deployment,
        "networking.k8s.io/v1",
        "NetworkPolicy",
        {"spec": body},
        names.router(deployment.name),
        component=names.ROUTER,
    )


def router_peer(deployment: LLMDeployment) -> Json:
    """The routers, as a peer of a NetworkPolicy."""
    return {"podSelector": {"matchLabels": names.selector(deployment, names.ROUTER)}}


def operator_peer(config: OperatorConfig) -> Json:
    """The operator, as a peer."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": config.namespace}}}


def default_management_peers(config: OperatorConfig) -> list[Json]:
    """Return who may reach health and metrics where a spec names nobody."""
    peers: list[Json] = [{"podSelector": {}}]
    if config.management_namespaces:
        named = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": sorted(config.management_namespaces)}
        peers.append({"namespaceSelector": {"matchExpressions": [named]}})
    return peers
