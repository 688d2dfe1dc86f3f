"""Renders an LLMGateway into manifests of its objects: routers behind a Service. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo_operator.api import FIELD_MANAGER, stable_json
from octavo_operator.api.common import GATEWAY_LABEL
from octavo_operator.api.gateway import LLMGateway
from octavo_operator.api.lifecycle import Lifecycle
from octavo_operator.config import OperatorConfig
from octavo_operator.diff import digest
from octavo_operator.render import names, snippets
from octavo_operator.render.network import client_affinity, default_management_peers, operator_peer
from octavo_operator.render.router.gateway import LIMITS_FILE, files
from octavo_operator.render.router.objects import (
    FILES,
    PodFrame,
    budget_spec,
    deployment_spec,
    holding,
    pod_template,
)
from octavo_operator.render.router.served import HOLD, TENANTS_PATH, TLS_PATH, Candidate, envoy_settings, gateway_spec

Json = dict[str, Any]

SETTINGS = "octavo.dev/router-settings"  # annotation of the ConfigMap: hash of the fields that its files are made from


@dataclass(frozen=True)
class GatewayPods:
    """The routers of a gateway: their pod template, their files, and the annotation that records the template."""

    template: Json
    files: dict[str, str]
    record: dict[str, str]


def settings_digest(gateway: LLMGateway) -> str:
    """Hash of the fields of which all files are made but those of the models."""
    fields = stable_json(gateway.spec)
    return digest({name: fields.get(name) for name in ("replicas", "routing", "tls", "tenants")})


def labels(gateway: LLMGateway) -> dict[str, str]:
    """Labels of all its objects and pods."""
    return {
        GATEWAY_LABEL: gateway.name,
        "app.kubernetes.io/name": "octavo",
        "app.kubernetes.io/instance": gateway.name,
        names.COMPONENT_LABEL: names.ROUTER,
        "app.kubernetes.io/part-of": "octavo",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
    }


def selector(gateway: LLMGateway) -> dict[str, str]:
    """Labels that select its pods. Never change them: a Deployment's selector is immutable."""
    return {GATEWAY_LABEL: gateway.name, names.COMPONENT_LABEL: names.ROUTER}


def url(gateway: LLMGateway, cluster_domain: str) -> str:
    """Address of its API in the cluster."""
    scheme, usual = ("https", 443) if gateway.spec.tls else ("http", 80)
    port = gateway.spec.service.port
    suffix = "" if port == usual else f":{port}"
    return f"{scheme}://{gateway.name}.{gateway.namespace}.svc.{cluster_domain}{suffix}/v1"


def render_gateway(
    gateway: LLMGateway, candidates: Sequence[Candidate], config: OperatorConfig, pods: GatewayPods | None = None
) -> list[Json]:
    """Manifests of all its objects, in the order in which they are to be applied. `candidates`: the LLMDeployments that
    it selects; `pods`: None: what this operator would make of it."""
    if pods is None:
        content = files(gateway_spec(gateway, candidates, config))
        pods = GatewayPods(expected_template(gateway, config, content), content, {})
    router = names.router(gateway.name)
    config_map = manifest(gateway, "v1", "ConfigMap", {"data": pods.files}, router)
    config_map["metadata"]["annotations"] = {FILES: digest(pods.files), SETTINGS: settings_digest(gateway)}
    spec = deployment_spec(gateway.spec.replicas, selector(gateway), pods.template)
    deployment = manifest(gateway, "apps/v1", "Deployment", {"spec": spec}, router)
    deployment["metadata"]["annotations"] = dict(pods.record)
    return [
        manifest(gateway, "networking.k8s.io/v1", "NetworkPolicy", {"spec": _policy(gateway, config)}, router),
        config_map,
        deployment,
        expected_service(gateway, config),
        *_together(gateway),
        *_budget(gateway, router),
    ]


