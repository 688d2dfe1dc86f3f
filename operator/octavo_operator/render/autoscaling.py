"""Who scales: a HorizontalPodAutoscaler or KEDA's ScaledObject. Both write the LLMDeployment's own /scale, and read
the number that autoscaling/decision.py makes."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import API_VERSION, KIND, LLMDeployment
from octavo_operator.autoscaling import METRIC
from octavo_operator.config import OperatorConfig
from octavo_operator.render import names

Json = dict[str, Any]


def autoscaler_kind(deployment: LLMDeployment) -> str | None:
    kinds = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}
    return kinds[deployment.spec.autoscaling.provider] if deployment.spec.autoscaling else None


def expected_autoscaler(deployment: LLMDeployment, config: OperatorConfig, apis: frozenset[str]) -> Json | None:
    """`apis`: optional kinds that the cluster has."""
    autoscaling = deployment.spec.autoscaling
    if autoscaling is None:
        return None
    if autoscaling.provider == "keda":
        return _scaled_object(deployment, config) if "ScaledObject" in apis else None
    return _horizontal(deployment)


def _horizontal(deployment: LLMDeployment) -> Json:
    autoscaling = deployment.spec.autoscaling
    assert autoscaling is not None
    metric = {"name": METRIC, "selector": {"matchLabels": {names.OWNER_LABEL: deployment.name}}}
    target = {"type": "AverageValue", "averageValue": str(autoscaling.queue_depth.target_per_replica)}
    body: Json = {
        "scaleTargetRef": {"apiVersion": API_VERSION, "kind": KIND, "name": deployment.name},
        "minReplicas": autoscaling.min_replicas,
        "maxReplicas": autoscaling.max_replicas,
        "metrics": [{"type": "External", "external": {"metric": metric, "target": target}}],
    }
    if autoscaling.behavior:
        body["behavior"] = autoscaling.behavior
    return names.manifest(deployment, "autoscaling/v2", "HorizontalPodAutoscaler", {"spec": body})


def _scaled_object(deployment: LLMDeployment, config: OperatorConfig) -> Json:
    """KEDA has the external metrics API for itself, so it asks the operator directly. An error leaves the replicas as
    they are: no fallback is given, since its numbers would be guesses."""
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
        "minReplicaCount": autoscaling.min_replicas,
        "maxReplicaCount": autoscaling.max_replicas,
        "pollingInterval": 15,
        "triggers": [trigger],
    }
    if autoscaling.behavior:
        body["advanced"] = {"horizontalPodAutoscalerConfig": {"behavior": autoscaling.behavior}}
    return names.manifest(deployment, "keda.sh/v1alpha1", "ScaledObject", {"spec": body})
