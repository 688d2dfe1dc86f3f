"""The operator's judgement of privileges beside that of Kubernetes' own Pod Security Admission."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from clusterrig.fixtures import Cluster
from support.escalations import ESCALATIONS, OF_ACCOUNTS
from support.llmd import parsed

from octavo_operator.config import OperatorConfig
from octavo_operator.render import expected_template

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ALLOWING = dataclasses.replace(OperatorConfig(), allow_privileged_pods=True)


def test_refusals_are_those_of_pod_security_admission(cluster: Cluster, namespace: str) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "toy"}}
    cluster.apply(account, {**account, "metadata": {"name": "ci-admin"}}, namespace=namespace)
    pods = []
    for index, (spec, _) in enumerate([({}, ""), *ESCALATIONS.values()]):
        template: dict[str, Any] = expected_template(parsed(**spec), ALLOWING)
        meta = {**template["metadata"], "name": f"pod-{index}"}
        pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]})
    listed = {"apiVersion": "v1", "kind": "List", "items": pods}
    done = cluster.try_kubectl(
        "create", "--dry-run=server", "-n", namespace, "-o", "name", "-f", "-", input=json.dumps(listed)
    )
    taken = {int(number) for number in re.findall(r"^pod/pod-(\d+)$", done.stdout, re.MULTILINE)}
    by_name = dict(enumerate(["none", *ESCALATIONS]))
    assert {by_name[index] for index in taken} == {"none", *OF_ACCOUNTS}, done.stderr
