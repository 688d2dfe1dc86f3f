"""spec.podPatches: RFC 6902 patches of the finished pod template."""

from __future__ import annotations

import copy
from typing import Any

import jsonpatch
import jsonpointer

from octavo_operator.api import LLMDeployment
from octavo_operator.api.schema import to_json
from octavo_operator.render import names
from octavo_operator.render.template_checks import INVALID_POD_PATCH, InvalidTemplateError

Json = dict[str, Any]


class InvalidPodPatchError(InvalidTemplateError):
    """A patch of spec.podPatches that does not apply to the pod template."""

    def __init__(self, message: str) -> None:
        super().__init__(message, INVALID_POD_PATCH)


def patched(deployment: LLMDeployment, template: Json) -> Json:
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
