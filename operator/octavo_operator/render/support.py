"""Small objects around the pods: ServiceAccount, PodDisruptionBudget, cache claim, monitors."""

from __future__ import annotations

import re
from typing import Any

from octavo_operator.api import OWNER_LABEL, LLMDeployment
from octavo_operator.render import names

Json = dict[str, Any]

MONITORING_API = "monitoring.coreos.com/v1"
_OWNER_META_LABEL = "__meta_kubernetes_pod_label_" + re.sub(r"[^a-zA-Z0-9_]", "_", OWNER_LABEL)


def expected_service_account(deployment: LLMDeployment) -> Json:
    """A ServiceAccount without rights, whose token is not mounted."""
    return names.manifest(deployment, "v1", "ServiceAccount", {"automountServiceAccountToken": False})


def expected_disruption_budget(deployment: LLMDeployment) -> Json | None:
    """The PodDisruptionBudget; None: it is disabled."""
    budget = deployment.spec.pod_disruption_budget
    if not budget.enabled:
        return None
    # A pod that is not ready must never block a drain.
    body: Json = {"selector": {"matchLabels": names.selector(deployment)}, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    if budget.min_available is not None:
        body["minAvailable"] = budget.min_available
    else:
        body["maxUnavailable"] = 1 if budget.max_unavailable is None else budget.max_unavailable
    return names.manifest(deployment, "policy/v1", "PodDisruptionBudget", {"spec": body})


def expected_cache_claim(deployment: LLMDeployment) -> Json | None:
    """The claim for fetched models; None: it exists already, or none is used. With `retain` it has no owner, so it
    stays."""
    pvc = deployment.spec.model.cache.pvc
    if pvc is None or pvc.size is None:
        return None
    body: Json = {
        "accessModes": list(pvc.access_modes),
        "resources": {"requests": {"storage": str(pvc.size)}},
        **({"storageClassName": pvc.storage_class_name} if pvc.storage_class_name is not None else {}),
    }
    name = names.cache_claim(deployment)
    return names.manifest(deployment, "v1", "PersistentVolumeClaim", {"spec": body}, name, owned=not pvc.retain)


def expected_inference_pool(deployment: LLMDeployment) -> Json | None:
    """The InferencePool of the engine's pods, for gateways of the Gateway API; None: not asked for."""
    pool = deployment.spec.inference_pool
    if pool is None:
        return None
    picker = pool.endpoint_picker_ref
    body: Json = {
        "selector": {"matchLabels": names.selector(deployment)},
        "targetPorts": [{"number": names.API_PORT}],
        "endpointPickerRef": {
            "group": "",
            "kind": "Service",
            "name": picker.name,
            "port": {"number": picker.port},
            "failureMode": "FailOpen",  # a picker that is down costs prefix hits, not answers
        },
    }
    return names.manifest(deployment, "inference.networking.k8s.io/v1", "InferencePool", {"spec": body})


def expected_router_monitor(deployment: LLMDeployment) -> Json | None:
    """The PodMonitor of the routers, whatever the kind of the engine's: the Service of clients has no port for
    metrics. None: disabled."""
    monitoring = deployment.spec.monitoring
    if not monitoring.enabled or deployment.spec.routing.routers is None:
        return None
    named = {"sourceLabels": [_OWNER_META_LABEL], "targetLabel": "llmdeployment"}
    endpoint = {"port": "metrics", "path": "/stats/prometheus", "interval": monitoring.interval, "relabelings": [named]}
    endpoints = [endpoint, {**endpoint, "port": "management", "path": "/metrics"}]
    selector = {"matchLabels": names.selector(deployment, names.ROUTER)}
    body: Json = {"selector": selector, "podMetricsEndpoints": endpoints}
    name = names.router(deployment.name)
    out = names.manifest(deployment, MONITORING_API, "PodMonitor", {"spec": body}, name, component=names.ROUTER)
    out["metadata"]["labels"] = {**monitoring.labels, **out["metadata"]["labels"]}
    return out


def expected_monitor(deployment: LLMDeployment) -> Json | None:
    """PodMonitor or ServiceMonitor for the Prometheus operator; None: disabled. Both scrape every pod."""
    monitoring = deployment.spec.monitoring
    if not monitoring.enabled:
        return None
    # Alerts and dashboards join the engine's metrics with the operator's by this label.
    named = {"sourceLabels": [_OWNER_META_LABEL], "targetLabel": "llmdeployment"}
    endpoint = {"port": "management", "path": "/metrics", "interval": monitoring.interval, "relabelings": [named]}
    body: Json = {"selector": {"matchLabels": names.selector(deployment)}}
    if monitoring.kind == "PodMonitor":
        body["podMetricsEndpoints"] = [endpoint]
    else:
        body["selector"] = {"matchLabels": {OWNER_LABEL: deployment.name}}
        body["endpoints"] = [endpoint]
    out = names.manifest(deployment, MONITORING_API, monitoring.kind, {"spec": body})
    out["metadata"]["labels"] = {**monitoring.labels, **out["metadata"]["labels"]}
    return out
