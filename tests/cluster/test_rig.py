"""The rig can be believed: pods run, are limited, resolved, routed, scheduled and scaled for real."""

from __future__ import annotations

import http.server
import json
import os
import signal
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusterrig import binaries, settings
from clusterrig import cluster as rig
from clusterrig.fixtures import Cluster, eventually, run_rig

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TOOLBOX = settings.TOOLBOX_IMAGE  # is in every rig
Manifest = dict[str, Any]
GPU = "nvidia.com/gpu"


@pytest.fixture(autouse=True)
def only_on_the_rig(cluster: Cluster) -> None:
    if not cluster.is_rig:
        pytest.skip("these tests judge the rig itself")


def pod(name: str, *args: str, image: str = TOOLBOX, spec: dict[str, Any] | None = None, **container: Any) -> Manifest:
    """A pod of one container that the restricted profile admits."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
    main = {"name": "main", "image": image, "args": list(args), "securityContext": security, **container}
    rest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 2,
        "securityContext": {"runAsNonRoot": True, "fsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        **(spec or {}),
    }
    metadata = {"name": name, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [main], **rest}}


def phase(cluster: Cluster, name: str, namespace: str) -> str:
    return str(cluster.get("pod", name, namespace=namespace)["status"]["phase"])


def wait_ready(cluster: Cluster, what: str, namespace: str) -> None:
    cluster.kubectl("wait", "-n", namespace, "--for=condition=Ready", what, "--timeout=30s")


def service(name: str, app: str, port: int) -> dict[str, Any]:
    spec = {"selector": {"app": app}, "ports": [{"port": 80, "targetPort": port}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def test_the_node_is_ready_and_runs_what_go_mod_says(cluster: Cluster) -> None:
    status = cluster.get("node", settings.NODE_NAME)["status"]
    conditions = {condition["type"]: condition["status"] for condition in status["conditions"]}
    version = json.loads(cluster.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"]
    assert conditions["Ready"] == "True"
    assert status["nodeInfo"]["kubeletVersion"] == version
    assert f"{binaries.KUBERNETES} {version}\n" in (settings.GO_SOURCES / "go.mod").read_text()


def test_pod_security_is_enforced(cluster: Cluster, namespace: str) -> None:
    done = cluster.try_kubectl("run", "-n", namespace, "bare", f"--image={TOOLBOX}")
    assert done.returncode
    assert "violates PodSecurity" in done.stderr


@pytest.mark.alone  # it counts what comes to the registry
def test_a_built_image_answers_by_service_name_and_from_the_machine(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    (tmp_path / "toolbox").write_bytes(binaries.programs()["toolbox"].read_bytes())
    (tmp_path / "toolbox").chmod(0o755)
    (tmp_path / "version").write_text(namespace)
    dockerfile = 'FROM scratch\nCOPY toolbox /\nCOPY version /\nUSER 65532\nENTRYPOINT ["/toolbox"]\n'
    (tmp_path / "Dockerfile").write_text(dockerfile)
    image = f"octavo.dev/hello:{namespace}"
    run_rig("build", image, str(tmp_path))
    run_rig("load-image", image)
    stored = registry_blobs()

    probe = {"httpGet": {"port": 8080, "path": "/"}, "periodSeconds": 1}
    serving = pod("hello", "serve", ":8080", image=image, readinessProbe=probe)
    cluster.apply(serving, service("greeting", "hello", 8080), namespace=namespace)
    wait_ready(cluster, "pod/hello", namespace)
    address = cluster.get("service", "greeting", namespace=namespace)["spec"]["clusterIP"]

    def answer() -> bytes:
        return bytes(urllib.request.urlopen(f"http://{address}", timeout=2).read())

    assert eventually(answer) == b"hello\n"
    in_pod = ("exec", "-n", namespace, "hello", "--", "/toolbox")
    assert cluster.kubectl(*in_pod, "resolve", "greeting").split() == [address]
    assert cluster.kubectl(*in_pod, "resolve", f"greeting.{namespace}.svc.cluster.local").split() == [address]
    assert cluster.kubectl(*in_pod, "get", f"http://greeting.{namespace}") == "hello\n"
    assert cluster.kubectl(*in_pod, "cat", "/version") == namespace
    assert "Seccomp:\t2" in cluster.kubectl(*in_pod, "cat", "/proc/self/status")
    assert cluster.try_kubectl(*in_pod, "write", "/file", "x").returncode, "its root file system must be read-only"
    assert cluster.try_kubectl(*in_pod, "resolve", "example.com").returncode, "pods have no way out"

    (tmp_path / "version").write_text(f"{namespace} changed")
    run_rig("build", image, str(tmp_path))
    run_rig("load-image", image)
    assert len(registry_blobs() - stored) == 3, "only the changed layer, configuration and manifest move"


def registry_blobs() -> set[str]:
    return {path.parent.name for path in settings.cache().glob("registry/docker/registry/v2/blobs/*/*/*/data")}


def test_an_image_that_is_nowhere_fails_at_once(cluster: Cluster, namespace: str) -> None:
    cluster.apply(pod("nowhere", image="docker.io/octavo/nowhere:1"), namespace=namespace)

    def refused() -> bool:
        status = cluster.get("pod", "nowhere", namespace=namespace)["status"]
        waiting = status["containerStatuses"][0]["state"]["waiting"]
        return waiting["reason"] in ("ErrImagePull", "ImagePullBackOff") and "not found" in waiting["message"]

    eventually(refused, 10)


def test_memory_limits_kill(cluster: Cluster, namespace: str) -> None:
    cluster.apply(pod("hungry", "eat", "300", resources={"limits": {"memory": "64Mi"}}), namespace=namespace)

    def killed() -> dict[str, Any]:
        status = cluster.get("pod", "hungry", namespace=namespace)["status"]["containerStatuses"][0]
        return dict(status["state"]["terminated"])

    ended = eventually(killed)
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)


def test_gpus_are_counted_on_fake_nodes(cluster: Cluster, namespace: str) -> None:
    run_rig("fake-nodes", "1", "--gpus=8")
    on_fake_nodes = {
        "nodeSelector": {"type": "kwok", "kubernetes.io/hostname": "gpu-node-0"},
        "tolerations": [{"key": GPU, "operator": "Exists"}],
    }
    one = {"limits": {GPU: "1"}}
    names = [f"model-{number}" for number in range(9)]
    cluster.apply(*(pod(name, resources=one, spec=on_fake_nodes) for name in names), namespace=namespace)

    def phases() -> list[str]:
        return sorted(item["status"]["phase"] for item in cluster.get("pods", namespace=namespace)["items"])

    eventually(lambda: phases() == ["Pending"] + ["Running"] * 8)
    (waiting,) = (p for p in cluster.get("pods", namespace=namespace)["items"] if p["status"]["phase"] == "Pending")
    assert f"Insufficient {GPU}" in waiting["status"]["conditions"][0]["message"]


def test_the_real_node_can_claim_gpus(cluster: Cluster, namespace: str) -> None:
    run_rig("gpus", "2")
    cluster.apply(pod("pair", "pause", resources={"limits": {GPU: "2"}}), namespace=namespace)
    wait_ready(cluster, "pod/pair", namespace)
    cluster.kubectl("delete", "pod", "pair", "-n", namespace, "--timeout=30s")
    run_rig("gpus", "0")


def test_a_claim_gets_a_volume_that_outlives_its_pod(cluster: Cluster, namespace: str) -> None:
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    volume = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}
    mounts = [{"name": "data", "mountPath": "/data"}]
    cluster.apply(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"}, "spec": claim},
        pod("writer", "write", "/data/file", "kept", spec=volume, volumeMounts=mounts),
        namespace=namespace,
    )
    eventually(lambda: phase(cluster, "writer", namespace) == "Succeeded")
    cluster.kubectl("delete", "pod", "writer", "-n", namespace)
    cluster.apply(pod("reader", "cat", "/data/file", spec=volume, volumeMounts=mounts), namespace=namespace)
    eventually(lambda: phase(cluster, "reader", namespace) == "Succeeded")
    assert cluster.kubectl("logs", "-n", namespace, "reader") == "kept"

    bound = cluster.get("pvc", "data", namespace=namespace)["spec"]["volumeName"]
    path = cluster.get("pv", bound)["spec"]["local"]["path"]
    cluster.kubectl("delete", "pod/reader", "pvc/data", "-n", namespace)
    eventually(lambda: not Path(path).exists())


class ExternalMetrics(http.server.BaseHTTPRequestHandler):
    """An API server of one metric: a queue of 30."""

    def do_GET(self) -> None:
        group = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "external.metrics.k8s.io/v1beta1"}
        resource = {"name": "queue", "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
        value = {"metricName": "queue", "metricLabels": {}, "timestamp": "2030-01-01T00:00:00Z", "value": "30"}
        values = {"kind": "ExternalMetricValueList", "apiVersion": group["groupVersion"], "items": [value]}
        path = self.path.partition("?")[0]
        known = path == "/apis/external.metrics.k8s.io/v1beta1" or path.endswith("/queue")
        body = json.dumps(values if path.endswith("/queue") else {**group, "resources": [resource]}).encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def external_metrics(cluster: Cluster, namespace: str) -> Iterator[None]:
    """external.metrics.k8s.io, served by this process to the API server, which proves itself by its front-proxy key."""
    pki = settings.default_places().pki
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pki / "kubelet-serving.crt", pki / "kubelet-serving.key")
    tls.load_verify_locations(pki / "front-ca.crt")
    tls.verify_mode = ssl.CERT_REQUIRED
    server = http.server.ThreadingHTTPServer((settings.HOST_IP, 0), ExternalMetrics)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    target = {"type": "ExternalName", "externalName": settings.HOST_IP, "ports": [{"port": port}]}
    api = {
        "group": "external.metrics.k8s.io",
        "version": "v1beta1",
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "insecureSkipTLSVerify": True,
        "service": {"name": "metrics", "namespace": namespace, "port": port},
    }
    name = "v1beta1.external.metrics.k8s.io"
    cluster.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "metrics"}, "spec": target},
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": name}, "spec": api},
        namespace=namespace,
    )
    cluster.kubectl("wait", "--for=condition=Available", f"apiservice/{name}", "--timeout=30s")
    yield
    cluster.kubectl("delete", "apiservice", name)
    server.shutdown()


@pytest.mark.usefixtures("external_metrics")
def test_an_autoscaler_follows_an_aggregated_metric(cluster: Cluster, namespace: str) -> None:
    app = pod("app", "pause", spec={"restartPolicy": "Always"})
    template = {"metadata": app["metadata"], "spec": app["spec"]}
    metric = {
        "type": "External",
        "external": {"metric": {"name": "queue"}, "target": {"type": "AverageValue", "averageValue": "10"}},
    }
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "app"}
    cluster.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "app"},
            "spec": {"selector": {"matchLabels": {"app": "app"}}, "template": template},
        },
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "app"},
            "spec": {"scaleTargetRef": target, "maxReplicas": 5, "metrics": [metric]},
        },
        namespace=namespace,
    )
    eventually(lambda: cluster.get("deployment", "app", namespace=namespace)["status"].get("readyReplicas") == 3)


@pytest.mark.alone
def test_a_daemon_that_dies_comes_back(cluster: Cluster, namespace: str) -> None:
    before = rig.daemon_pid("kube-scheduler")
    os.kill(before, signal.SIGKILL)
    cluster.apply(pod("later", "pause"), namespace=namespace)
    wait_ready(cluster, "pod/later", namespace)
    assert rig.daemon_pid("kube-scheduler") != before


def test_the_audit_log_names_who_wrote_what(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("create", "configmap", "written", "-n", namespace)
    cluster.kubectl("get", "configmap", "written", "-n", namespace)
    entries = [json.loads(line) for line in cluster.audit_log.read_text().splitlines()]
    ours = [entry for entry in entries if entry.get("objectRef", {}).get("name") == "written"]
    assert [(entry["verb"], entry["user"]["username"]) for entry in ours] == [("create", "admin")]


def test_a_namespace_with_a_pod_in_it_goes(cluster: Cluster, namespace: str) -> None:
    cluster.apply(pod("last", "pause"), namespace=namespace)
    wait_ready(cluster, "pod/last", namespace)
    cluster.kubectl("delete", "namespace", namespace, "--timeout=40s")
    cluster.kubectl("create", "namespace", namespace)  # for the fixture to remove


def test_programs_are_links_to_one_binary() -> None:
    done = subprocess.run([binaries.programs()["kubectl"], "apply", "--version"], capture_output=True, text=True)
    assert "unknown flag" in done.stderr, "flags of the other programs must not leak in"
