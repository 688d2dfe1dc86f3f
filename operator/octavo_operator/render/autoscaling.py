"""The autoscaler: a HorizontalPodAutoscaler or KEDA's ScaledObject. Both scale the LLMDeployment through /scale, by the
metric of autoscaling/decision.py."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import API_VERSION, KIND, OWNER_LABEL, LLMDeployment
from octavo_operator.config import OperatorConfig
from octavo_operator.render import names

Json = dict[str, Any]


def autoscaler_kind(deployment: LLMDeployment) -> str | None:
    """Kind of the autoscaler; None: without spec.autoscaling."""
    kinds = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}
    return kinds[deployment.spec.autoscaling.provider] if deployment.spec.autoscaling else None


def expected_autoscaler(deployment: LLMDeployment, config: OperatorConfig, apis: frozenset[str]) -> Json | None:
    """None without spec.autoscaling, or without KEDA. `apis`: optional kinds that the cluster has."""
    autoscaling = deployment.spec.autoscaling
    if autoscaling is None:
        return None
    if autoscaling.provider == "keda":
        return _scaled_object(deployment, config) if "ScaledObject" in apis else None
    return _horizontal_pod_autoscaler(deployment)


def _horizontal_pod_autoscaler(deployment: LLMDeployment) -> Json:
    autoscaling = deployment.spec.autoscaling
    assert autoscaling is not None
    metric = {"name": names.QUEUE_DEPTH_METRIC, "selector": {"matchLabels": {OWNER_LABEL: deployment.name}}}
    target = {"type": "AverageValue", "averageValue": str(autoscaling.queue_depth.target_per_replica)}
    body: Json = {
        "scaleTargetRef": {"apiVersion": API_VERSION, "kind": KIND, "name": deployment.name},
        "minReplicas": max(1, autoscaling.min_replicas),  # the last one is stopped, and started, by the operator
        "maxReplicas": autoscaling.max_replicas,
        "metrics": [{"type": "External", "external": {"metric": metric, "target": target}}],
    }
    if autoscaling.behavior:
        body["behavior"] = autoscaling.behavior
    return names.manifest(deployment, "autoscaling/v2", "HorizontalPodAutoscaler", {"spec": body})


def _scaled_object(deployment: LLMDeployment, config: OperatorConfig) -> Json:
    """KEDA occupies the external metrics API itself, so it reads the metric from the operator over HTTP. After errors
    the replicas stay: a fallback would be a guess."""
    autoscaling = deployment.spec.autoscaling
    assert autoscaling is not None
    host = f"{config.metrics_service}.{config.namespace}.svc.{config.cluster_domain}"
    trigger = {
        "type": "metrics-api",
        "metricType": "AverageValue",
        "metadata": {
            "url": f"http://{host}:{config.health_port}/queue-depth/{deployment.namespace}/{deployment.name}",
            "format": "json",
            "valueLocation": "value",
            "targetValue": str(autoscaling.queue_depth.target_per_replica),
        },
    }
    body: Json = {
        "scaleTargetRef": {"apiVersion": API_VERSION, "kind": KIND, "name": deployment.name},
        "minReplicaCount": max(1, autoscaling.min_replicas),
        "maxReplicaCount": autoscaling.max_replicas,
        "pollingInterval": 15,
        "triggers": [trigger],
    }
    if autoscaling.behavior:
        body["advanced"] = {"horizontalPodAutoscalerConfig": {"behavior": autoscaling.behavior}}
    out = names.manifest(deployment, "keda.sh/v1alpha1", "ScaledObject", {"spec": body})
    if deployment.is_woken_by_requests:  # otherwise KEDA starts minReplicaCount replicas at once
        out["metadata"]["annotations"] = {"autoscaling.keda.sh/paused": "true"}
    return out
