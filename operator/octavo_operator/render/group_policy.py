"""The NetworkPolicy of the pods of groups that serve nothing."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.render import names

Json = dict[str, Any]


def expected_group_policy(deployment: LLMDeployment) -> Json | None:
    """Let only leaders and other pods of groups reach them. None: spec.networkPolicy.enabled is false."""
    policy = deployment.spec.network_policy
    if not policy.enabled:
        return None
    leaders, workers = ({"podSelector": {"matchLabels": one}} for one in group_selectors(deployment))
    body: Json = {
        "podSelector": workers["podSelector"],
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [leaders, workers]}],
    }
    if policy.egress is not None:
        body["policyTypes"] = ["Ingress", "Egress"]
        body["egress"] = [*(dict(rule) for rule in policy.egress), *group_egress(deployment)]
    return names.manifest(
        deployment,
        "networking.k8s.io/v1",
        "NetworkPolicy",
        {"spec": body},
        names.group(deployment.name),
        component=names.WORKER,
    )


def group_selectors(deployment: LLMDeployment) -> tuple[dict[str, str], dict[str, str]]:
    """Labels of the leaders, and of the other pods of groups."""
    return names.selector(deployment), names.selector(deployment, names.WORKER)


def group_ingress(deployment: LLMDeployment) -> list[Json]:
    """Return the rules that let the other pods of groups reach leaders."""
    if deployment.spec.parallelism.nodes == 1:
        return []
    workers = {"podSelector": {"matchLabels": names.selector(deployment, names.WORKER)}}
    return [{"ports": [{"port": "group", "protocol": "TCP"}], "from": [workers]}]


def group_egress(deployment: LLMDeployment) -> list[Json]:
    """Return the rules that let pods of groups reach each other and DNS, whatever spec.networkPolicy.egress says."""
    if deployment.spec.parallelism.nodes == 1:
        return []
    return [
        {"to": [{"podSelector": {"matchLabels": one}} for one in group_selectors(deployment)]},
        {"ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]},
    ]
