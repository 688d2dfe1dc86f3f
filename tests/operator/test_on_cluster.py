"""What the operator promises, judged by a real Kubernetes: children appear, come back, follow the spec, and go."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

import pytest
import yaml
from clusterrig import settings
from clusterrig.fixtures import Cluster, eventually
from support.llmd import toy

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

IMAGE = settings.TOOLBOX_IMAGE
CHILDREN = ("serviceaccount", "networkpolicy", "service", "deployment", "poddisruptionbudget")


@pytest.fixture(autouse=True)
def _running(operator: Any) -> None:
    """Every test needs the operator."""


def condition(cluster: Cluster, namespace: str, kind: str = "Ready", name: str = "toy") -> dict[str, Any]:
    status = cluster.get("llmd", name, namespace=namespace).get("status") or {}
    found = {c["type"]: c for c in status.get("conditions") or []}
    return found.get(kind) or {}


def wait_for(
    cluster: Cluster, namespace: str, reason: str, kind: str = "Ready", seconds: float = 30, name: str = "toy"
) -> str:
    """Until a condition has this reason; returns its message."""
    eventually(lambda: condition(cluster, namespace, kind, name).get("reason") == reason, seconds)
    return str(condition(cluster, namespace, kind, name)["message"])


def ready(cluster: Cluster, namespace: str, name: str = "toy") -> None:
    generation = cluster.get("llmd", name, namespace=namespace)["metadata"]["generation"]

    def is_ready() -> bool:
        found = condition(cluster, namespace, name=name)
        return found.get("status") == "True" and found["observedGeneration"] == generation

    eventually(is_ready, 40)


def patch(cluster: Cluster, namespace: str, what: str, change: Any, kind: str = "merge") -> None:
    cluster.kubectl("patch", what, "-n", namespace, f"--type={kind}", "-p", json.dumps(change))


def container(cluster: Cluster, namespace: str) -> dict[str, Any]:
    spec = cluster.get("deployment", "toy", namespace=namespace)["spec"]["template"]["spec"]
    return dict(spec["containers"][0])


def pods(cluster: Cluster, namespace: str) -> set[str]:
    items = cluster.get("pods", namespace=namespace)["items"]
    return {item["metadata"]["uid"] for item in items if "deletionTimestamp" not in item["metadata"]}


def test_ten_lines_become_a_service_that_answers(cluster: Cluster, namespace: str) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    ready(cluster, namespace)
    status = cluster.get("llmd", "toy", namespace=namespace)["status"]
    assert status["url"] == f"http://toy.{namespace}.svc.cluster.local/v1"
    assert (status["replicas"], status["readyReplicas"], status["image"]) == (1, 1, IMAGE)
    table = cluster.kubectl("get", "llmd", "-n", namespace).splitlines()
    assert table[0].split() == ["NAME", "MODEL", "READY", "REASON", "REPLICAS", "DESIRED", "URL", "AGE"]
    assert table[1].split()[:6] == ["toy", "file:///model", "True", "Ready", "1", "1"]
    events = cluster.get("events", namespace=namespace)["items"]
    ours = [event["reason"] for event in events if event["involvedObject"]["kind"] == "LLMDeployment"]
    assert ours == ["Ready"], "events tell of transitions only"


def test_deleted_children_come_back_within_two_seconds(cluster: Cluster, namespace: str) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    ready(cluster, namespace)
    before = {kind: cluster.get(kind, "toy", namespace=namespace)["metadata"]["uid"] for kind in CHILDREN}
    for kind in CHILDREN:
        cluster.kubectl("delete", kind, "toy", "-n", namespace, "--wait=false")

    def all_back() -> bool:
        return all(
            cluster.get(kind, "toy", namespace=namespace)["metadata"]["uid"] != before[kind] for kind in CHILDREN
        )

    eventually(all_back, 6)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("service/toy", {"spec": {"ports": [{"name": "http", "port": 81, "targetPort": "http"}]}}),
        ("deployment/toy", {"spec": {"replicas": 3}}),
        ("deployment/toy", {"spec": {"paused": True}}),
        ("deployment/toy", {"spec": {"template": {"spec": {"nodeSelector": {"foreign": "yes"}}}}}),
        ("poddisruptionbudget/toy", {"spec": {"maxUnavailable": 5}}),
        ("networkpolicy/toy", {"spec": {"egress": [], "policyTypes": ["Ingress", "Egress"]}}),
    ],
    ids=["value", "replicas", "added-field", "added-map-entry", "budget", "policy"],
)
def test_changes_by_others_in_specs_are_reverted(
    cluster: Cluster, namespace: str, what: str, change: dict[str, Any]
) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    ready(cluster, namespace)
    kind, name = what.split("/")
    before = cluster.get(kind, name, namespace=namespace)["spec"]
    patch(cluster, namespace, what, change)
    eventually(lambda: cluster.get(kind, name, namespace=namespace)["spec"] == before, 8)


def test_containers_variables_and_volumes_of_others_are_taken_out(cluster: Cluster, namespace: str) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    ready(cluster, namespace)
    before = cluster.get("deployment", "toy", namespace=namespace)["spec"]
    additions = {
        "containers": [
            {"name": "engine", "env": [{"name": "EVIL", "value": "1"}]},
            {"name": "sidecar", "image": IMAGE, "command": ["/toolbox", "pause"]},
        ],
        "volumes": [{"name": "more", "emptyDir": {}}],
    }
    patch(cluster, namespace, "deployment/toy", {"spec": {"template": {"spec": additions}}}, "strategic")
    eventually(lambda: cluster.get("deployment", "toy", namespace=namespace)["spec"] == before, 8)


def test_additions_that_the_spec_allows_stay_and_no_others(cluster: Cluster, namespace: str) -> None:
    """kube-vip writes an address, Reloader a variable, `kubectl rollout pause` a switch."""
    env = "/spec/template/spec/containers/engine/env"
    allowed = [
        {"kind": "Service", "path": "/spec/loadBalancerIP"},
        {"kind": "Deployment", "path": f"{env}/STAKATER_*"},
        {"kind": "Deployment", "path": "/spec/paused"},
    ]
    cluster.apply(toy(IMAGE, service={"type": "LoadBalancer"}, foreignFields=allowed), namespace=namespace)
    ready(cluster, namespace)
    address = {"loadBalancerIP": "10.0.0.9", "externalIPs": ["10.0.0.8"]}
    patch(cluster, namespace, "service/toy", {"spec": address})
    cluster.kubectl("rollout", "pause", "deployment/toy", "-n", namespace)
    variables = [{"name": "STAKATER_KEYS", "value": "1"}, {"name": "EVIL", "value": "1"}]
    added = {"template": {"spec": {"containers": [{"name": "engine", "env": variables}]}}}
    patch(cluster, namespace, "deployment/toy", {"spec": added}, "strategic")

    def names() -> set[str]:
        spec = cluster.get("deployment", "toy", namespace=namespace)["spec"]
        assert spec["paused"] is True
        return {one["name"] for one in spec["template"]["spec"]["containers"][0]["env"]}

    def others_are_gone() -> bool:
        return "externalIPs" not in cluster.get("service", "toy", namespace=namespace)["spec"] and "EVIL" not in names()

    eventually(others_are_gone, 8)
    version = cluster.get("deployment", "toy", namespace=namespace)["metadata"]["resourceVersion"]
    time.sleep(2)
    assert "STAKATER_KEYS" in names()
    assert cluster.get("service", "toy", namespace=namespace)["spec"]["loadBalancerIP"] == "10.0.0.9"
    assert cluster.get("deployment", "toy", namespace=namespace)["metadata"]["resourceVersion"] == version, "no end"


def test_a_service_is_never_without_its_pods_while_its_selector_is_put_back(cluster: Cluster, namespace: str) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    ready(cluster, namespace)
    before = cluster.get("service", "toy", namespace=namespace)["spec"]["selector"]
    watch = [cluster.program, f"--kubeconfig={cluster.kubeconfig}", "get", "service", "toy", "-n", namespace]
    watch += ["--watch", "-o", "jsonpath={.spec.selector}{'\\n'}"]
    with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        seen = [json.loads(process.stdout.readline())]
        for change in ({"version": "2"}, {"octavo.dev/llmdeployment": "another"}, {"octavo.dev/llmdeployment": None}):
            patch(cluster, namespace, "service/toy", {"spec": {"selector": change}})
            while seen[-1] == before:
                seen.append(json.loads(process.stdout.readline()))
            while seen[-1] != before:
                seen.append(json.loads(process.stdout.readline() or "null"))
        process.kill()
    assert all(seen), "it selected nothing for a moment"


def test_an_edit_that_is_put_back_is_called_no_refusal(cluster: Cluster, namespace: str) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    ready(cluster, namespace)
    before = cluster.get("deployment", "toy", namespace=namespace)["spec"]
    for number in range(3):
        engine = {"name": "engine", "image": f"example.com/other:{number}", "env": [{"name": "MORE", "value": "1"}]}
        patch(
            cluster,
            namespace,
            "deployment/toy",
            {"spec": {"template": {"spec": {"containers": [engine]}}}},
            "strategic",
        )
        eventually(lambda: cluster.get("deployment", "toy", namespace=namespace)["spec"] == before, 8)
    ready(cluster, namespace)
    events = cluster.get("events", namespace=namespace)["items"]
    ours = [one["reason"] for one in events if one["involvedObject"]["kind"] == "LLMDeployment"]
    assert not {"ObjectRejected", "FieldConflict"} & set(ours)
    # On a busy machine a pod of the edit may have been started: then its image could not be pulled for a while.
    assert "Recovered" not in ours or "ImagePullBackOff" in ours


def test_a_second_release_over_the_same_models_says_so_and_writes_nothing(
    cluster: Cluster, namespace: str, operator: Any, second: Any
) -> None:
    """Autoscaled: its NetworkPolicy names the operator's namespace, so two of them would rewrite it for ever."""
    second.start()
    cluster.apply(toy(IMAGE, autoscaling={"maxReplicas": 2}), namespace=namespace)
    ready(cluster, namespace)

    def served_by() -> str:
        return str(cluster.get("llmd", "toy", namespace=namespace)["status"]["operator"])

    winner, loser = sorted((operator, second), key=lambda one: one.claim != served_by())
    eventually(lambda: "ignores it" in loser.log(), 10)
    time.sleep(2)
    told = [one["reason"] for one in cluster.get("events", namespace=namespace)["items"]]
    assert told.count("ManagedByAnotherOperator") == 1
    if cluster.is_rig:
        theirs = writes(cluster, 0, loser.user, namespace, but_for=409)  # to claim it at the same time is a conflict
        assert [one for one in theirs if "/events" not in one] == []
        assert len([one for one in writes(cluster, 0, winner.user, namespace) if "networkpolicies" in one]) <= 2
    winner.kill()
    cluster.kubectl(
        "delete", "lease", winner.environment["OCTAVO_LEASE_NAME"], "-n", winner.environment["POD_NAMESPACE"]
    )
    patch(cluster, namespace, "llmd/toy", {"spec": {"service": {"port": 81}}})
    eventually(lambda: cluster.get("service", "toy", namespace=namespace)["spec"]["ports"][0]["port"] == 81, 30)
    assert served_by() == loser.claim
    assert "taken over" in loser.log()
    cluster.kubectl("delete", "llmd", "toy", "-n", namespace, "--timeout=20s")


