"""Names, labels and addresses that several objects, or the outside world, rely on."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import GROUP, LLMDeployment

FIELD_MANAGER = "octavo-operator"
OWNER_LABEL = f"{GROUP}/llmdeployment"  # on every child and pod; what the operator watches by
COMPONENT_LABEL = "app.kubernetes.io/component"

API_PORT = 8000
MANAGEMENT_PORT = 8001
CACHE_PATH = "/cache"
MODEL_PATH = "/models"
ENGINE, FETCH = "engine", "fetch"  # the containers
USER_ID = 65532


def labels(deployment: LLMDeployment) -> dict[str, str]:
    return {
        OWNER_LABEL: deployment.name,
        "app.kubernetes.io/name": "octavo",
        "app.kubernetes.io/instance": deployment.name,
        COMPONENT_LABEL: ENGINE,
        "app.kubernetes.io/part-of": "octavo",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
    }


def selector(deployment: LLMDeployment) -> dict[str, str]:
    """Never to be changed: a Deployment's selector cannot be."""
    return {OWNER_LABEL: deployment.name, COMPONENT_LABEL: ENGINE}


def selector_text(deployment: LLMDeployment) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(selector(deployment).items()))


def cache_claim(deployment: LLMDeployment) -> str | None:
    """Name of the claim that keeps fetched models, whoever made it."""
    pvc = deployment.spec.model.cache.pvc
    if pvc is None:
        return None
    return pvc.existing_claim or f"{deployment.name}-model-cache"


def url(deployment: LLMDeployment, cluster_domain: str) -> str:
    port = deployment.spec.service.port
    suffix = "" if port == 80 else f":{port}"
    return f"http://{deployment.name}.{deployment.namespace}.svc.{cluster_domain}{suffix}/v1"


def manifest(
    deployment: LLMDeployment,
    api_version: str,
    kind: str,
    body: dict[str, Any],
    name: str | None = None,
    owned: bool = True,
) -> dict[str, Any]:
    """One object of ours: labelled, and ended by the garbage collector together with its owner."""
    metadata: dict[str, Any] = {
        "name": name or deployment.name,
        "namespace": deployment.namespace,
        "labels": labels(deployment),
    }
    if owned:
        metadata["ownerReferences"] = [deployment.owner_reference()]
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}
