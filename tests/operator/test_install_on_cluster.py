"""The chart with the operator's real image, in the cluster: installed, tested, upgraded, frozen, removed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusterrig import settings
from clusterrig.fixtures import Cluster, eventually, run_rig
from support.chart_values import published
from support.llmd import SESSION, toy

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
IMAGE = settings.TOOLBOX_IMAGE
((LABEL, NUMBER),) = SESSION.items()
REPOSITORY = "octavo.dev/test/octavo-operator"
Helm = Callable[..., str]


@pytest.fixture(scope="module")
def image(cluster: Cluster) -> str:
    """Of this very tree; only its last layer is new."""
    if not cluster.is_rig:
        pytest.skip("images can be given to the rig only")
    run_rig("build", f"{REPOSITORY}:{NUMBER}", str(ROOT), "--target", "operator")
    run_rig("load-image", f"{REPOSITORY}:{NUMBER}")
    return REPOSITORY


@pytest.fixture
def installed(
    cluster: Cluster, namespace: str, helm: Helm, crd: Any, image: str, request: pytest.FixtureRequest
) -> Iterator[Callable[..., None]]:
    """Installs or upgrades the chart in the test's namespace, with these values; the session's operator rests."""
    request.getfixturevalue("_operator").kill()

    def install(*values: str) -> None:
        fixed = (
            f"image.repository={image}",
            f"image.tag={NUMBER}",
            f"selector={LABEL}={NUMBER}",
            "crd.install=false",
            f"watchNamespaces={{{namespace}}}",
            "leaseSeconds=3",
            f"fullnameOverride=op-{NUMBER}",
        )
        # A tag may be of digits alone, which is still no number.
        flags = [
            flag for value in (*fixed, *values) for flag in ("--set-string" if ".tag=" in value else "--set", value)
        ]
        chart = str(published())
        helm("upgrade", "--install", "op", chart, "-n", namespace, *flags, "--wait", "--timeout=90s")

    install()
    yield install
    if "op" in helm("list", "-n", namespace, "-q").split():
        helm("uninstall", "op", "-n", namespace, "--wait", "--timeout=60s")


def pods(cluster: Cluster, namespace: str) -> set[str]:
    items = cluster.get("pods", "-l", "octavo.dev/llmdeployment", namespace=namespace)["items"]
    return {item["metadata"]["uid"] for item in items}


def operator_pod(cluster: Cluster, namespace: str) -> dict[str, Any]:
    found = cluster.get("pods", "-l", "app.kubernetes.io/component=operator", namespace=namespace)["items"]
    (pod,) = [one for one in found if "deletionTimestamp" not in one["metadata"]]
    return dict(pod)


def is_ready(cluster: Cluster, namespace: str, name: str = "toy") -> None:
    cluster.kubectl("wait", "--for=condition=Ready", f"llmd/{name}", "-n", namespace, "--timeout=60s", timeout=70)


@pytest.mark.smoke
def test_a_life_of_the_chart(cluster: Cluster, namespace: str, installed: Callable[..., None], helm: Helm) -> None:
    said = helm("test", "op", "-n", namespace, "--timeout=60s", "--logs")
    assert f"op-{NUMBER}" in said and "is the leader and serves 0 LLMDeployments" in said

    spec = toy(IMAGE)
    del spec["spec"]["engine"]["image"]
    installed("engine.image.repository=octavo.dev/rig/toolbox", f"engine.image.tag={IMAGE.rpartition(':')[2]}")
    cluster.apply(spec, namespace=namespace)
    is_ready(cluster, namespace)
    before = pods(cluster, namespace)

    installed("engine.image.repository=octavo.dev/rig/another", "log.format=json")
    cluster.kubectl("delete", "service", "toy", "-n", namespace)
    eventually(lambda: cluster.get("service", "toy", namespace=namespace), 60)
    assert pods(cluster, namespace) == before, "an upgrade of the operator replaces no pod of a model"

    helm("uninstall", "op", "-n", namespace, "--wait", "--timeout=60s")
    assert pods(cluster, namespace) == before, "what is served goes on being served"
    cluster.kubectl("delete", "llmd", "toy", "-n", namespace, "--timeout=50s")


def test_an_operator_that_hangs_is_started_anew(
    cluster: Cluster, namespace: str, installed: Callable[..., None]
) -> None:
    name = f"op-{NUMBER}"
    quick = {"periodSeconds": 1, "failureThreshold": 2, "timeoutSeconds": 1}
    patch = [
        {"op": "add", "path": "/spec/template/spec/containers/0/livenessProbe/" + k, "value": v}
        for k, v in quick.items()
    ]
    cluster.kubectl("patch", "deployment", name, "-n", namespace, "--type=json", "-p", json.dumps(patch))
    cluster.kubectl("rollout", "status", f"deployment/{name}", "-n", namespace, "--timeout=60s", timeout=70)
    pod = operator_pod(cluster, namespace)["metadata"]["name"]
    os.kill(process_of(pod), signal.SIGSTOP)

    def restarted() -> bool:
        status = operator_pod(cluster, namespace)["status"]["containerStatuses"][0]
        return status["restartCount"] == 1 and status["ready"]

    eventually(restarted, 60)
    cluster.apply(toy(IMAGE), namespace=namespace)
    is_ready(cluster, namespace)


def process_of(pod: str) -> int:
    """The operator's process, as this machine numbers it."""
    for entry in Path("/proc").iterdir():
        try:
            ours = entry.name.isdigit() and b"octavo_operator" in (entry / "cmdline").read_bytes()
            if ours and f"POD_NAME={pod}\0".encode() in (entry / "environ").read_bytes():
                return int(entry.name)
        except OSError:
            continue
    raise LookupError(pod)