def test_labels_and_annotations_are_everybodys(cluster: Cluster, namespace: str) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    ready(cluster, namespace)
    old = pods(cluster, namespace)
    cluster.kubectl("annotate", "deployment/toy", "-n", namespace, "their/note=x")
    cluster.kubectl("label", "service/toy", "-n", namespace, "their=label", "octavo.dev/llmdeployment-")
    cluster.kubectl("rollout", "restart", "deployment/toy", "-n", namespace)
    eventually(lambda: (found := pods(cluster, namespace)) and not found & old, 30)
    ready(cluster, namespace)
    assert cluster.get("deployment", "toy", namespace=namespace)["metadata"]["annotations"]["their/note"] == "x"
    labels = cluster.get("service", "toy", namespace=namespace)["metadata"]["labels"]
    assert labels["their"] == "label"
    assert labels["octavo.dev/llmdeployment"] == "toy", "the label that we find it by comes back"


def test_removed_parts_of_a_spec_are_pruned(cluster: Cluster, namespace: str) -> None:
    cluster.apply(toy(IMAGE, scheduling={"nodeSelector": {"kubernetes.io/os": "linux"}}), namespace=namespace)
    ready(cluster, namespace)
    cluster.apply(
        toy(IMAGE, networkPolicy={"enabled": False}, podDisruptionBudget={"enabled": False}), namespace=namespace
    )

    def pruned() -> bool:
        template = cluster.get("deployment", "toy", namespace=namespace)["spec"]["template"]["spec"]
        left = cluster.kubectl("get", "networkpolicy,poddisruptionbudget", "-n", namespace, "-o", "name")
        return "nodeSelector" not in template and not left

    eventually(pruned, 8)


