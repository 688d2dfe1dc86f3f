"""The Job of `model.cache.prefetch`: fetches a new model into the cache while the pods of the old one serve."""

from __future__ import annotations

import itertools
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.diff import digest
from octavo_operator.render import names

Json = dict[str, Any]

_MAX_NAME = 63  # pods carry the Job's name in a label
_RETRIES = 1_000_000  # without end, as the container `fetch` of a pod; the kubelet waits longer each time
_RESOURCES = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
_POD_FIELDS = (
    "serviceAccountName",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "securityContext",
    "imagePullSecrets",
    "nodeSelector",
    "tolerations",
    "priorityClassName",
    "schedulerName",
    "hostAliases",
    "dnsConfig",
    "dnsPolicy",
)


def fetched_model(template: Json) -> Any:
    """Return the model that pods of a template fetch, and its destination; None if they fetch nothing."""
    pod = template.get("spec") or {}
    fetch = next((one for one in pod.get("initContainers") or [] if one["name"] == names.FETCH), None)
    cache: Json = next((one for one in pod.get("volumes") or [] if one["name"] == "cache"), {})
    return fetch and [fetch.get("command"), fetch.get("args"), cache.get("persistentVolumeClaim")]


def expected_prefetch(deployment: LLMDeployment, template: Json) -> Json:
    """The Job that does what the container `fetch` of the pods of a template would do, podPatches included. A Job
    cannot be changed, so its name says what it is for."""
    pod = template["spec"]
    containers = pod["initContainers"]
    before = list(itertools.takewhile(lambda one: one["name"] != names.FETCH, containers))
    fetch = {**containers[len(before)], "resources": _RESOURCES}
    mounted = {mount["name"] for one in (*before, fetch) for mount in one.get("volumeMounts") or []}
    spec: Json = {
        "restartPolicy": "OnFailure",  # one pod: its last failure stays to be read
        "initContainers": before,
        "containers": [fetch],
        "volumes": [one for one in pod["volumes"] if one["name"] in mounted],
        **{name: pod[name] for name in _POD_FIELDS if name in pod},
    }
    if node := (pod.get("affinity") or {}).get("nodeAffinity"):
        spec["affinity"] = {"nodeAffinity": node}  # the zone of a volume; not the distance to other pods
    metadata = template["metadata"]
    labels = {**metadata["labels"], **names.labels(deployment, names.PREFETCH)}
    body: Json = {
        "backoffLimit": _RETRIES,
        "template": {
            "metadata": {**metadata, "labels": labels},
            "spec": {name: value for name, value in spec.items() if value not in (None, [], {})},
        },
    }
    suffix = f"-{names.PREFETCH}-{digest({'of': deployment.uid, **body})[:8]}"
    name = deployment.name[: _MAX_NAME - len(suffix)] + suffix
    return names.manifest(deployment, "batch/v1", "Job", {"spec": body}, name, component=names.PREFETCH)
