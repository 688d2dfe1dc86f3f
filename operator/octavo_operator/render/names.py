"""Names, labels and addresses that several objects, or clients, rely on."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import FIELD_MANAGER, OWNER_LABEL, LLMDeployment

COMPONENT_LABEL = "app.kubernetes.io/component"

API_PORT = 8000
MANAGEMENT_PORT = 8001
CACHE_PATH = "/cache"
MODEL_PATH = "/models"
RESPONSES_PATH = "/responses"
ENGINE, FETCH = "engine", "fetch"  # the containers
ROUTER = "router"  # component and container
PREFETCH = "prefetch"  # component of a Job and its pod
WORKER = "worker"  # component of the pods of a group but its leader, whose is the engine's
GROUP_PORT = 29501  # of a leader, where the other pods of its group come
TOKEN_KEY = "token"  # in the Secret of a group's pods
PICKER = "picker"  # container beside the router
PICKER_PORT = 9001  # where it tells what it holds, and its metrics
CONTROL_PORT = 9003  # where the operator alone tells it whom to refuse, and what is about to be stopped
PEER_PORT = 9004  # where pickers of a gateway's routers keep tenants' limits together
QUEUE_DEPTH_METRIC = "octavo_queue_depth"  # which autoscalers read
USER_ID = 65532


def labels(deployment: LLMDeployment, component: str = ENGINE) -> dict[str, str]:
    """Labels of all children and pods."""
    return {
        OWNER_LABEL: deployment.name,
        "app.kubernetes.io/name": "octavo",
        "app.kubernetes.io/instance": deployment.name,
        COMPONENT_LABEL: component,
        "app.kubernetes.io/part-of": "octavo",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
    }


def selector(deployment: LLMDeployment, component: str = ENGINE) -> dict[str, str]:
    """Labels that select the pods of a component. Never change them: a Deployment's selector is immutable."""
    return {OWNER_LABEL: deployment.name, COMPONENT_LABEL: component}


def router(name: str) -> str:
    """Name of the routers' objects."""
    return f"{name}-router"


def routers_service(name: str) -> str:
    """Name of the headless Service of a gateway's routers, by which they find each other."""
    return f"{name}-routers"


def pods_service(name: str) -> str:
    """Name of the headless Service of the engine pods, by which routers find them."""
    return f"{name}-pods"


def group(name: str) -> str:
    """Name of the LeaderWorkerSet. Not the LLMDeployment's: its controller makes a headless Service of that name."""
    return f"{name}-group"


def adapters(name: str) -> str:
    """Name of the ConfigMap that lists LoRA adapters."""
    return f"{name}-adapters"


def cluster_token(name: str) -> str:
    """Name of the Secret by which the pods of a group know each other."""
    return f"{name}-cluster-token"


def selector_text(deployment: LLMDeployment) -> str:
    """The selector as text, for /scale."""
    return ",".join(f"{key}={value}" for key, value in sorted(selector(deployment).items()))


def cache_claim(deployment: LLMDeployment) -> str | None:
    """Name of the PersistentVolumeClaim for fetched models; None: the cache is an emptyDir."""
    pvc = deployment.spec.model.cache.pvc
    if pvc is None:
        return None
    return pvc.existing_claim or f"{deployment.name}-model-cache"


def url(deployment: LLMDeployment, cluster_domain: str) -> str:
    """Address of the API in the cluster."""
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
    component: str = ENGINE,
) -> dict[str, Any]:
    """A child object: labelled, and (unless not `owned`) garbage collected with the LLMDeployment. `body`: the fields
    besides metadata; `name`: if it is not the LLMDeployment's."""
    metadata: dict[str, Any] = {
        "name": name or deployment.name,
        "namespace": deployment.namespace,
        "labels": labels(deployment, component),
    }
    if owned:
        metadata["ownerReferences"] = [deployment.owner_reference()]
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}
