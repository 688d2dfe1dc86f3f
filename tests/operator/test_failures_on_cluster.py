"""What goes wrong in clusters, made to happen for real: each ends in a condition with cause and way out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clusterrig import settings
from clusterrig.fixtures import Cluster, eventually
from support.llmd import toy
from support.timeline import Timeline, timeline

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

IMAGE = settings.TOOLBOX_IMAGE
Degraded = Callable[..., str]
FETCHED = {"uri": "hf://org/name"}


@pytest.fixture(autouse=True)
def recorded(cluster: Cluster, namespace: str, operator: Any) -> Iterator[Timeline]:
    """Every test needs the operator, and a record of what was when."""
    kubectl = [cluster.program, f"--kubeconfig={cluster.kubeconfig}"]
    with timeline(kubectl, namespace) as record:
        yield record


@pytest.fixture
def degraded(cluster: Cluster, namespace: str, recorded: Timeline) -> Callable[..., str]:
    """Waits for the cause; all conditions must agree on it, and it must have been said in time. Returns the message."""

    def wait(reason: str, seconds: float = 30) -> str:
        eventually(lambda: conditions(cluster, namespace)["Degraded"]["reason"] == reason, seconds)
        found = conditions(cluster, namespace)
        assert (found["Degraded"]["status"], found["Ready"]["status"]) == ("True", "False")
        assert found["Ready"]["reason"] == reason
        delay = eventually(lambda: (known := recorded.delay("toy", reason)) is not None and [known], 5)[0]
        print(f"{reason}: said after {delay * 1000:.0f} ms")
        assert delay < 2, f"{reason} was true for {delay:.1f} s before the status said so"
        return str(found["Degraded"]["message"])

    return wait


def conditions(cluster: Cluster, namespace: str, name: str = "toy") -> dict[str, dict[str, Any]]:
    status = cluster.get("llmd", name, namespace=namespace).get("status") or {}
    return {condition["type"]: condition for condition in status.get("conditions") or []}


def recovers(cluster: Cluster, namespace: str) -> None:
    def is_well() -> bool:
        found = conditions(cluster, namespace)
        return found["Ready"]["status"] == "True" and found["Degraded"]["status"] == "False"

    eventually(is_well, 40)


def fetch_ends_with(text: str) -> tuple[dict[str, Any], ...]:
    """The container that fetches the model fails, and this is the last that it says."""
    return (
        {"op": "replace", "path": "/spec/initContainers/0/command", "value": ["/toolbox"]},
        {"op": "replace", "path": "/spec/initContainers/0/args", "value": ["cat", f"/{text}"]},
    )


def test_no_gpu_is_free(cluster: Cluster, namespace: str, degraded: Degraded) -> None:
    cluster.apply(toy(IMAGE, accelerator={"resourceName": "octavo.dev/no-such-gpu"}), namespace=namespace)
    message = degraded("InsufficientGPU")
    assert "no node has enough free octavo.dev/no-such-gpu" in message
    patch = {"spec": {"accelerator": None}}
    cluster.kubectl("patch", "llmd/toy", "-n", namespace, "--type=merge", "-p", json.dumps(patch))
    recovers(cluster, namespace)


def test_no_node_may_take_it(cluster: Cluster, namespace: str, degraded: Degraded) -> None:
    cluster.apply(toy(IMAGE, scheduling={"nodeSelector": {"no": "such"}}), namespace=namespace)
    assert "spec.scheduling" in degraded("Unschedulable")


def test_the_image_cannot_be_pulled(cluster: Cluster, namespace: str, degraded: Degraded) -> None:
    cluster.apply(toy("example.com/none:1"), namespace=namespace)
    assert "engine.image" in degraded("ImagePullBackOff")


def test_a_secret_is_missing_and_then_made(cluster: Cluster, namespace: str, degraded: Degraded) -> None:
    cluster.apply(toy(IMAGE, auth={"apiKeySecretRef": {"name": "keys"}}), namespace=namespace)
    assert "there is no Secret keys" in degraded("SecretNotFound")
    cluster.kubectl("create", "secret", "generic", "keys", "-n", namespace, "--from-literal=other=x")

    def node_says_which_key() -> bool:
        return "couldn't find key apiKey" in json.dumps(cluster.get("pods", namespace=namespace)["items"])

    def says_which_key() -> bool:
        return "Secret keys has no key apiKey" in conditions(cluster, namespace)["Degraded"]["message"]

    eventually(node_says_which_key, 60)  # the node tries again when it sees fit
    eventually(says_which_key, 2)
    data = {"stringData": {"apiKey": "x"}}
    cluster.kubectl("patch", "secret/keys", "-n", namespace, "--type=merge", "-p", json.dumps(data))
    cluster.kubectl("wait", "pods", "--all", "-n", namespace, "--for=condition=Ready", "--timeout=60s", timeout=70)
    recovers(cluster, namespace)


def test_the_engine_crashes(cluster: Cluster, namespace: str, degraded: Degraded) -> None:
    cluster.apply(toy(IMAGE, "cat", "/the-last-words"), namespace=namespace)
    message = degraded("CrashLoop")
    assert "/the-last-words" in message
    assert "exit code 1" in message


def test_the_engine_needs_too_much_memory(cluster: Cluster, namespace: str, degraded: Degraded) -> None:
    spec = toy(IMAGE, "eat", "200", resources={"limits": {"memory": "40Mi"}})
    cluster.apply(spec, namespace=namespace)
    assert "resources.limits.memory" in degraded("OOMKilled")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("error: org/name is gated: 401 Unauthorized", "GatedModel"),
        ("error: 401 Unauthorized: invalid token", "Unauthorized"),
        ("error: there is no such model org/name on the hub", "ModelNotFound"),
        ("error: connection refused", "DownloadFailed"),
    ],
)
def test_the_model_cannot_be_fetched(
    cluster: Cluster, namespace: str, degraded: Degraded, said: str, reason: str
) -> None:
    cluster.apply(toy(IMAGE, model=FETCHED, patches=fetch_ends_with(said)), namespace=namespace)
    message = degraded(reason)
    assert said.partition(": ")[2] in message
    found = conditions(cluster, namespace)["ModelCached"]
    assert (found["status"], found["reason"]) == ("False", reason)


def test_a_patch_does_not_fit_and_the_pods_stay(cluster: Cluster, namespace: str, degraded: Degraded) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    recovers(cluster, namespace)
    bad = ({"op": "remove", "path": "/spec/containers/7"},)
    cluster.apply(toy(IMAGE, patches=bad), namespace=namespace)
    assert "spec.podPatches[2]: remove /spec/containers/7" in degraded("InvalidPodPatch")
    assert conditions(cluster, namespace)["Available"]["status"] == "True", "what ran goes on running"


def test_a_patch_makes_what_the_api_server_refuses(cluster: Cluster, namespace: str, degraded: Degraded) -> None:
    bad = ({"op": "add", "path": "/spec/restartPolicy", "value": "Sometimes"},)
    cluster.apply(toy(IMAGE, patches=bad), namespace=namespace)
    assert "restartPolicy" in degraded("ObjectRejected")


def test_a_patch_raises_privileges_and_no_pod_has_them(cluster: Cluster, namespace: str, degraded: Degraded) -> None:
    bad = ({"op": "add", "path": "/spec/hostNetwork", "value": True},)
    cluster.apply(toy(IMAGE, patches=bad), namespace=namespace)
    assert degraded("PrivilegedPod").startswith("/spec/hostNetwork must not be true")
    assert not cluster.get("deployments", namespace=namespace)["items"]


def test_a_volume_is_none(cluster: Cluster, namespace: str, degraded: Degraded) -> None:
    """Volumes are judged with the Deployment: what it refuses is said, with the path."""
    cluster.apply(toy(IMAGE), namespace=namespace)
    recovers(cluster, namespace)
    wrong = toy(IMAGE, volumes=[{"name": "x", "emptyDir": {"sizeLimit": "much"}}])
    cluster.apply(wrong, namespace=namespace)
    assert "quantities must match" in degraded("ObjectRejected")
    assert conditions(cluster, namespace)["Available"]["status"] == "True"
    cluster.apply(toy(IMAGE, volumes=[{"name": "x", "emptyDir": {"sizeLimits": "1Mi"}}]), namespace=namespace)
    eventually(lambda: "sizeLimits" in conditions(cluster, namespace)["Degraded"]["message"], 30)
    right = toy(
        IMAGE,
        volumes=[{"name": "x", "emptyDir": {"sizeLimit": "1Mi"}}],
        volumeMounts=[{"name": "x", "mountPath": "/x"}],
        podLabels={"team": "a"},
    )
    cluster.apply(right, namespace=namespace)
    recovers(cluster, namespace)
    (pod,) = [
        one
        for one in cluster.get("pods", "-l", "team=a", namespace=namespace)["items"]
        if "deletionTimestamp" not in one["metadata"]
    ]
    assert {"name": "x", "mountPath": "/x"} in pod["spec"]["containers"][0]["volumeMounts"]


def test_the_quota_is_used_up(cluster: Cluster, namespace: str, degraded: Degraded) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    cluster.apply(quota, namespace=namespace)
    cluster.apply(toy(IMAGE), namespace=namespace)
    assert "exceeded quota" in degraded("QuotaExceeded")


def test_the_quota_forbids_a_service_and_nothing_storms(
    cluster: Cluster, namespace: str, degraded: Degraded, operator: Any
) -> None:
    hard = {"services": "0"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": hard}}
    cluster.apply(quota, namespace=namespace)
    eventually(lambda: cluster.get("quota", "none", namespace=namespace)["status"]["hard"], 20)
    since = cluster.audit_log.stat().st_size if cluster.is_rig else 0
    cluster.apply(toy(IMAGE), namespace=namespace)
    assert "exceeded quota" in degraded("QuotaExceeded")
    assert cluster.get("poddisruptionbudget", "toy", namespace=namespace), "the rest is made all the same"
    if cluster.is_rig:
        time.sleep(6)
        with cluster.audit_log.open() as log:
            log.seek(since)
            entries = [json.loads(line) for line in log]
        ours = [e for e in entries if e["user"]["username"] == operator.user]
        here = [e for e in ours if e["objectRef"].get("namespace") == namespace]
        tried = [e for e in here if e["responseStatus"]["code"] == 403]
        assert 2 <= len(tried) <= 6, "again and again, but later and later"
    cluster.kubectl("delete", "quota", "none", "-n", namespace)
    recovers(cluster, namespace)


def test_the_storage_class_does_not_exist(cluster: Cluster, namespace: str, degraded: Degraded) -> None:
    pvc = {"mode": "pvc", "pvc": {"size": "1Mi", "storageClassName": "none-such"}}
    cluster.apply(toy(IMAGE, model={**FETCHED, "cache": pvc}), namespace=namespace)
    assert "storage class" in degraded("PVCPending")


def test_nobody_makes_the_volume(
    cluster: Cluster, namespace: str, degraded: Degraded, request: pytest.FixtureRequest
) -> None:
    """The scheduler has chosen a node and waits, without a word, for a provisioner that does nothing."""
    storage = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": namespace},
        "provisioner": "example.com/none",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    cluster.apply(storage, namespace=namespace)
    request.addfinalizer(lambda: cluster.kubectl("delete", "storageclass", namespace))
    pvc = {"mode": "pvc", "pvc": {"size": "1Mi", "storageClassName": namespace}}
    cluster.apply(toy(IMAGE, model={**FETCHED, "cache": pvc}), namespace=namespace)
    message = degraded("PVCPending", seconds=40)
    assert "toy-model-cache has had no volume" in message


def test_a_claim_does_not_exist(cluster: Cluster, namespace: str, degraded: Degraded) -> None:
    cluster.apply(toy(IMAGE, model={"uri": "pvc://none-such/x"}), namespace=namespace)
    assert "no PersistentVolumeClaim none-such" in degraded("PVCNotFound")


def said(cluster: Cluster, namespace: str, reason: str, seconds: float) -> str:
    """Waits for the cause of Degraded; its message."""
    eventually(lambda: conditions(cluster, namespace)["Degraded"]["reason"] == reason, seconds)
    return str(conditions(cluster, namespace)["Degraded"]["message"])


def test_a_volume_of_a_pod_needs_a_secret_that_is_missing(cluster: Cluster, namespace: str) -> None:
    """The pod hangs in ContainerCreating; its events alone say why."""
    volume = {"name": "more", "secret": {"secretName": "none-such"}}
    patches = (
        {"op": "add", "path": "/spec/volumes/-", "value": volume},
        {"op": "add", "path": "/spec/containers/0/volumeMounts/-", "value": {"name": "more", "mountPath": "/more"}},
    )
    cluster.apply(toy(IMAGE, patches=patches), namespace=namespace)
    assert "there is no Secret none-such" in said(cluster, namespace, "SecretNotFound", 60)
    cluster.kubectl("create", "secret", "generic", "none-such", "-n", namespace)
    eventually(lambda: conditions(cluster, namespace)["Ready"]["status"] == "True", 150, every=2)  # as the node pleases


def test_a_volume_cannot_be_mounted(cluster: Cluster, namespace: str, request: pytest.FixtureRequest) -> None:
    source = {"hostPath": {"path": f"/none/{namespace}", "type": "Directory"}}
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": namespace}
    capacity = {"storage": "1Mi"}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": namespace},
        "spec": {**common, **source, "capacity": capacity},
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models"},
        "spec": {**common, "resources": {"requests": capacity}, "volumeName": namespace},
    }
    cluster.apply(volume, namespace=namespace)
    request.addfinalizer(lambda: cluster.kubectl("delete", "pv", namespace, "--wait=false"))
    cluster.apply(claim, namespace=namespace)
    cluster.apply(toy(IMAGE, model={"uri": "pvc://models/x"}), namespace=namespace)
    assert "is not a directory" in said(cluster, namespace, "VolumeNotMounted", 60)


def test_a_limit_that_nobody_set_is_not_blamed_on_the_spec(
    cluster: Cluster, namespace: str, degraded: Degraded
) -> None:
    limit = {"type": "Container", "default": {"memory": "40Mi"}}
    body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "all"}, "spec": {"limits": [limit]}}
    cluster.apply(body, namespace=namespace)
    cluster.apply(toy(IMAGE, "eat", "200"), namespace=namespace)
    message = degraded("OOMKilled")
    assert "LimitRange" in message and "40Mi" in message


def test_a_webhook_is_down_and_comes_back(
    cluster: Cluster, namespace: str, operator: Any, request: pytest.FixtureRequest
) -> None:
    rule = {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["*"], "resources": ["deployments"]}
    hook = {
        "name": "policy.example.com",
        "rules": [rule],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "clientConfig": {"service": {"namespace": namespace, "name": "none", "path": "/"}},
        "timeoutSeconds": 1,
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
    }
    config = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": namespace},
        "webhooks": [hook],
    }
    cluster.apply(config, namespace=namespace)
    delete = ("delete", "validatingwebhookconfiguration", namespace, "--ignore-not-found")
    request.addfinalizer(lambda: cluster.kubectl(*delete))
    time.sleep(2)  # until the API server knows of it
    cluster.apply(toy(IMAGE), namespace=namespace)
    assert "policy.example.com" in said(cluster, namespace, "WebhookUnavailable", 10)
    events = cluster.get("events", namespace=namespace)["items"]
    assert "WebhookUnavailable" in [one["reason"] for one in events]
    time.sleep(3)
    assert conditions(cluster, namespace)["Degraded"]["reason"] == "WebhookUnavailable", "it lasts"
    cluster.kubectl(*delete)
    recovers(cluster, namespace)


def test_a_claim_that_cannot_grow_says_so_and_the_old_size_can_be_put_back(
    cluster: Cluster, namespace: str, degraded: Degraded, request: pytest.FixtureRequest
) -> None:
    storage = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": namespace}}
    cluster.apply({**storage, "provisioner": "example.com/none", "allowVolumeExpansion": False}, namespace=namespace)
    request.addfinalizer(lambda: cluster.kubectl("delete", "storageclass", namespace))
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": namespace},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": namespace,
            "capacity": {"storage": "1Gi"},
            "hostPath": {"path": f"/tmp/{namespace}", "type": "DirectoryOrCreate"},
        },
    }
    cluster.apply(volume, namespace=namespace)
    request.addfinalizer(lambda: cluster.kubectl("delete", "pv", namespace, "--wait=false"))

    def model(size: str) -> dict[str, Any]:
        cache = {"mode": "pvc", "pvc": {"size": size, "storageClassName": namespace}}
        fetched = ({"op": "remove", "path": "/spec/initContainers"},)
        return toy(IMAGE, model={**FETCHED, "cache": cache}, patches=fetched)

    cluster.apply(model("1Gi"), namespace=namespace)
    recovers(cluster, namespace)
    cluster.apply(model("2Gi"), namespace=namespace)
    assert "allowVolumeExpansion" in degraded("PVCCannotGrow")
    assert conditions(cluster, namespace)["Available"]["status"] == "True"
    cluster.apply(model("1Gi"), namespace=namespace)
    recovers(cluster, namespace)


@pytest.mark.parametrize("patience", [0, 2])
def test_a_rollout_goes_on_where_every_gpu_is_taken(
    cluster: Cluster, namespace: str, patience: int, fake_nodes: Callable[..., None]
) -> None:
    product = f"SCARCE-{namespace}"
    fake_nodes(gpus=1, product=product)
    spec: dict[str, Any] = {
        "accelerator": {"count": 1},
        "scheduling": {
            "nodeSelector": {"nvidia.com/gpu.product": product},
            "tolerations": [{"operator": "Exists"}],
        },
        "rollout": {"surgePatienceSeconds": patience},
        "model": {"uri": "file:///m"},
    }
    cluster.apply(toy(IMAGE, **spec), namespace=namespace)
    recovers(cluster, namespace)
    cluster.apply(toy(IMAGE, **{**spec, "engine": {"env": [{"name": "CHANGED", "value": "1"}]}}), namespace=namespace)

    def done() -> bool:
        generation = cluster.get("llmd", "toy", namespace=namespace)["metadata"]["generation"]
        found = conditions(cluster, namespace)
        progress = found["Progressing"]
        return progress["reason"] == "Complete" and progress["observedGeneration"] == generation == 2

    eventually(done, 40)
    recovers(cluster, namespace)
    expected = {"maxSurge": 1, "maxUnavailable": 0} if patience else {"maxSurge": 0, "maxUnavailable": 1}

    def strategy() -> Any:
        return cluster.get("deployment", "toy", namespace=namespace)["spec"]["strategy"]["rollingUpdate"]

    eventually(lambda: strategy() == expected, 5)
    told = [event["reason"] for event in cluster.get("events", namespace=namespace)["items"]]
    assert told.count("StoppingOldPods") == (1 if patience else 0)
