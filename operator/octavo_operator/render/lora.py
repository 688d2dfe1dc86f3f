"""LoRA adapters as the engine is told of them: a file of a ConfigMap that is mounted as a directory, so that running
pods see its changes. Pods depend on whether there is one, not on what it lists."""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Iterator
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.render import names

Json = dict[str, Any]

LIST_FILE, LIST_PATH = "adapters.json", "/etc/octavo-adapters"
CREDENTIALS_PATH = "/etc/octavo-adapter-credentials"
LISTED = "octavo.dev/adapters"  # annotation of pods: SHA-256 of the list that their kubelet is to bring them
_LIST_VOLUME, _CREDENTIALS_VOLUME = "octavo-adapters", "octavo-adapter-credentials"
_MAX_LORAS = 4


def expected_adapters(deployment: LLMDeployment) -> Json | None:
    """The ConfigMap with the list; None: LoRA is off."""
    if deployment.spec.adapters is None:
        return None
    data = {"data": {LIST_FILE: adapter_list(deployment)}}
    return names.manifest(deployment, "v1", "ConfigMap", data, names.adapters(deployment.name))


def adapter_list(deployment: LLMDeployment) -> str:
    """The text of the list. Adapters on claims that the pods do not mount are left out."""
    return json.dumps({"adapters": list(listed(deployment).values())}, indent=1) + "\n"


def list_digest(deployment: LLMDeployment) -> str:
    """SHA-256 of the list, as the engine says which one it has read."""
    return hashlib.sha256(adapter_list(deployment).encode()).hexdigest()


def listed(deployment: LLMDeployment) -> dict[str, dict[str, str]]:
    """The entries of the list by their names."""
    found = {}
    for one in deployment.spec.adapters or ():
        uri = _in_pod(deployment, one.uri)
        if uri is not None:
            entry = {"name": one.name, "uri": uri, "revision": one.revision, "digest": one.digest}
            found[one.name] = {key: value for key, value in entry.items() if value is not None}
    return found


def _in_pod(deployment: LLMDeployment, uri: str) -> str | None:
    """A URI as it is read in the pods; None: of a claim that they do not mount."""
    if not uri.startswith("pvc://"):
        return uri
    claim, _, path = uri.removeprefix("pvc://").partition("/")
    for name, mount, part in _claims(deployment):
        inside = posixpath.relpath(f"/{path}", f"/{part}")
        if name == claim and inside != ".." and not inside.startswith("../"):
            return f"file://{posixpath.normpath(f'{mount}/{inside}')}"
    return None


def _claims(deployment: LLMDeployment) -> Iterator[tuple[str, str, str]]:
    """Claims that the pods mount: name, where, and which folder of it."""
    spec = deployment.spec
    if spec.model.source == "pvc":
        yield spec.model.uri.removeprefix("pvc://").partition("/")[0], names.MODEL_PATH, ""
    if claim := names.cache_claim(deployment):
        yield claim, names.CACHE_PATH, ""
    for volume in spec.volumes:
        for mount in spec.volume_mounts:
            if mount.get("name") == volume["name"] and (source := volume.get("persistentVolumeClaim")):
                yield str(source.get("claimName")), str(mount["mountPath"]), str(mount.get("subPath", ""))


def adapter_arguments(deployment: LLMDeployment) -> list[str]:
    """Flags of `octavo serve`."""
    spec = deployment.spec
    if spec.adapters is None:
        return []
    out = ["--enable-lora", "--lora-list", f"{LIST_PATH}/{LIST_FILE}", "--max-loras", str(spec.max_loras or _MAX_LORAS)]
    if spec.max_rank is not None:
        out += ["--max-lora-rank", str(spec.max_rank)]
    if spec.adapter_credentials_secret_ref:
        out += ["--lora-credentials", CREDENTIALS_PATH]
    return out


def adapter_volumes(deployment: LLMDeployment) -> list[Json]:
    """Volumes of the pods."""
    if deployment.spec.adapters is None:
        return []
    source = {"name": names.adapters(deployment.name), "optional": True}  # pods that end may outlive it
    out: list[Json] = [{"name": _LIST_VOLUME, "configMap": source}]
    if secret := deployment.spec.adapter_credentials_secret_ref:
        sources = [{"secret": {"name": secret.name}}]
        out.append({"name": _CREDENTIALS_VOLUME, "projected": {"sources": sources}})
    return out


def adapter_mounts(deployment: LLMDeployment) -> list[Json]:
    """Mounts of the engine's container."""
    paths = {_LIST_VOLUME: LIST_PATH, _CREDENTIALS_VOLUME: CREDENTIALS_PATH}
    return [
        {"name": one["name"], "mountPath": paths[one["name"]], "readOnly": True} for one in adapter_volumes(deployment)
    ]
