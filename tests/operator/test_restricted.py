"""Nobody gets a pod with more privileges than the operator's own templates have by way of an LLMDeployment."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.escalations import ESCALATIONS, HARDENED
from support.llmd import parsed
from support.llmd_strategies import specs
from support.worlds import world

from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.reconcile import reconcile
from octavo_operator.render import InvalidTemplateError, expected_template
from octavo_operator.render.restricted import violations

CONFIG = OperatorConfig()
ALLOWING = dataclasses.replace(CONFIG, allow_privileged_pods=True)


@pytest.mark.parametrize(("spec", "path"), ESCALATIONS.values(), ids=ESCALATIONS)
def test_privileges_are_refused_by_their_path_unless_the_chart_allows_them(spec: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidTemplateError, match="allowPrivilegedPods") as refused:
        expected_template(parsed(**spec), CONFIG)
    assert refused.value.reason == "PrivilegedPod"
    assert str(refused.value).startswith(path)
    assert expected_template(parsed(**spec), ALLOWING)


def test_a_refusal_is_a_condition_and_nothing_is_applied() -> None:
    spec, path = ESCALATIONS["hostPath"]
    outcome = reconcile(parsed(**spec), world(), CONFIG)
    assert outcome.plan.actions == []
    assert outcome.status
    degraded = next(one for one in outcome.status["conditions"] if one["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "PrivilegedPod")
    assert path in degraded["message"]


@given(specs)
def test_pods_of_any_fields_are_within_the_restricted_standard(spec: dict[str, Any]) -> None:
    template = expected_template(parsed(**spec), CONFIG)
    assert list(violations(template, "toy")) == []


@given(st.lists(st.sampled_from(sorted(ESCALATIONS)), min_size=1, max_size=4, unique=True))
def test_several_together_do_not_hide_each_other(names: list[str]) -> None:
    patches = [patch for name in names for patch in ESCALATIONS[name][0].get("podPatches", [])]
    volumes = [one for name in names for one in ESCALATIONS[name][0].get("volumes", [])]
    annotations = {
        key: value for name in names for key, value in ESCALATIONS[name][0].get("podAnnotations", {}).items()
    }
    with pytest.raises(InvalidTemplateError):
        expected_template(parsed(podPatches=patches, volumes=volumes, podAnnotations=annotations), CONFIG)


def test_a_hardened_sidecar_and_a_looser_engine_within_the_standard_are_fine() -> None:
    sidecar = {"name": "proxy", "image": "proxy:1", "securityContext": HARDENED}
    patches = [
        {"op": "add", "path": "/spec/containers/-", "value": sidecar},
        {"op": "replace", "path": "/spec/containers/0/securityContext/readOnlyRootFilesystem", "value": False},
        {"op": "replace", "path": "/spec/securityContext/runAsUser", "value": 1000},
        {"op": "add", "path": "/spec/volumes/-", "value": {"name": "x", "emptyDir": {}}},
    ]
    assert len(expected_template(parsed(podPatches=patches), CONFIG)["spec"]["containers"]) == 2


NODE = {"model": {"uri": "org/name", "cache": {"mode": "node", "node": {"path": "/var/lib/octavo"}}}}
SHARING = dataclasses.replace(CONFIG, node_cache_paths=("/var/lib/octavo",))


def test_a_folder_of_nodes_is_refused_with_the_way_out_unless_the_chart_names_it() -> None:
    for config in (CONFIG, dataclasses.replace(CONFIG, node_cache_paths=("/var/lib", "/var/lib/octavo/x"))):
        with pytest.raises(InvalidTemplateError, match=r"cache\.mode pvc.*cache\.nodePaths") as refused:
            expected_template(parsed(**NODE), config)
        assert refused.value.reason == "NodeCacheNotAllowed"
    template = expected_template(parsed(**NODE), SHARING)
    volumes = {one["name"]: one for one in template["spec"]["volumes"]}
    assert volumes["cache"]["hostPath"] == {"path": "/var/lib/octavo", "type": "Directory"}


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"volumes": [{"name": "x", "hostPath": {"path": "/var/lib/octavo", "type": "Directory"}}]}, "/spec/volumes"),
        ({"volumeMounts": [{"name": "cache", "mountPath": "/x"}]}, "/spec/initContainers/0/volumeMounts"),
        ({"volumeMounts": [{"name": "cache", "mountPath": "/x", "subPath": "other"}]}, "/spec/initContainers/0"),
        (
            {"volumeMounts": [{"name": "cache", "mountPath": "/x", "subPath": "default/../other"}]},
            "/spec/initContainers",
        ),
        (
            {"podPatches": [{"op": "remove", "path": "/spec/containers/0/volumeMounts/0/subPath"}]},
            "/spec/containers/0/volumeMounts/0/subPath must be default",
        ),
        (
            {"podPatches": [{"op": "replace", "path": "/spec/volumes/0/hostPath/path", "value": "/etc"}]},
            "/spec/volumes/0/hostPath",
        ),
    ],
)
def test_nobody_reaches_what_other_namespaces_keep_on_a_node(more: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidTemplateError) as refused:
        expected_template(parsed(**NODE, **more), SHARING)
    assert refused.value.reason == "PrivilegedPod" and str(refused.value).startswith(path)


def test_a_pod_may_mount_more_of_its_own_part() -> None:
    mount = {"name": "cache", "mountPath": "/x", "subPath": "default/notes"}
    assert expected_template(parsed(**NODE, volumeMounts=[mount]), SHARING)