def test_an_operator_that_was_killed_catches_up(cluster: Cluster, namespace: str, operator: Any) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    ready(cluster, namespace)
    operator.kill()
    patch(cluster, namespace, "llmd/toy", {"spec": {"replicas": 2}})
    cluster.kubectl("delete", "service", "toy", "-n", namespace)
    cluster.apply(toy(IMAGE, name="second"), namespace=namespace)
    operator.start()
    ready(cluster, namespace)
    ready(cluster, namespace, "second")
    assert cluster.get("deployment", "toy", namespace=namespace)["spec"]["replicas"] == 2
    assert cluster.get("service", "toy", namespace=namespace)


def writes(cluster: Cluster, since: int, user: str, namespace: str, but_for: int = 0) -> list[str]:
    """What the operator wrote in a namespace; `but_for`: an answer of the API server that does not count."""
    out = []
    with cluster.audit_log.open() as log:
        log.seek(since)
        for line in log:
            entry = json.loads(line)
            ours = entry["user"]["username"] == user and entry["objectRef"].get("namespace") == namespace
            ours = ours and entry["responseStatus"]["code"] != but_for
            if ours and entry["verb"] in ("create", "update", "patch", "delete"):
                out.append(f"{entry['verb']} {entry['requestURI']}")
    return out


