"""The cluster as reconcile and the status see it, with defaults for all that a test does not care about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.autoscaling.condition import Scaling
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.decisions import Decisions, Template
from octavo_operator.deployment.status import expected_status
from octavo_operator.deployment.world import DeploymentWorld
from octavo_operator.gateway.world import GatewayWorld
from octavo_operator.groups.scheduling import OtherGroups
from octavo_operator.kube.store import Observed
from octavo_operator.observed.workload import Workload
from octavo_operator.render.router.served import Candidate

Json = dict[str, Any]


def _common(children: Iterable[Observed], now: float, apis: Iterable[str]) -> dict[str, Any]:
    return {
        "children": list(children),
        "now": now,
        "apis": frozenset(apis),
        "write_problem": None,
        "field_conflict": None,
        "pod_events": {},
        "rejected": None,
    }


def world(
    children: Iterable[Observed] = (), now: float = 0.0, apis: Iterable[str] = (), **fields: Any
) -> DeploymentWorld:
    """What is known when an LLMDeployment is reconciled. `fields`: of DeploymentWorld."""
    defaults = {
        **_common(children, now, apis),
        "scaling": Scaling(),
        "image_turn": None,
        "start": None,
        "gateways": (),
        "other_groups": OtherGroups,
        "adapters": {},
    }
    return DeploymentWorld(**{**defaults, **fields})


def gateway_world(
    children: Iterable[Observed] = (),
    candidates: Sequence[Candidate] = (),
    now: float = 0.0,
    apis: Iterable[str] = (),
    **fields: Any,
) -> GatewayWorld:
    """What is known when an LLMGateway is reconciled. `fields`: of GatewayWorld."""
    defaults = {**_common(children, now, apis), "candidates": candidates, "has_namesake": False}
    return GatewayWorld(**{**defaults, **fields})


def status_of(
    deployment: LLMDeployment,
    live: Json | None = None,
    pods: Iterable[Json] = (),
    now: float = 0.0,
    template: Json | None = None,
    scaling: Scaling = Scaling(),
    **fields: Any,
) -> Json:
    """The status where the spec is applied. `live`: the Deployment; `pods`: of the engine, however incomplete;
    `template`: the pod template of the current spec; `fields`: of DeploymentWorld."""
    decisions = Decisions(Workload.of(live), template=Template(current=template), scaling=scaling)
    return expected_status(
        deployment, world([_engine_pod(pod) for pod in pods], now, **fields), decisions, OperatorConfig()
    )


def _engine_pod(pod: Json) -> Observed:
    metadata = {"name": "pod", "namespace": "default", "uid": "pod", "resourceVersion": "1", **pod["metadata"]}
    metadata["labels"] = {**metadata.get("labels", {}), "app.kubernetes.io/component": "engine"}
    return Observed.of("Pod", "v1", {**pod, "metadata": metadata})