KINDS = ("llmdeployments.octavo.dev", "llmgateways.octavo.dev")


@pytest.mark.alone
def test_the_kind_stays_when_the_chart_goes_and_is_upgraded_with_it(
    cluster: Cluster, namespace: str, helm: Helm, crd: Callable[[], None], operator: Any, alone: None
) -> None:
    kind = KINDS[0]
    chart = [str(ROOT / "charts/octavo"), "-n", namespace, "--set", "replicas=0"]
    cluster.kubectl("delete", "crd", *KINDS, "--timeout=60s")
    try:
        helm("install", "op", *chart)
        crd_now = cluster.get("crd", kind)
        assert crd_now["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
        cluster.kubectl("wait", "--for=condition=Established", f"crd/{kind}", "--timeout=20s")
        cluster.apply(toy(IMAGE, replicas=0), namespace=namespace)
        helm("uninstall", "op", "-n", namespace, "--wait")
        assert cluster.get("llmd", "toy", namespace=namespace), "nobody's models go with a chart"
        helm("install", "op", *chart)
        helm("upgrade", "op", *chart, "--set", "commonLabels.new=label")
        assert cluster.get("crd", kind)["metadata"]["labels"]["new"] == "label"
        helm("upgrade", "op", *chart, "--set", "crd.keep=false")
        helm("uninstall", "op", "-n", namespace, "--wait")
        for one in KINDS:
            eventually(lambda one=one: cluster.try_kubectl("get", "crd", one).returncode != 0, 20)
    finally:
        crd()


@pytest.mark.alone
def test_two_releases_live_side_by_side(
    cluster: Cluster, namespace: str, helm: Helm, crd: Callable[[], None], operator: Any, alone: None
) -> None:
    """Of one name, in two namespaces. The kind is the first one's, until that is gone."""
    kind, other = KINDS[0], f"{namespace}-b"
    chart, fixed = str(ROOT / "charts/octavo"), ["--set", "replicas=0"]

    def owner() -> str:
        return str(cluster.get("crd", kind)["metadata"]["annotations"]["meta.helm.sh/release-namespace"])

    cluster.kubectl("create", "namespace", other)
    cluster.kubectl("delete", "crd", *KINDS, "--timeout=60s")
    try:
        for where in (namespace, other):
            helm("install", "op", chart, "-n", where, *fixed)
        helm("upgrade", "op", chart, "-n", other, *fixed)
        assert owner() == namespace
        helm("uninstall", "op", "-n", other, "--wait")
        assert owner() == namespace
        helm("upgrade", "op", chart, "-n", namespace, *fixed)
        # A third that finds the kind and no operator of its release takes it over, if it is told to.
        helm("uninstall", "op", "-n", namespace, "--wait")
        helm("install", "op", chart, "-n", other, *fixed, "--take-ownership")
        assert owner() == other
        helm("uninstall", "op", "-n", other, "--wait")
    finally:
        cluster.kubectl("delete", "namespace", other, "--wait=false")
        crd()
