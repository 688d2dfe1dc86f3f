"""Render what makes a gateway reachable from outside: an Ingress, an HTTPRoute, and the resulting address. Pure."""

from __future__ import annotations

from typing import Any

from octavo_operator.api.gateway import LLMGateway
from octavo_operator.config import OperatorConfig
from octavo_operator.render import snippets
from octavo_operator.render.gateway import manifest

Json = dict[str, Any]


def render_exposure(gateway: LLMGateway, config: OperatorConfig, apis: frozenset[str]) -> list[Json]:
    """Manifests of what its spec asks for. `apis`: optional kinds that the cluster has."""
    route = expected_http_route(gateway) if "HTTPRoute" in apis else None
    ingress = None if refused_ingress(gateway, config) else expected_ingress(gateway)
    return [one for one in (ingress, route) if one is not None]


def refused_ingress(gateway: LLMGateway, config: OperatorConfig) -> str | None:
    """Return why its Ingress is not written; None if it is, or if there is none. Without its snippet alone, the Ingress
    could let in those whom the snippet keeps out."""
    spec = gateway.spec.ingress
    if spec is None:
        return None
    outcome = (
        "Until then the operator writes no Ingress, leaves an existing one as it is, and the Service keeps serving"
    )
    return snippets.refusal("spec.ingress.annotations", spec.annotations, config, outcome)


def expected_ingress(gateway: LLMGateway) -> Json | None:
    """The Ingress; None: not asked for."""
    spec = gateway.spec.ingress
    if spec is None:
        return None
    service = {"name": gateway.name, "port": {"number": gateway.spec.service.port}}
    path = {"path": "/", "pathType": "Prefix", "backend": {"service": service}}
    body: Json = {"rules": [{"host": spec.host, "http": {"paths": [path]}}]}
    if spec.class_name is not None:
        body["ingressClassName"] = spec.class_name
    if spec.tls_secret_ref is not None:
        body["tls"] = [{"hosts": [spec.host], "secretName": spec.tls_secret_ref.name}]
    out = manifest(gateway, "networking.k8s.io/v1", "Ingress", {"spec": body}, gateway.name)
    if spec.annotations:
        out["metadata"]["annotations"] = dict(spec.annotations)
    return out


def expected_http_route(gateway: LLMGateway) -> Json | None:
    """The HTTPRoute; None: not asked for."""
    spec = gateway.spec.http_route
    if spec is None:
        return None
    parents = [
        {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": one.name}
        | ({"namespace": one.namespace} if one.namespace else {})
        | ({"sectionName": one.section_name} if one.section_name else {})
        for one in spec.parent_refs
    ]
    backend = {"group": "", "kind": "Service", "name": gateway.name, "port": gateway.spec.service.port, "weight": 1}
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "backendRefs": [backend],
        "timeouts": {"request": "0s"},  # an answer may take as long as it takes
    }
    body = {"parentRefs": parents, "hostnames": list(spec.hostnames), "rules": [rule]}
    return manifest(gateway, "gateway.networking.k8s.io/v1", "HTTPRoute", {"spec": body}, gateway.name)


def external_url(gateway: LLMGateway, ingress: Json | None, route: Json | None, service: Json | None) -> str | None:
    """Address of its API from outside of the cluster; None: none is known. The live objects: one that is not there, or
    not accepted, leads nowhere, and a Service may have got a load balancer's address."""
    spec = gateway.spec
    if spec.ingress is not None and ingress is not None:
        return f"{'https' if spec.ingress.tls_secret_ref else 'http'}://{spec.ingress.host}/v1"
    if spec.http_route is not None and route is not None and refusal(route) is None:
        name = next((one for one in spec.http_route.hostnames if not one.startswith("*")), None)
        if name is not None:
            return f"{spec.http_route.scheme}://{name}/v1"
    if spec.service.type != "LoadBalancer" or service is None:
        return None
    balancer = (service.get("status") or {}).get("loadBalancer") or {}
    for one in balancer.get("ingress") or []:
        if host := one.get("hostname") or one.get("ip"):
            scheme, usual = ("https", 443) if spec.tls else ("http", 80)
            host = f"[{host}]" if ":" in host else host
            return f"{scheme}://{host}{'' if spec.service.port == usual else f':{spec.service.port}'}/v1"
    return None


def refusal(route: Json | None) -> str | None:
    """Return why a Gateway does not accept a live HTTPRoute; None if it does, or has not looked yet."""
    for parent in ((route or {}).get("status") or {}).get("parents") or []:
        for condition in parent.get("conditions") or []:
            if condition["type"] in ("Accepted", "ResolvedRefs") and condition["status"] == "False":
                name = (parent.get("parentRef") or {}).get("name", "")
                return f"Gateway {name}: {condition.get('reason', '')}: {condition.get('message', '')}"
    return None
