"""The store of responses in the engine's pods: arguments, environment, volume."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.render import names

Json = dict[str, Any]
VOLUME = "responses"


def response_arguments(deployment: LLMDeployment) -> list[str]:
    """Arguments of `octavo serve`. The address of a database is no argument: it holds a password."""
    responses = deployment.spec.responses
    if responses is None:
        return []
    places = {"Memory": "memory", "Sqlite": f"{names.RESPONSES_PATH}/responses.db"}
    place = places.get(responses.store)
    where = [] if place is None else ["--responses-store", place]
    return [*where, *([] if responses.ttl is None else ["--responses-ttl", str(responses.ttl)])]


def response_environment(deployment: LLMDeployment) -> list[Json]:
    """The variable with the database's address."""
    responses = deployment.spec.responses
    if responses is None or responses.secret_ref is None:
        return []
    key = {"name": responses.secret_ref.name, "key": responses.secret_ref.key}
    return [{"name": "OCTAVO_RESPONSES_STORE", "valueFrom": {"secretKeyRef": key}}]


def response_volumes(deployment: LLMDeployment) -> list[Json]:
    """The volume of the file: the claim, or one that ends with the pod."""
    responses = deployment.spec.responses
    if responses is None or responses.store != "Sqlite":
        return []
    claim = responses.existing_claim
    source: Json = {"emptyDir": {}} if claim is None else {"persistentVolumeClaim": {"claimName": claim}}
    return [{"name": VOLUME, **source}]


def response_mounts(deployment: LLMDeployment) -> list[Json]:
    """The place at which the engine has the volume."""
    mounted = response_volumes(deployment)
    return [{"name": VOLUME, "mountPath": names.RESPONSES_PATH}] if mounted else []
