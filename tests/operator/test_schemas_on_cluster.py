"""kubeconform, strictly, by schemas that the cluster itself publishes: examples, all that the renderers make, and all
that the chart makes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusterrig import binaries
from clusterrig.fixtures import Cluster
from hypothesis import HealthCheck, given, settings
from support import foreign_crds
from support.chart_values import MATRIX, published
from support.llmd import manifest, parsed
from support.llmd_strategies import specs
from support.openapi_schemas import file_name, write_schemas

from octavo_operator.config import OperatorConfig
from octavo_operator.crd import gateway, generate
from octavo_operator.render import render

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
APIS = (
    "api/v1",
    "apis/apps/v1",
    "apis/policy/v1",
    "apis/networking.k8s.io/v1",
    "apis/rbac.authorization.k8s.io/v1",
    "apis/apiextensions.k8s.io/v1",
    "apis/autoscaling/v2",
    "apis/apiregistration.k8s.io/v1",
    "apis/octavo.dev/v1alpha1",
)
Check = Callable[[str], None]
CRDS = {one["metadata"]["name"]: one for one in (generate.manifest(), gateway.manifest())}


@pytest.fixture(scope="module")
def conform(cluster: Cluster, crd: Any, tmp_path_factory: pytest.TempPathFactory) -> Check:
    folder = tmp_path_factory.mktemp("schemas")
    documents = [json.loads(cluster.kubectl("get", "--raw", f"/openapi/v3/{api}")) for api in APIS]
    location = write_schemas(documents, folder)
    for one in foreign_crds.manifests():  # which this cluster need not have
        schema = one["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        name = file_name(one["spec"]["group"], "v1", one["spec"]["names"]["kind"])
        (folder / name).write_text(json.dumps(schema))

    def check(text: str) -> None:
        command = [str(binaries.programs()["kubeconform"]), "-strict", "-summary", "-schema-location", location, "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        assert done.returncode == 0 and "Skipped: 0" in done.stdout, f"{done.stdout}{done.stderr}"

    return check


def test_a_wrong_object_is_found(conform: Check) -> None:
    with pytest.raises(AssertionError, match="speck"):
        conform(json.dumps({**manifest(), "speck": {}}))
    with pytest.raises(AssertionError, match="prot"):
        conform(yaml.safe_dump({"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"port": 80, "prot": "x"}]}}))


def test_examples(conform: Check) -> None:
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        conform(path.read_text())


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(spec=specs)
def test_rendered_objects_match_their_schemas(conform: Check, spec: dict[str, Any]) -> None:
    apis = frozenset(one["spec"]["names"]["kind"] for one in foreign_crds.manifests())
    conform(yaml.safe_dump_all([manifest(**spec), *render(parsed(**spec), OperatorConfig(), apis=apis)]))


@pytest.mark.parametrize("name", MATRIX)
def test_the_chart(conform: Check, helm: Callable[..., str], cluster: Cluster, name: str) -> None:
    flags = [flag for setting in MATRIX[name] for flag in ("--set", setting)]
    text = helm("template", "release", str(published()), "-n", "default", *flags)
    conform(text)
    objects = [one for one in yaml.safe_load_all(text) if one]
    for one in objects:
        if one["kind"] == "CustomResourceDefinition":
            assert one["spec"] == CRDS[one["metadata"]["name"]]["spec"]
        else:
            one["metadata"]["namespace"] = "default"  # any that is there: it is judged, not made
        if one["kind"] == "Pod":
            one["spec"]["serviceAccountName"] = "default"
    objects = [one for one in objects if one["kind"] not in ("CustomResourceDefinition",)]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    done = cluster.try_kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", input=listed)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
