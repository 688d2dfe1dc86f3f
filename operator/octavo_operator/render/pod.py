"""The pod template: containers, volumes, scheduling, and spec.podPatches last."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.api.common import RESTARTED_AT
from octavo_operator.config import OperatorConfig
from octavo_operator.render import names
from octavo_operator.render.engine import expected_engine, expected_fetch
from octavo_operator.render.lora import LISTED, adapter_volumes
from octavo_operator.render.pod_patches import patched
from octavo_operator.render.responses import response_volumes
from octavo_operator.render.restricted import violations
from octavo_operator.render.template_checks import (
    IMAGE_VOLUMES_UNSUPPORTED,
    INVALID_POD_PATCH,
    NODE_CACHE_NOT_ALLOWED,
    PRIVILEGED_POD,
    READ_ONLY_PATH,
    UNKNOWN_ARGUMENT,
    InvalidTemplateError,
    unknown_arguments,
    unwritable_paths,
)

Json = dict[str, Any]


def expected_template(deployment: LLMDeployment, config: OperatorConfig, image_volumes: bool = True) -> Json:
    """The pod template, patched, with the administrator's defaults. ``image_volumes``: the cluster mounts images as
    volumes. Raises InvalidTemplateError."""
    if deployment.spec.model.source == "oci" and not image_volumes:
        raise InvalidTemplateError(
            "model.uri: oci:// needs Kubernetes 1.35 or newer, which mounts images as volumes: an older one starts the "
            "pods without the model; use hf://, pvc:// or https://, or upgrade the cluster",
            IMAGE_VOLUMES_UNSUPPORTED,
        )
    node = deployment.spec.model.cache.node
    if node and node.path not in config.node_cache_paths:
        allowed = ", ".join(config.node_cache_paths) or "none"
        raise InvalidTemplateError(
            f"model.cache.node.path: {node.path} is not allowed as a folder of nodes (allowed: {allowed}); use "
            "cache.mode pvc, or have the administrator prepare the folder and name it in cache.nodePaths of the "
            "operator's chart",
            NODE_CACHE_NOT_ALLOWED,
        )
    deployment = config.defaults.fill(deployment)
    spec = deployment.spec
    metadata: Json = {"labels": {**spec.pod_labels, **names.labels(deployment)}}
    # An annotation that is there can be changed in running pods, of which kubelets take notice at once.
    follows = {} if spec.adapters is None else {LISTED: ""}
    restarted = {RESTARTED_AT: deployment.restarted_at} if deployment.restarted_at else {}
    if annotations := {**spec.pod_annotations, **follows, **restarted}:
        metadata["annotations"] = annotations
    template = patched(deployment, {"metadata": metadata, "spec": _pod_spec(deployment, config)})
    if not config.allow_privileged_pods:
        for offence in violations(template, deployment.name, _cache_volume(deployment), deployment.namespace):
            raise InvalidTemplateError(
                f"{offence}: podPatches, volumes and podAnnotations must not raise the privileges of the pods; change "
                "them, or have the administrator set allowPrivilegedPods in the operator's chart",
                PRIVILEGED_POD,
            )
    if spec.parallelism.nodes > 1 and names.ENGINE not in [one.get("name") for one in template["spec"]["containers"]]:
        raise InvalidTemplateError(
            f"spec.podPatches: a group of pods needs the container {names.ENGINE}, which joins it", INVALID_POD_PATCH
        )
    for unknown in unknown_arguments(deployment, spec.engine.image or config.image(spec.accelerator)):
        raise InvalidTemplateError(unknown, UNKNOWN_ARGUMENT)
    for unwritable in unwritable_paths(template):
        raise InvalidTemplateError(unwritable, READ_ONLY_PATH)
    return template


def _pod_spec(deployment: LLMDeployment, config: OperatorConfig) -> Json:
    spec = deployment.spec
    image = spec.engine.image or config.image(spec.accelerator)
    fetch = expected_fetch(deployment, image)
    secrets = dict.fromkeys((*config.image_pull_secrets, *spec.engine.image_pull_secrets))
    scheduling = spec.scheduling
    out: Json = {
        "containers": [expected_engine(deployment, image)],
        "initContainers": [fetch] if fetch else [],
        "volumes": _volumes(deployment),
        "serviceAccountName": deployment.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _security_context(deployment, config),
        "terminationGracePeriodSeconds": spec.lifecycle.grace_seconds,
        "imagePullSecrets": [{"name": name} for name in secrets],
        "nodeSelector": dict(scheduling.node_selector),
        "affinity": scheduling.affinity,
        "tolerations": _tolerations(deployment),
        "topologySpreadConstraints": [
            {**constraint, "labelSelector": {"matchLabels": names.selector(deployment)}}
            for constraint in scheduling.topology_spread_constraints
        ],
        "priorityClassName": scheduling.priority_class_name,
        "runtimeClassName": scheduling.runtime_class_name,
        "schedulerName": scheduling.scheduler_name,
    }
    return {name: value for name, value in out.items() if value not in (None, [], {})}


def _security_context(deployment: LLMDeployment, config: OperatorConfig) -> Json:
    assigned = deployment.spec.cluster_assigned_ids
    if assigned is None:
        assigned = config.cluster_assigned_ids
    ids = {} if assigned else dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), names.USER_ID)
    return {
        "runAsNonRoot": True,
        **ids,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _tolerations(deployment: LLMDeployment) -> list[Json]:
    out = [dict(toleration) for toleration in deployment.spec.scheduling.tolerations]
    if accelerator := deployment.spec.accelerator:
        # GPU nodes are usually tainted with the name of their resource; NVIDIA's with nvidia.com/gpu, whatever the
        # device plugin calls a share of one (nvidia.com/gpu.shared, nvidia.com/mig-1g.10gb).
        key = "nvidia.com/gpu" if accelerator.resource.startswith("nvidia.com/") else accelerator.resource
        out.append({"key": key, "operator": "Exists", "effect": "NoSchedule"})
    return out


def _volumes(deployment: LLMDeployment) -> list[Json]:
    spec = deployment.spec
    out = [
        _cache_volume(deployment),
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(spec.shm.size)}},
    ]
    if spec.model.source == "pvc":
        claim = spec.model.uri.removeprefix("pvc://").partition("/")[0]
        out.append({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    if spec.model.source == "oci":
        reference = spec.model.uri.removeprefix("oci://").partition("//")[0]
        out.append({"name": "model", "image": {"reference": reference, "pullPolicy": "IfNotPresent"}})
    return [
        *out,
        *response_volumes(deployment),
        *adapter_volumes(deployment),
        *(dict(volume) for volume in spec.volumes),
    ]


def _cache_volume(deployment: LLMDeployment) -> Json:
    cache = deployment.spec.model.cache
    if cache.node:  # it must be there: the kubelet would make one that root alone can write
        return {"name": "cache", "hostPath": {"path": cache.node.path, "type": "Directory"}}
    if claim := names.cache_claim(deployment):
        return {"name": "cache", "persistentVolumeClaim": {"claimName": claim}}
    return {"name": "cache", "emptyDir": {} if cache.size_limit is None else {"sizeLimit": str(cache.size_limit)}}
