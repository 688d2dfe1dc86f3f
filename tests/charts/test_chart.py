"""The chart: clean for Helm's linter, complete for every mode, strict about values, and without a right too many."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from clusterrig import binaries
from support.chart_values import MATRIX

from octavo_operator import crd
from octavo_operator.config import OperatorConfig

CHART = Path(__file__).parents[2] / "charts/octavo"

pytestmark = pytest.mark.skipif(
    not binaries.are_built(), reason="Helm is one of the rig's programs: `make cluster` builds them"
)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(binaries.programs()["helm"]), *arguments], capture_output=True, text=True)


def rendered(*settings: str) -> list[dict[str, Any]]:
    flags = [flag for setting in settings for flag in ("--set", setting)]
    done = helm("template", "release", str(CHART), "-n", "system", *flags)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(of_kind(objects, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0])


@pytest.mark.parametrize("name", MATRIX)
def test_lint_is_clean(name: str) -> None:
    flags = [flag for setting in MATRIX[name] for flag in ("--set", setting)]
    done = helm("lint", "--strict", str(CHART), *flags)
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("name", MATRIX)
def test_the_operator_understands_what_it_is_told(name: str) -> None:
    objects = rendered(*MATRIX[name])
    env = {variable["name"]: variable.get("value", "x") for variable in container(objects)["env"]}
    config = OperatorConfig.from_environment(env)
    assert config.watch_namespaces == (("a", "b") if name == "namespaced" else ())
    assert config.image_pull_secrets == (("y", "z") if name == "secrets" else ())
    assert config.cluster_assigned_ids is (name == "openshift")


@pytest.mark.parametrize("name", MATRIX)
def test_no_right_too_many(name: str) -> None:
    objects = rendered(*MATRIX[name])
    roles = of_kind(objects, "Role") + of_kind(objects, "ClusterRole")
    for role in roles:
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "secrets" not in rule["resources"]
            if "rbac.authorization.k8s.io" in rule["apiGroups"]:
                assert set(rule["verbs"]) <= {"get", "list", "watch"}
    if name == "namespaced":
        own = [
            role
            for role in of_kind(objects, "ClusterRole")
            if not role["metadata"]["name"].endswith(("-view", "-edit"))
        ]
        assert not own
        assert not of_kind(objects, "ClusterRoleBinding")
        assert {role["metadata"]["namespace"] for role in of_kind(objects, "Role")} == {"a", "b", "system"}
    if name == "no-rbac":
        assert not roles


@pytest.mark.parametrize("name", MATRIX)
def test_an_api_of_the_whole_cluster_is_served_only_by_an_operator_of_the_whole_cluster(name: str) -> None:
    objects = rendered(*MATRIX[name])
    env = {variable["name"]: variable.get("value", "x") for variable in container(objects)["env"]}
    config = OperatorConfig.from_environment(env)
    assert config.metrics_api is (name not in ("namespaced", "no-metrics-api"))
    services = [one for one in of_kind(objects, "Service") if one["metadata"]["name"] == config.metrics_service]
    assert len(services) == 1
    assert "selector" not in services[0]["spec"], "the operator that works says itself that it is the one to ask"
    bindings = of_kind(objects, "RoleBinding") + of_kind(objects, "ClusterRoleBinding")
    bound = {(one["metadata"].get("namespace"), one["roleRef"]["name"]) for one in bindings}
    needed = {("kube-system", "extension-apiserver-authentication-reader"), (None, config.metrics_service)}
    assert needed & bound == (needed if config.metrics_api and name != "no-rbac" else set())
    assert config.metrics_owner == ("" if name == "no-rbac" else config.metrics_service)


def test_the_crd_comes_along_and_stays() -> None:
    (installed,) = of_kind(rendered(), "CustomResourceDefinition")
    assert installed["spec"] == crd.manifest()["spec"]
    assert installed["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert not of_kind(rendered("crd.install=false"), "CustomResourceDefinition")
    (goes,) = of_kind(rendered("crd.keep=false"), "CustomResourceDefinition")
    assert "annotations" not in goes["metadata"]


def test_the_operator_is_hardened() -> None:
    pod = of_kind(rendered(), "Deployment")[0]["spec"]["template"]["spec"]
    context = pod["containers"][0]["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert context == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"livenessProbe", "readinessProbe", "startupProbe", "resources"} <= set(pod["containers"][0])


@pytest.mark.parametrize("assigned", [False, True])
def test_ids_are_the_charts_or_the_clusters(assigned: bool) -> None:
    """OpenShift's restricted-v2 refuses a uid outside of the namespace's range."""
    objects = rendered(f"clusterAssignedIds={str(assigned).lower()}")
    pods = [of_kind(objects, "Deployment")[0]["spec"]["template"]["spec"], of_kind(objects, "Pod")[0]["spec"]]
    for pod in pods:
        context = pod["securityContext"]
        ids = {key: value for key, value in context.items() if key in ("runAsUser", "runAsGroup", "fsGroup")}
        assert ids == ({} if assigned else {"runAsUser": 65532, "runAsGroup": 65532})
        assert context["runAsNonRoot"] is True
        assert pod["containers"][0]["securityContext"].keys().isdisjoint({"runAsUser", "runAsGroup"})


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("replicas=9", "replicas"),
        ("replica=1", "replica"),
        ("log.level=loud", "level"),
        ("watchNamespaces={A}", "watchNamespaces"),
        ("image.digest=abc", "digest"),
        ("crd.keep=perhaps", "keep"),
        ("serviceAccount.create=false", "serviceAccount.name"),
        ("metricsApi.port=8080", "metricsApi.port"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(setting: str, field: str) -> None:
    done = helm("template", "release", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert field in done.stderr


class _Strict(yaml.SafeLoader):
    """Refuses what names a key twice, as the API server does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: {keys}"
        return super().construct_mapping(node, deep)


PLACES = ("commonLabels", "podLabels", "monitoring.podMonitor.labels", "monitoring.rules.labels",
          "monitoring.dashboards.labels")  # fmt: skip


@pytest.mark.parametrize("name", ["app.kubernetes.io/component", "app.kubernetes.io/instance", "helm.sh/chart"])
def test_a_label_of_ours_is_named_once_and_stays_as_it_is(name: str) -> None:
    key = name.replace(".", "\\.")
    flags = [flag for place in PLACES for flag in ("--set", f"{place}.{key}=theirs", "--set", f"{place}.team=x")]
    apis = ["--api-versions", "monitoring.coreos.com/v1"]
    done = helm("template", "12", str(CHART), "-n", "system", *apis, *flags)
    assert done.returncode == 0, done.stderr
    objects = [one for one in yaml.load_all(done.stdout, _Strict) if one]
    assert len(of_kind(objects, "PodMonitor")) == len(of_kind(objects, "PrometheusRule")) == 1
    (deployment,) = of_kind(objects, "Deployment")
    pod = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= pod.items()
    assert pod["team"] == "x"
    for one in objects:
        labels = one["metadata"]["labels"]
        assert labels[name] != "theirs"
        assert labels["team"] == "x"
        assert labels["app.kubernetes.io/instance"] == "12", "a release may be called by a number"


def test_every_value_is_in_the_schema() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