def test_nothing_is_written_when_nothing_changes_nor_by_a_restart(
    cluster: Cluster, namespace: str, operator: Any
) -> None:
    if not cluster.is_rig:
        pytest.skip("needs the audit log of the rig")
    cluster.apply(toy(IMAGE, service={"annotations": {"a": "b"}}, shm={"size": "1024Mi"}), namespace=namespace)
    routing = {"strategy": "prefix", "prefix": {"resources": {"limits": {"cpu": "1000m"}}}}
    cluster.apply(toy(IMAGE, name="routed", suspend=True, routing=routing), namespace=namespace)
    ready(cluster, namespace)
    wait_for(cluster, namespace, "Suspended", "RouterReady", name="routed")
    for kind in ("deployment", "configmap", "networkpolicy", "poddisruptionbudget"):
        assert cluster.get(kind, "routed-router", namespace=namespace)
    time.sleep(1)
    since = cluster.audit_log.stat().st_size
    operator.restart(OCTAVO_RESYNC_SECONDS="1")
    time.sleep(5)
    assert writes(cluster, since, operator.user, namespace) == []
    operator.restart()


def test_another_operator_version_rolls_no_pod_but_a_change_of_the_spec_does(
    cluster: Cluster, namespace: str, operator: Any
) -> None:
    spec = toy(IMAGE)
    del spec["spec"]["engine"]["image"]
    operator.restart(OCTAVO_ENGINE_IMAGE=IMAGE)
    cluster.apply(spec, namespace=namespace)
    ready(cluster, namespace)
    before = pods(cluster, namespace)
    operator.restart(OCTAVO_ENGINE_IMAGE="example.com/another:1", OCTAVO_IMAGE_PULL_SECRETS="more")
    patch(cluster, namespace, "deployment/toy", {"spec": {"replicas": 2}})  # it does look
    eventually(lambda: cluster.get("deployment", "toy", namespace=namespace)["spec"]["replicas"] == 1, 8)
    time.sleep(1)
    assert before <= pods(cluster, namespace)
    assert container(cluster, namespace)["image"] == IMAGE
    patch(cluster, namespace, "llmd/toy", {"spec": {"engine": {"maxNumSeqs": 7}}})
    eventually(lambda: container(cluster, namespace)["image"] == "example.com/another:1", 8)
    operator.restart()


