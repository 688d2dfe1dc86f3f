"""Every object that the renderers make is one that a real API server takes, strictly, under restricted Pod Security."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from clusterrig.fixtures import Cluster
from hypothesis import HealthCheck, given, settings
from support.llmd import manifest, parsed
from support.llmd_strategies import specs

from octavo_operator.config import OperatorConfig
from octavo_operator.render import render

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(spec=specs)
def test_specs_and_what_they_are_rendered_to_are_taken(
    cluster: Cluster, namespace: str, operator_kubeconfig: Any, spec: dict[str, Any]
) -> None:
    objects = [manifest("toy", namespace, **spec), *render(parsed("toy", namespace, **spec), OperatorConfig())]
    pod = next(one for one in objects if one["kind"] == "Deployment")["spec"]["template"]
    if "priorityClassName" not in pod["spec"] and "runtimeClassName" not in pod["spec"]:  # those must exist for pods
        objects.append({"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {**pod["metadata"], "name": "pod"}})
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "toy"}}
        cluster.apply(account, namespace=namespace)
    listed = {"apiVersion": "v1", "kind": "List", "items": objects}
    arguments = (
        "apply",
        "--dry-run=server",
        "--validate=strict",
        "-n",
        namespace,
    )
    done = cluster.try_kubectl(*arguments, "-f", "-", input=json.dumps(listed))
    assert done.returncode == 0, f"{done.stderr}\n{yaml.safe_dump(spec)}"
    assert "Warning" not in done.stderr, done.stderr
