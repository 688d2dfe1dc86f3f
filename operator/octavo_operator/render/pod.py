"""The pod template: containers, volumes, scheduling, and spec.podPatches last."""

from __future__ import annotations

import copy
from typing import Any

import jsonpatch
import jsonpointer

from octavo_operator.api import LLMDeployment
from octavo_operator.api.schema import to_json
from octavo_operator.config import OperatorConfig
from octavo_operator.render import names
from octavo_operator.render.engine import expected_engine, expected_fetch
from octavo_operator.render.restricted import violations
from octavo_operator.render.template_checks import unknown_arguments, unwritable_paths

Json = dict[str, Any]


BAD_POD_PATCH, PRIVILEGED_POD, UNKNOWN_ARGUMENT, READ_ONLY_PATH = (
    "BadPodPatch", "PrivilegedPod", "UnknownArgument", "ReadOnlyPath",
)  # fmt: skip
TEMPLATE_PROBLEMS = frozenset({BAD_POD_PATCH, PRIVILEGED_POD, UNKNOWN_ARGUMENT, READ_ONLY_PATH})


class InvalidTemplateError(ValueError):
    """A spec that yields no valid pod template. The message names field and way out; `reason`: of the condition."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class InvalidPodPatchError(InvalidTemplateError):
    """A patch of spec.podPatches that does not apply to the pod template."""

    def __init__(self, message: str) -> None:
        super().__init__(message, BAD_POD_PATCH)


def expected_template(deployment: LLMDeployment, config: OperatorConfig) -> Json:
    """The pod template, patched. Raises InvalidTemplateError."""
    spec = deployment.spec
    metadata: Json = {"labels": {**spec.pod_labels, **names.labels(deployment)}}
    if spec.pod_annotations:
        metadata["annotations"] = dict(spec.pod_annotations)
    template = _patched(deployment, {"metadata": metadata, "spec": _pod_spec(deployment, config)})
    if not config.allow_privileged_pods:
        for offence in violations(template, deployment.name):
            raise InvalidTemplateError(
                f"{offence}: podPatches, volumes and podAnnotations must not raise the privileges of the pods; change "
                "them, or have the administrator set allowPrivilegedPods in the operator's chart",
                PRIVILEGED_POD,
            )
    for unknown in unknown_arguments(deployment, spec.engine.image or config.engine_image):
        raise InvalidTemplateError(unknown, UNKNOWN_ARGUMENT)
    for unwritable in unwritable_paths(template):
        raise InvalidTemplateError(unwritable, READ_ONLY_PATH)
    return template


def _pod_spec(deployment: LLMDeployment, config: OperatorConfig) -> Json:
    spec = deployment.spec
    image = spec.engine.image or config.engine_image
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
    if claim := names.cache_claim(deployment):
        cache: Json = {"name": "cache", "persistentVolumeClaim": {"claimName": claim}}
    else:
        limit = spec.model.cache.size_limit
        cache = {"name": "cache", "emptyDir": {} if limit is None else {"sizeLimit": str(limit)}}
    out = [
        cache,
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(spec.shm.size)}},
    ]
    if spec.model.source == "pvc":
        claim = spec.model.uri.removeprefix("pvc://").partition("/")[0]
        out.append({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    return out + [dict(volume) for volume in spec.volumes]


def _patched(deployment: LLMDeployment, template: Json) -> Json:
    """Applies spec.podPatches (RFC 6902) one by one, so that the error names the one that fails."""
    if not deployment.spec.pod_patches:
        return template
    out = copy.deepcopy(template)
    for index, patch in enumerate(deployment.spec.pod_patches):
        operation = {"value": None, **to_json(patch)} if patch.op in ("add", "replace", "test") else to_json(patch)
        try:
            out = jsonpatch.apply_patch(out, [operation])
        except jsonpatch.JsonPatchTestFailed as error:
            raise InvalidPodPatchError(f"spec.podPatches[{index}]: the test of {patch.path} failed: {error}") from None
        except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException, TypeError, KeyError) as error:
            raise InvalidPodPatchError(f"spec.podPatches[{index}]: {patch.op} {patch.path}: {error}") from None
    # A patch must not change the labels that identify the pods: the Deployment would lose them.
    found = out.get("metadata", {}).get("labels", {}) if isinstance(out.get("metadata"), dict) else {}
    if not isinstance(found, dict) or any(found.get(key) != value for key, value in names.labels(deployment).items()):
        raise InvalidPodPatchError("spec.podPatches: the operator's own labels in /metadata/labels must not change")
    if not isinstance(out.get("spec"), dict):
        raise InvalidPodPatchError("spec.podPatches: /spec must stay an object")
    return out
