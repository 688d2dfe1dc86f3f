"""The Service and the NetworkPolicy of the pods."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.config import OperatorConfig
from octavo_operator.render import names

Json = dict[str, Any]


def expected_service(deployment: LLMDeployment) -> Json:
    """The Service in front of the pods."""
    spec = deployment.spec
    ports = [
        {"name": "http", "port": spec.service.port, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}
    ]
    if spec.monitoring.enabled and spec.monitoring.kind == "ServiceMonitor":
        # Prometheus uses the port's name, so any number will do that is not the API's.
        number = names.MANAGEMENT_PORT + (spec.service.port == names.MANAGEMENT_PORT)
        ports.append({"name": "management", "port": number, "targetPort": "management", "protocol": "TCP"})
    body: Json = {
        "type": spec.service.type,
        "selector": names.selector(deployment),
        "ports": ports,
        "sessionAffinity": "None",
    }
    if spec.service.load_balancer_class is not None:
        body["loadBalancerClass"] = spec.service.load_balancer_class
    if spec.service.external_traffic_policy is not None:
        body["externalTrafficPolicy"] = spec.service.external_traffic_policy
    if spec.routing.strategy == "clientIP":
        seconds = spec.routing.client_ip.timeout_seconds if spec.routing.client_ip else 10800
        body["sessionAffinity"] = "ClientIP"
        body["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": seconds}}
    out = names.manifest(deployment, "v1", "Service", {"spec": body})
    if spec.service.annotations:
        out["metadata"]["annotations"] = dict(spec.service.annotations)
    return out


def expected_network_policy(deployment: LLMDeployment, config: OperatorConfig) -> Json | None:
    """The NetworkPolicy; None: spec.networkPolicy.enabled is false."""
    policy = deployment.spec.network_policy
    if not policy.enabled:
        return None
    api: Json = {"ports": [{"port": "http", "protocol": "TCP"}]}
    if policy.ingress_from:
        api["from"] = [dict(peer) for peer in policy.ingress_from]
    management_from = [dict(peer) for peer in policy.management_from] or _default_management_peers(config)
    if deployment.spec.autoscaling:  # the operator scrapes the pods
        named = {"kubernetes.io/metadata.name": config.namespace}
        management_from = [*management_from, {"namespaceSelector": {"matchLabels": named}}]
    body: Json = {
        "podSelector": {"matchLabels": names.selector(deployment)},
        "policyTypes": ["Ingress"],
        "ingress": [api, {"ports": [{"port": "management", "protocol": "TCP"}], "from": management_from}],
    }
    if policy.egress is not None:
        body["policyTypes"] = ["Ingress", "Egress"]
        body["egress"] = [dict(rule) for rule in policy.egress]
    return names.manifest(deployment, "networking.k8s.io/v1", "NetworkPolicy", {"spec": body})


def _default_management_peers(config: OperatorConfig) -> list[Json]:
    peers: list[Json] = [{"podSelector": {}}]
    if config.management_namespaces:
        named = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": sorted(config.management_namespaces)}
        peers.append({"namespaceSelector": {"matchExpressions": [named]}})
    return peers
