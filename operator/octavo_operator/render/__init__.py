"""Renders a spec into manifests of all child objects: pure functions, one `expected_*` per object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.config import OperatorConfig
from octavo_operator.render.autoscaling import expected_autoscaler
from octavo_operator.render.group_policy import expected_group_policy
from octavo_operator.render.lora import expected_adapters
from octavo_operator.render.network import (
    expected_network_policy,
    expected_router_policy,
    expected_service,
    has_service_monitor,
)
from octavo_operator.render.pod import expected_template
from octavo_operator.render.router.objects import (
    RouterPods,
    Stage,
    expected_config_map,
    expected_files,
    expected_pods_service,
    expected_router_budget,
    expected_router_deployment,
    expected_router_template,
)
from octavo_operator.render.support import (
    expected_cache_claim,
    expected_disruption_budget,
    expected_inference_pool,
    expected_monitor,
    expected_router_monitor,
    expected_service_account,
)
from octavo_operator.render.template_checks import TEMPLATE_PROBLEMS, InvalidTemplateError
from octavo_operator.render.workload import expected_workload, is_grouped

Manifest = dict[str, Any]


def render(
    deployment: LLMDeployment,
    config: OperatorConfig,
    *,
    template: Manifest | None = None,
    unavailable: int | None = None,
    apis: frozenset[str] = frozenset(),
    stage: Stage | None = None,
    routers: RouterPods | None = None,
    gateways: Sequence[str] = (),
    held: int = 0,
) -> list[Manifest]:
    """Manifests of all children, in the order in which they are to be applied.

    `template`: an earlier pod template, instead of the one that this operator would render. `unavailable`: in this
    rollout old pods are stopped first, so many at a time. `apis`: optional kinds that the cluster has. `stage`: of the
    way to or from routers; None: the one that the spec leads to. `routers`: earlier ones, as `template`. `gateways`:
    names of the LLMGateways that serve it. `held`: groups that are not to run. Raises InvalidTemplateError.
    """
    if template is None:
        template = expected_template(deployment, config)
    if stage is None:
        stage = Stage.CLOSED if deployment.spec.routing.routers else Stage.NONE
    optional = [
        expected_monitor(deployment) if deployment.spec.monitoring.kind in apis else None,
        expected_inference_pool(deployment) if "InferencePool" in apis else None,
    ]
    manifests = [
        expected_service_account(deployment),
        expected_cache_claim(deployment),
        expected_network_policy(deployment, config, stage),
        expected_service(deployment, config, stage),
        expected_adapters(deployment),
        expected_group_policy(deployment) if is_grouped(deployment, apis) else None,
        expected_workload(deployment, template, unavailable, held, apis),
        expected_disruption_budget(deployment),
        expected_autoscaler(deployment, config, apis),
        *(_router_objects(deployment, config, routers, apis) if stage.has_routers else ()),
        # Without management: a ServiceMonitor finds the pods' metrics at the Service of clients.
        expected_pods_service(deployment, False) if gateways and not stage.has_routers else None,
        *optional,
    ]
    return [manifest for manifest in manifests if manifest is not None]


def _router_objects(
    deployment: LLMDeployment, config: OperatorConfig, routers: RouterPods | None, apis: frozenset[str]
) -> list[Manifest | None]:
    if routers is None:
        content = expected_files(deployment, config)
        routers = RouterPods(expected_router_template(deployment, config, content), content, {})
    return [
        expected_router_policy(deployment, config),
        expected_pods_service(deployment, has_service_monitor(deployment)),
        expected_config_map(deployment, routers.files),
        expected_router_deployment(deployment, routers),
        expected_router_budget(deployment),
        expected_router_monitor(deployment) if "PodMonitor" in apis else None,
    ]
