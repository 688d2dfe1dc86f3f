"""Finds errors of a spec that the API server accepts, but with which the pods would fail."""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Iterator
from typing import Any

from octavo_operator import __version__
from octavo_operator.api import LLMDeployment
from octavo_operator.render import names
from octavo_operator.render.engine_flags import FLAGS

Json = dict[str, Any]

INVALID_POD_PATCH = "InvalidPodPatch"
PRIVILEGED_POD = "PrivilegedPod"
UNKNOWN_ARGUMENT = "UnknownArgument"
READ_ONLY_PATH = "ReadOnlyPath"
IMAGE_VOLUMES_UNSUPPORTED = "ImageVolumesUnsupported"
NODE_CACHE_NOT_ALLOWED = "NodeCacheNotAllowed"
GROUPS_NOT_INSTALLED = "LeaderWorkerSetNotInstalled"
TEMPLATE_PROBLEMS = frozenset(
    {
        INVALID_POD_PATCH,
        PRIVILEGED_POD,
        UNKNOWN_ARGUMENT,
        READ_ONLY_PATH,
        IMAGE_VOLUMES_UNSUPPORTED,
        NODE_CACHE_NOT_ALLOWED,
        GROUPS_NOT_INSTALLED,
    }
)


class InvalidTemplateError(ValueError):
    """A spec that yields no valid pod template. The message names field and way out; `reason`: of the condition."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


# Folders into which the engine and its libraries write.
_CACHE_VARIABLES = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "XDG_CACHE_HOME",
    "OCTAVO_CACHE",
    "TRITON_CACHE_DIR",
    "TMPDIR",
)


def unknown_arguments(deployment: LLMDeployment, image: str) -> Iterator[str]:
    """Messages about flags in spec.engine.args that the engine does not have. Only images of the operator's own version
    are checked: the flags of others are unknown here."""
    if not _is_of_this_version(image):
        return
    for index, argument in enumerate(deployment.spec.engine.args):
        flag, _, _ = argument.partition("=")
        if not re.fullmatch(r"--?[A-Za-z][-_A-Za-z0-9]*", flag):
            continue  # a value
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag not in FLAGS:
            close = difflib.get_close_matches(flag, FLAGS, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield f"spec.engine.args[{index}]: the engine has no flag {flag}{hint}"


def _is_of_this_version(image: str) -> bool:
    _, _, tag = image.partition("@")[0].rpartition("/")[2].partition(":")
    return tag == __version__


def unwritable_paths(template: Json) -> Iterator[str]:
    """Messages about environment variables that put caches on a read-only root, outside of all writable mounts."""
    pod = template["spec"]
    for kind in ("initContainers", "containers"):
        for container in pod.get(kind) or []:
            if container.get("name") not in (names.ENGINE, names.FETCH):
                continue
            if not (container.get("securityContext") or {}).get("readOnlyRootFilesystem"):
                continue
            mounts = [
                posixpath.normpath(m["mountPath"]) for m in container.get("volumeMounts") or [] if not m.get("readOnly")
            ]
            variables = {one["name"]: one.get("value") for one in container.get("env") or []}
            offline = str(variables.get("HF_HUB_OFFLINE", "")).lower() in ("1", "on", "yes", "true")
            for name in _CACHE_VARIABLES:
                path = variables.get(name)
                if (
                    not path
                    or not path.startswith("/")
                    or "$(" in path
                    or (offline and name.startswith(("HF_", "HUGG")))
                ):
                    continue
                path = posixpath.normpath(path)
                if not any(path == mount or path.startswith(f"{mount}/") for mount in mounts):
                    yield (
                        f"spec.engine.env: {name}={path} is on the read-only root of the container "
                        f"{container['name']}; "
                        f"use a path below {names.CACHE_PATH}, or mount a volume there (spec.volumes, "
                        f"spec.volumeMounts)"
                    )
