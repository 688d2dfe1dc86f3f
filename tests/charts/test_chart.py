"""The chart: clean for Helm's linter, complete for every mode, strict about values, and without a right too many."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from clusterrig import binaries
from support.chart_values import MATRIX, ROOT, published

from octavo_operator.api.schema import to_json
from octavo_operator.config import OperatorConfig
from octavo_operator.crd import gateway as gateway_crd
from octavo_operator.crd import generate as crd
from octavo_operator.defaults import Defaults
from octavo_operator.render.names import CONTROL_PORT, MANAGEMENT_PORT, PICKER_PORT

CHART = published()
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # CRDs are long

pytestmark = pytest.mark.skipif(
    not binaries.are_built(), reason="Helm is one of the rig's programs: `make cluster` builds them"
)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(binaries.programs()["helm"]), *arguments], capture_output=True, text=True)


@cache  # tests of one matrix look at the same objects, each at something else
def rendered(*settings: str) -> list[dict[str, Any]]:
    flags = [flag for setting in settings for flag in ("--set", setting)]
    done = helm("template", "release", str(CHART), "-n", "system", *flags)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.load_all(done.stdout, LOADER) if one]


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


def test_the_readme_s_commands_render() -> None:
    readme = (ROOT / "charts/octavo/README.md").read_text()
    settings = re.findall(r"--set \"?([\w.]+=[^\s\"`]+)", readme)
    assert len(settings) >= 8
    for setting in settings:
        assert rendered(setting.replace("sha256:...", f"sha256:{'0' * 64}"))
    verbs = re.findall(r"^helm (\w+) octavo", readme, re.MULTILINE)
    assert {"install", "test", "upgrade", "rollback", "uninstall"} <= {*verbs}
    for verb in verbs:
        used = set(re.findall(r" (-n|--[a-z-]+)\b", "".join(re.findall(rf"^helm {verb} (?:.*\\\n)*.*", readme, re.M))))
        known = helm(verb, "--help").stdout
        assert all(flag == "-n" or flag in known for flag in used), (verb, used)


@pytest.mark.parametrize("name", MATRIX)
def test_the_operator_understands_what_it_is_told(name: str) -> None:
    objects = rendered(*MATRIX[name])
    env = {variable["name"]: variable.get("value", "x") for variable in container(objects)["env"]}
    config = OperatorConfig.from_environment(env)
    assert config.watch_namespaces == (("a", "b") if name == "namespaced" else ())
    assert config.image_pull_secrets == {
        "secrets": ("y", "z"),
        "secrets-as-kubernetes-has-them": ("y", "z"),
        "registry": ("g",),
    }.get(name, ())
    assert config.cluster_assigned_ids is (name == "openshift")
    assert config.allow_privileged_pods is config.allow_snippet_annotations is (name == "trusting")
    assert config.defaults == Defaults()
    assert (config.image_policy, config.image_rollouts) == (("Follow", 3) if name == "following" else ("Pinned", 1))


def test_defaults_of_llmdeployments_reach_the_operator() -> None:
    given: dict[str, Any] = {
        "images": {"cpu": "engine-cpu:1"},
        "scheduling": {"tolerations": [{"operator": "Exists"}], "priorityClassName": "models"},
        "resourcesByAccelerator": {"nvidia.com/gpu": {"requests": {"cpu": 8, "memory": "64Gi"}}},
    }
    done = helm("template", "release", str(CHART), "--set-json", f"defaults={json.dumps(given)}")
    assert done.returncode == 0, done.stderr
    objects = [one for one in yaml.load_all(done.stdout, LOADER) if one]
    env = {variable["name"]: variable.get("value", "x") for variable in container(objects)["env"]}
    assert to_json(OperatorConfig.from_environment(env).defaults) == given


@pytest.mark.parametrize("name", MATRIX)
def test_no_right_too_many(name: str) -> None:
    objects = rendered(*MATRIX[name])
    roles = of_kind(objects, "Role") + of_kind(objects, "ClusterRole")
    for role in roles:
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            if "secrets" in rule["resources"]:  # it makes tokens, and never sees anybody's
                assert (rule["resources"], rule["verbs"]) == (["secrets"], ["create"])
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
    role = config.metrics_owner or "none"
    needed = {("kube-system", "extension-apiserver-authentication-reader"), (None, role)}
    assert needed & bound == (needed if config.metrics_api and name != "no-rbac" else set())
    assert (config.metrics_owner == "") is (name == "no-rbac")
    if needed & bound:
        assert role in {one["metadata"]["name"] for one in of_kind(objects, "ClusterRole")}


def test_the_crds_come_along_and_stay() -> None:
    installed = of_kind(rendered(), "CustomResourceDefinition")
    assert [one["spec"] for one in installed] == [made.manifest()["spec"] for made in (crd, gateway_crd)]
    for one in installed:
        assert one["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert not of_kind(rendered("crd.install=false"), "CustomResourceDefinition")
    going = of_kind(rendered("crd.keep=false"), "CustomResourceDefinition")
    assert len(going) == 2 and not any("annotations" in one["metadata"] for one in going)


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
        ("image.digets=sha256:1", "digets"),
        ("engine.image.pullPolicy=Always", "pullPolicy"),
        ("engine.image.digest=latest", "digest"),
        ("resources.limit.memory=1Gi", "limit"),
        ("tolerations[0].keys=a", "keys"),
        ("affinity.podAffinty.a=b", "podAffinty"),
        ("extraEnv[0].name=A,extraEnv[0].valu=b", "valu"),
        ("networkPolicy.egress=true", "egress"),
        ("defaults.image=a", "image"),
        ("defaults.scheduling.nodeSelectors.a=b", "nodeSelectors"),
        ("defaults.resourcesByAccelerator.cpu.limit.memory=1Gi", "limit"),
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


PLACES = (
    "commonLabels",
    "podLabels",
    "monitoring.podMonitor.labels",
    "monitoring.rules.labels",
    "monitoring.dashboards.labels",
)


@pytest.mark.parametrize("name", ["app.kubernetes.io/component", "app.kubernetes.io/instance", "helm.sh/chart"])
def test_a_label_of_ours_is_named_once_and_stays_as_it_is(name: str) -> None:
    key = name.replace(".", "\\.")
    flags = [flag for place in PLACES for flag in ("--set", f"{place}.{key}=theirs", "--set", f"{place}.team=x")]
    apis = ["--api-versions", "monitoring.coreos.com/v1"]
    done = helm("template", "12", str(CHART), "-n", "system", *apis, *flags)
    assert done.returncode == 0, done.stderr
    objects = [one for one in yaml.load_all(done.stdout, _Strict) if one]
    assert [one["metadata"]["name"].endswith("-gateways") for one in of_kind(objects, "PodMonitor")] == [False, True]
    assert len(of_kind(objects, "PrometheusRule")) == 1
    (deployment,) = of_kind(objects, "Deployment")
    pod = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= pod.items()
    assert pod["team"] == "x"
    for one in objects:
        labels = one["metadata"]["labels"]
        assert labels[name] != "theirs"
        assert labels["team"] == "x"
        assert labels["app.kubernetes.io/instance"] == "12", "a release may be called by a number"


def schema_and_values() -> tuple[dict[str, Any], dict[str, Any]]:
    return json.loads((CHART / "values.schema.json").read_text()), yaml.safe_load((CHART / "values.yaml").read_text())


def every_object(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every place of a schema that describes an object."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" or "properties" in schema:
            yield path, schema
        for key, value in schema.items():
            if key not in ("if", "then", "not"):  # what holds of an object that is described elsewhere
                yield from every_object(value, f"{path}/{key}")
    elif isinstance(schema, list):
        for number, value in enumerate(schema):
            yield from every_object(value, f"{path}/{number}")


def test_unknown_keys_are_refused_at_every_level() -> None:
    schema, _ = schema_and_values()
    places = dict(every_object(schema))
    assert len(places) > 30
    # What else a chart that has this one as a part calls global is not ours to know.
    open_ones = {path for path, one in places.items() if one.get("additionalProperties", True) is True}
    assert open_ones == {"/properties/global"}
    for path, one in places.items():
        if path not in open_ones and (more := one["additionalProperties"]) is not False:
            assert "properties" not in one and more, (
                f"{path}: a map has values of one type, or named keys and no others"
            )
    # Before draft 2019-09, what stands beside a $ref is not read: older Helms would check less.
    beside = [path for path, one in every_reference(schema) if len(one) > 1]
    assert beside == []


def every_reference(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield path, schema
        for key, value in schema.items():
            yield from every_reference(value, f"{path}/{key}")


def test_schema_values_and_templates_know_the_same_values() -> None:
    schema, values = schema_and_values()

    def resolved(one: dict[str, Any]) -> dict[str, Any]:
        return schema["$defs"][one["$ref"].rpartition("/")[2]] if "$ref" in one else one

    def compare(described: dict[str, Any], given: dict[str, Any], path: str) -> Iterator[str]:
        """Paths of all values; every key of a default is described, and every key described has a default."""
        for key, value in given.items():
            yield (here := f"{path}{key}")
            one = resolved(described["properties"][key])
            # Kubernetes' own objects and maps are the user's to fill.
            theirs = ("affinity", "resources", "defaults.scheduling")
            if isinstance(value, dict) and "properties" in one and here not in theirs:
                yield from compare(one, value, f"{here}.")
        assert set(given) == set(described.get("properties", {})), path

    known = set(compare(schema, values, ""))
    texts = [path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file()]
    used = set(re.findall(r"\.Values((?:\.\w+)+)", "\n".join(texts)))
    assert {path[1:] for path in used} <= known
    leaves = {path for path in known if not any(other.startswith(f"{path}.") for other in known)}
    # Reached by a loop over names, by `with`, or handed on as a whole.
    named = {word for text in texts for word in re.findall(r"\w+", text)}
    assert {path for path in leaves if path.rpartition(".")[2] not in named} == set()


def test_values_that_kubernetes_accepts_are_accepted() -> None:
    """Strict, but not about what a pod may have."""
    term = {"labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "kubernetes.io/hostname"}
    values = {
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [term],
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 5, "podAffinityTerm": term}],
            },
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}]
                }
            },
        },
        "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}],
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "minDomains": 2}
        ],
        "extraEnv": [
            {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "B", "value": "1"},
        ],
        "resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
    }
    flags = [flag for key, value in values.items() for flag in ("--set-json", f"{key}={json.dumps(value)}")]
    done = helm("template", "release", str(CHART), *flags)
    assert done.returncode == 0, done.stderr
    (deployment,) = of_kind([one for one in yaml.load_all(done.stdout, LOADER) if one], "Deployment")
    assert deployment["spec"]["template"]["spec"]["affinity"] == values["affinity"]


def test_releases_of_one_name_in_two_namespaces_do_not_collide() -> None:
    """Both serve the same namespaces and put their dashboards into Grafana's."""
    for settings in (
        ["crd.install=false", "monitoring.dashboards.namespace=grafana"],
        ["crd.install=false", "monitoring.dashboards.namespace=grafana", "watchNamespaces={a,b}"],
    ):
        flags = [flag for setting in settings for flag in ("--set", setting)]
        sets = []
        for namespace in ("one", "two"):
            apis = ["--api-versions", "monitoring.coreos.com/v1"]
            done = helm("template", "octavo", str(CHART), "-n", namespace, *apis, *flags)
            assert done.returncode == 0, done.stderr
            objects = [one for one in yaml.load_all(done.stdout, LOADER) if one]
            names = {(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in objects}
            assert len(names) == len(objects) > 10
            sets.append(names)
            roles = {(kind, space, name) for kind, space, name in names if kind in ("Role", "ClusterRole")}
            for one in of_kind(objects, "RoleBinding") + of_kind(objects, "ClusterRoleBinding"):
                role = one["roleRef"]
                space = one["metadata"].get("namespace") if role["kind"] == "Role" else None
                assert (role["kind"], space, role["name"]) in roles or space == "kube-system"
                assert one["subjects"][0]["namespace"] == namespace
        assert not sets[0] & sets[1]


@pytest.mark.parametrize("restricted", [False, True])
def test_the_network_policy_restricts_both_directions(restricted: bool) -> None:
    objects = rendered("monitoring.namespaces={m}", f"networkPolicy.restrictEgress={str(restricted).lower()}")
    (policy,) = of_kind(objects, "NetworkPolicy")
    labels = of_kind(objects, "Deployment")[0]["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    ports = {port["name"] for port in container(objects)["ports"]}
    metrics, api = policy["spec"]["ingress"]
    assert metrics["from"][0]["namespaceSelector"]["matchExpressions"][0]["values"] == ["m", "keda"]
    assert "from" not in api
    assert {port["port"] for rule in (metrics, api) for port in rule["ports"]} == ports
    assert policy["spec"]["policyTypes"] == (["Ingress", "Egress"] if restricted else ["Ingress"])
    if restricted:
        reached = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
        assert reached == {53, 443, 6443, MANAGEMENT_PORT, PICKER_PORT, CONTROL_PORT}
    assert not of_kind(rendered("networkPolicy.enabled=false"), "NetworkPolicy")
    # Nobody who may read metrics is nobody, not everybody.
    (closed,) = of_kind(rendered("monitoring.namespaces=null", "networkPolicy.namespaces=null"), "NetworkPolicy")
    assert [rule["ports"][0]["port"] for rule in closed["spec"]["ingress"]] == ["metrics-api"]


@pytest.mark.parametrize(("replicas", "count"), [(1, 0), (2, 1)])
def test_a_budget_is_there_for_several_operators(replicas: int, count: int) -> None:
    """Of one it would block the drain of a node for good."""
    budgets = of_kind(rendered(f"replicas={replicas}"), "PodDisruptionBudget")
    assert len(budgets) == count
    assert all(one["spec"]["maxUnavailable"] == 1 for one in budgets)
    assert not of_kind(rendered(f"replicas={replicas}", "podDisruptionBudget.enabled=false"), "PodDisruptionBudget")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ((), ()),
        (("imagePullSecrets={x}",), ("x",)),
        (("imagePullSecrets[0].name=x", "imagePullSecrets[1]=y", "global.imagePullSecrets={y,z}"), ("y", "z", "x")),
        (("global=null", "imagePullSecrets=null"), ()),
    ],
)
def test_secrets_for_pulling_are_named_once_in_every_pod(settings: tuple[str, ...], names: tuple[str, ...]) -> None:
    objects = rendered(*settings)
    for pod in (of_kind(objects, "Deployment")[0]["spec"]["template"]["spec"], of_kind(objects, "Pod")[0]["spec"]):
        assert pod.get("imagePullSecrets", []) == [{"name": name} for name in names]


