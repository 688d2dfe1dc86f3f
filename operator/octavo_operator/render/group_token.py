"""The Secret by which the pods of a group know each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.render import names

Json = dict[str, Any]


def expected_token(deployment: LLMDeployment) -> Json:
    """The Secret without the token, which is made once, at its creation: nothing here ever knows it."""
    return names.manifest(deployment, "v1", "Secret", {"type": "Opaque"}, names.cluster_token(deployment.name))


def needs_token(deployment: LLMDeployment, pods: Iterable[Json]) -> bool:
    """True if a pod waits for a Secret that somebody has deleted."""
    missing = f'secret "{names.cluster_token(deployment.name)}" not found'
    return any(
        missing in ((status.get("state") or {}).get("waiting") or {}).get("message", "")
        for pod in pods
        for status in (pod.get("status") or {}).get("containerStatuses") or []
    )
