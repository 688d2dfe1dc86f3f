"""Renders a spec into manifests of all child objects: pure functions, one `expected_*` per object."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.config import OperatorConfig
from octavo_operator.render.autoscaling import expected_autoscaler
from octavo_operator.render.deployment import expected_deployment
from octavo_operator.render.network import expected_network_policy, expected_service
from octavo_operator.render.pod import expected_template
from octavo_operator.render.support import (
    expected_cache_claim,
    expected_disruption_budget,
    expected_monitor,
    expected_service_account,
)
from octavo_operator.render.template_checks import TEMPLATE_PROBLEMS, InvalidTemplateError

Manifest = dict[str, Any]


def render(
    deployment: LLMDeployment,
    config: OperatorConfig,
    *,
    template: Manifest | None = None,
    unavailable: int | None = None,
    apis: frozenset[str] = frozenset(),
) -> list[Manifest]:
    """Manifests of all children, in the order in which they are to be applied.

    `template`: an earlier pod template, instead of the one that this operator would render. `unavailable`: in this
    rollout old pods are stopped first, so many at a time. `apis`: optional kinds that the cluster has. Raises
    InvalidTemplateError.
    """
    if template is None:
        template = expected_template(deployment, config)
    optional = [expected_monitor(deployment)] if deployment.spec.monitoring.kind in apis else []
    manifests = [
        expected_service_account(deployment),
        expected_cache_claim(deployment),
        expected_network_policy(deployment, config),
        expected_service(deployment),
        expected_deployment(deployment, template, unavailable),
        expected_disruption_budget(deployment),
        expected_autoscaler(deployment, config, apis),
        *optional,
    ]
    return [manifest for manifest in manifests if manifest is not None]


__all__ = ["TEMPLATE_PROBLEMS", "InvalidTemplateError", "Manifest", "expected_template", "render"]