@pytest.mark.parametrize(
    ("registry", "repository", "image"),
    [
        ("registry.example.com:5000/mirror", None, "registry.example.com:5000/mirror/octavo-dev/octavo-{}"),
        ("registry.example.com", "a.b:443/c/octavo-{}", "registry.example.com/c/octavo-{}"),
        ("registry.example.com", "localhost/octavo-{}", "registry.example.com/octavo-{}"),
        ("registry.example.com", "mine/octavo-{}", "registry.example.com/mine/octavo-{}"),
        ("registry.example.com", "octavo-{}", "registry.example.com/octavo-{}"),
        ("", "mine/octavo-{}", "mine/octavo-{}"),
    ],
)
def test_one_value_names_the_registry_of_every_image(registry: str, repository: str | None, image: str) -> None:
    parts = {"operator": "image", "server": "engine.image", "router": "router.image"}
    given = [f"{key}.repository={repository.format(part)}" for part, key in parts.items()] if repository else []
    objects = rendered(f"global.imageRegistry={registry}", *given)
    env = {variable["name"]: variable.get("value") for variable in container(objects)["env"]}
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    used = {
        container(objects)["image"],
        of_kind(objects, "Pod")[0]["spec"]["containers"][0]["image"],
        env["OCTAVO_ENGINE_IMAGE"],
        env["OCTAVO_ROUTER_IMAGE"],
    }
    assert used == {f"{image.format(part)}:{version}" for part in parts}


def test_images_are_taken_by_digest() -> None:
    digest = "sha256:" + "0" * 64
    objects = rendered(
        f"image.digest={digest}",
        "image.tag=v1",
        f"engine.image.digest={digest}",
        "engine.image.tag=v1",
        f"router.image.digest={digest}",
    )
    env = {variable["name"]: variable.get("value") for variable in container(objects)["env"]}
    ours = [container(objects)["image"], of_kind(objects, "Pod")[0]["spec"]["containers"][0]["image"]]
    assert ours == [f"ghcr.io/octavo-dev/octavo-operator@{digest}"] * 2
    assert env["OCTAVO_ENGINE_IMAGE"] == f"ghcr.io/octavo-dev/octavo-server@{digest}"
    assert env["OCTAVO_ROUTER_IMAGE"] == f"ghcr.io/octavo-dev/octavo-router@{digest}"