def expected_template(gateway: LLMGateway, config: OperatorConfig, content: dict[str, str]) -> Json:
    """The pod template. A tenant's Secret that is missing keeps out that tenant; without the certificate's no router
    starts."""
    secrets: dict[str, Json] = {}
    if gateway.spec.tls:
        secrets[TLS_PATH] = {"secret": {"secretName": gateway.spec.tls.secret_ref.name}}
    sources = [
        {
            "secret": {
                "name": tenant.api_key_secret_ref.name,
                "items": [{"key": (key := tenant.api_key_secret_ref.key), "path": f"{tenant.name}/{key}"}],
                "optional": True,
            }
        }
        for tenant in gateway.spec.tenants
    ]
    if sources:
        secrets[TENANTS_PATH] = {"projected": {"sources": sources}}
    routing = gateway.spec.routing
    frame = PodFrame(
        config_map=names.router(gateway.name),
        labels=labels(gateway),
        selector=selector(gateway),
        lifecycle=holding(Lifecycle(), HOLD),
        affinity=routing,
        image_pull_secrets=config.image_pull_secrets,
        assigned_ids=config.cluster_assigned_ids,
        secrets=secrets,
        hold=HOLD,
        limits=LIMITS_FILE,
        peers=_peers(gateway, config),
        restarted_at=gateway.restarted_at,
    )
    return pod_template(frame, envoy_settings(gateway), config.router_image, content)


def _peers(gateway: LLMGateway, config: OperatorConfig) -> str | None:
    """The name by which its routers find each other; None: they have nothing to keep together."""
    if not gateway.spec.tenants:
        return None
    return f"{names.routers_service(gateway.name)}.{gateway.namespace}.svc.{config.cluster_domain}."


def _together(gateway: LLMGateway) -> list[Json]:
    """The headless Service that lists the routers that serve. While a listed one does not answer, each has its
    share."""
    if not gateway.spec.tenants:
        return []
    ports = [{"name": "peers", "port": names.PEER_PORT, "targetPort": "peers", "protocol": "TCP"}]
    body = {"type": "ClusterIP", "clusterIP": "None", "selector": selector(gateway), "ports": ports}
    return [manifest(gateway, "v1", "Service", {"spec": body}, names.routers_service(gateway.name))]


def expected_service(gateway: LLMGateway, config: OperatorConfig) -> Json:
    """The Service that clients use."""
    spec, scheme = gateway.spec.service, "https" if gateway.spec.tls else "http"
    body: Json = {
        "type": spec.type,
        "selector": selector(gateway),
        "ports": [{"name": scheme, "port": spec.port, "targetPort": "http", "protocol": "TCP", "appProtocol": scheme}],
        **client_affinity(),  # routers do not tell each other which replica has a conversation
    }
    if spec.load_balancer_class is not None:
        body["loadBalancerClass"] = spec.load_balancer_class
    if spec.external_traffic_policy is not None:
        body["externalTrafficPolicy"] = spec.external_traffic_policy
    out = manifest(gateway, "v1", "Service", {"spec": body}, gateway.name)
    if annotations := snippets.written(spec.annotations, config):
        out["metadata"]["annotations"] = annotations
    return out


def _policy(gateway: LLMGateway, config: OperatorConfig) -> Json:
    peers, operator = default_management_peers(config), operator_peer(config)
    ports = ("metrics", "management")
    metrics = {"ports": [{"port": port, "protocol": "TCP"} for port in ports], "from": peers}
    control = {"ports": [{"port": port, "protocol": "TCP"} for port in ("management", "control")], "from": [operator]}
    own = {"podSelector": {"matchLabels": selector(gateway)}}
    together = [{"ports": [{"port": "peers", "protocol": "TCP"}], "from": [own]}] if gateway.spec.tenants else []
    return {
        "podSelector": {"matchLabels": selector(gateway)},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": "http", "protocol": "TCP"}]}, metrics, control, *together],
    }


def _budget(gateway: LLMGateway, name: str) -> list[Json]:
    """Return the budget; with one router there is none, because it would block every drain."""
    if gateway.spec.replicas == 1:
        return []
    return [manifest(gateway, "policy/v1", "PodDisruptionBudget", {"spec": budget_spec(selector(gateway))}, name)]


def manifest(gateway: LLMGateway, api_version: str, kind: str, body: Json, name: str) -> Json:
    """One of its objects: labelled, and garbage collected with it. `body`: the fields besides metadata."""
    metadata: Json = {
        "name": name,
        "namespace": gateway.namespace,
        "labels": labels(gateway),
        "ownerReferences": [gateway.owner_reference()],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}