def test_two_operators_never_work_together(cluster: Cluster, namespace: str, operator: Any, tmp_path: Any) -> None:
    second = type(operator)(operator.log_file.parent / "kubeconfig", tmp_path, "two")
    second.start()
    try:
        cluster.apply(toy(IMAGE), namespace=namespace)
        ready(cluster, namespace)
        assert "created" not in second.log()
        operator.kill()
        patch(cluster, namespace, "llmd/toy", {"spec": {"replicas": 2}})
        ready(cluster, namespace)
        assert "is the leader" in second.log()
        before = len(operator.log())
        operator.start()
        time.sleep(2)
        assert "is the leader" not in operator.log()[before:]
        assert second.stop() == 0
        cluster.kubectl("delete", "service", "toy", "-n", namespace)
        eventually(lambda: cluster.get("service", "toy", namespace=namespace), 8)
    finally:
        second.kill()


def test_a_kubeconfig_with_a_log_in_program_works_beyond_its_tokens_end(
    cluster: Cluster, namespace: str, operator: Any, tmp_path: Any
) -> None:
    """As clouds have it: `exec` gives a token that is good for seconds, for the watches of kopf, too."""
    path = operator.log_file.parent / "kubeconfig"
    config = yaml.safe_load(path.read_text())
    (tmp_path / "token").write_text(config["users"][0]["user"]["token"])
    script = tmp_path / "log-in"
    script.write_text(f"""#!/bin/sh
        echo >> {tmp_path}/runs
        end=$(date -u -d '+8 seconds' +%Y-%m-%dT%H:%M:%SZ)
        cat <<END
        {{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
          "status": {{"expirationTimestamp": "$end", "token": "$(cat {tmp_path}/token)"}}}}
END
""")
    script.chmod(0o755)
    log_in = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(script), "interactiveMode": "Never"}
    config["users"][0]["user"] = {"exec": log_in}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    operator.kill()
    second = type(operator)(tmp_path / "kubeconfig", tmp_path, "two")
    second.start()
    try:
        cluster.apply(toy(IMAGE), namespace=namespace)
        ready(cluster, namespace)
        time.sleep(10)
        cluster.kubectl("delete", "service", "toy", "-n", namespace)
        eventually(lambda: cluster.get("service", "toy", namespace=namespace), 8)
        assert len((tmp_path / "runs").read_text().splitlines()) in range(2, 8)
        assert second.stop() == 0
    finally:
        second.kill()


def test_scale_writes_replicas_and_tells_autoscalers_the_selector(cluster: Cluster, namespace: str) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    ready(cluster, namespace)
    cluster.kubectl("scale", "llmd/toy", "-n", namespace, "--replicas=3")
    ready(cluster, namespace)
    url = f"/apis/octavo.dev/v1alpha1/namespaces/{namespace}/llmdeployments/toy/scale"
    scale = json.loads(cluster.kubectl("get", "--raw", url))
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (3, 3)
    selected = cluster.kubectl("get", "pods", "-n", namespace, "-l", scale["status"]["selector"], "-o", "name")
    assert len(selected.split()) == 3
    patch(cluster, namespace, "llmd/toy", {"spec": {"suspend": True}})
    wait_for(cluster, namespace, "Suspended")
    eventually(lambda: not pods(cluster, namespace), 20)


