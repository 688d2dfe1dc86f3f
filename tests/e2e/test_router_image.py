"""The router's image in a pod: Envoy with the operator's configuration, as any user, on a read-only root."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from clusterrig.fixtures import Cluster

from octavo_operator.render.router.envoy import Endpoint, Pool, RouterSpec, files

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PORTS = RouterSpec()


def objects(image: str, user: int) -> list[dict[str, Any]]:
    made = files(PORTS, Pool("toy", (Endpoint("127.0.0.1", 9, 9),)))
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "router"}, "data": made}
    hardened = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
    container = {
        "name": "envoy",
        "image": image,
        "securityContext": hardened,
        "volumeMounts": [{"name": "config", "mountPath": PORTS.directory}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": PORTS.metrics_port}, "periodSeconds": 1},
        "resources": {"limits": {"memory": "128Mi"}},
    }
    ids = {"runAsUser": user, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {
        "containers": [container],
        "securityContext": ids,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 2,
        "volumes": [{"name": "config", "configMap": {"name": "router"}}],
    }
    return [config, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "router"}, "spec": spec}]


@pytest.mark.parametrize("user", [65532, 1000680000], ids=["own", "openshift"])
def test_envoy_serves_in_a_restricted_pod(
    cluster: Cluster, namespace: str, image_names: dict[str, str], user: int
) -> None:
    if "router" not in image_names or not cluster.is_rig:
        pytest.skip("needs the rig: the pod is asked by its address")
    cluster.apply(*objects(image_names["router"], user), namespace=namespace)
    cluster.kubectl("wait", "-n", namespace, "--for=condition=Ready", "pod/router", "--timeout=45s")
    address = cluster.get("pod", "router", namespace=namespace)["status"]["podIP"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://{address}:{PORTS.port}/v1/completions", b'{"prompt": "anybody?"}', timeout=20)
    assert json.load(refused.value)["error"]["code"] == "service_unavailable"
    code = (
        "import os, importlib.util as u, octavo_router.__main__\n"  # the picker
        "print(os.getuid(), u.find_spec('torch'), os.access('/opt', os.W_OK))"
    )
    assert cluster.kubectl("exec", "-n", namespace, "router", "--", "python", "-c", code) == f"{user} None False\n"