def test_a_name_that_is_taken_is_left_alone(cluster: Cluster, namespace: str) -> None:
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "toy"}, "spec": {"ports": [{"port": 99}]}}
    cluster.apply(theirs, namespace=namespace)
    cluster.apply(toy(IMAGE), namespace=namespace)
    message = wait_for(cluster, namespace, "NameConflict")
    assert "Service toy exists and is not managed by this" in message
    assert cluster.get("service", "toy", namespace=namespace)["spec"]["ports"][0]["port"] == 99
    cluster.kubectl("delete", "service", "toy", "-n", namespace)
    ready(cluster, namespace)


def test_a_retained_cache_survives_its_owner_and_is_found_again(cluster: Cluster, namespace: str) -> None:
    cache = {"mode": "pvc", "pvc": {"size": "10Mi", "storageClassName": "none-such", "retain": True}}
    deployment = toy(IMAGE, model={"uri": "smollm2-135m-instruct", "cache": cache}, replicas=0)
    cluster.apply(deployment, namespace=namespace)
    claim = eventually(lambda: cluster.get("pvc", "toy-model-cache", namespace=namespace), 8)
    cluster.kubectl("delete", "llmd", "toy", "-n", namespace, "--timeout=20s")
    eventually(lambda: not cluster.get("deployments", namespace=namespace)["items"], 20)
    assert cluster.get("pvc", "toy-model-cache", namespace=namespace)["metadata"]["uid"] == claim["metadata"]["uid"]
    cluster.apply(deployment, namespace=namespace)
    eventually(lambda: cluster.get("deployment", "toy", namespace=namespace), 8)
    assert condition(cluster, namespace, "Degraded").get("status") != "True"
    patch(cluster, namespace, "llmd/toy", {"spec": {"model": {"cache": {"pvc": {"retain": False}}}}})
    eventually(lambda: cluster.get("pvc", "toy-model-cache", namespace=namespace)["metadata"].get("ownerReferences"), 8)


def test_deleting_a_namespace_does_not_wait_for_the_operator(cluster: Cluster, namespace: str, operator: Any) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    ready(cluster, namespace)
    operator.kill()
    cluster.kubectl("delete", "llmd", "toy", "-n", namespace, "--timeout=10s")
    operator.start()


def test_a_crashing_pod_that_is_not_the_engine_is_left_out(cluster: Cluster, namespace: str) -> None:
    """It has the LLMDeployment's label, as whatever stands in front of the engine would."""
    cluster.apply(toy(IMAGE), namespace=namespace)
    ready(cluster, namespace)
    labels = {"octavo.dev/llmdeployment": "toy", "app.kubernetes.io/component": "router"}
    context = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "c",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/toolbox", "cat", "/none"],
        "securityContext": context,
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other", "labels": labels}}
    cluster.apply({**pod, "spec": {"containers": [container]}}, namespace=namespace)

    def crashes() -> bool:
        states = cluster.get("pod", "other", namespace=namespace)["status"].get("containerStatuses") or [{}]
        return "BackOff" in str(states[0].get("state"))

    eventually(crashes, 60)
    patch(cluster, namespace, "llmd/toy", {"spec": {"service": {"port": 81}}})  # it is looked at once more
    ready(cluster, namespace)
    assert condition(cluster, namespace, "Degraded")["reason"] == "AsExpected"
    selector = cluster.get("llmd", "toy", namespace=namespace)["status"]["selector"]
    found = cluster.get("pods", "-l", selector, namespace=namespace)["items"]
    assert len(found) == 1, "/scale counts the engine's pods"
