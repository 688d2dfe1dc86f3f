"""Values that cannot work are refused by the chart's schema, whatever a dry run would say; those that can are taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

SCHEMA = json.loads((Path(__file__).parents[2] / "charts/octavo/values.schema.json").read_text())
VALIDATOR = jsonschema_rs.validator_for(SCHEMA)
ENV = {"fieldRef": {"fieldPath": "c"}}
TERM = "affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms"


def values(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split("|") if "|" in path else path.split("/")):
        value = {name: value}
    return dict(value)


def terms(**requirement: Any) -> list[Any]:
    return [{"matchExpressions": [{"key": "a", **requirement}]}]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("resources/requests/cpu", "much"),
        ("resources/limits/memory", "1GB"),
        ("resources/limits/memory", "-1Gi"),
        ("resources/limits/memory", -1),
        ("resources/limits/memory", ""),
        ("resources/requests/a b", 1),
        ("defaults/resourcesByAccelerator/cpu/requests/memory", "4 Gi"),
        ("image/repository", "Registry.example.com/Octavo"),
        ("image/repository", "registry.example.com/octavo:1.0"),
        ("engine/image/repository", "https://registry.example.com/x"),
        ("router/image/repository", "a b"),
        ("image/repository", "a@sha256:0"),
        ("image/repository", ""),
        ("image/tag", "a/b"),
        ("image/tag", "v 1"),
        ("router/image/tag", "sha256:abc"),
        ("engine/image/tag", "-1"),
        ("defaults/images/cpu", "registry/Engine CPU:1"),
        ("defaults/images/a b", "registry/engine:1"),
        ("selector", "tier in canary"),
        ("selector", "tier=canary,,"),
        ("selector", "=canary"),
        ("selector", "tier=a b"),
        ("selector", "tier in (a"),
        ("selector", "!"),
        ("selector", "-a"),
        ("selector", "a/b/c=d"),
        ("imagePullSecrets", ["My_Secret"]),
        ("engine/imagePullSecrets", [""]),
        ("imagePullSecrets", [{"name": "a", "namespace": "b"}]),
        ("engine/imagePullSecrets", [{}]),
        ("global/imagePullSecrets", ["A"]),
        ("global/imageRegistry", "https://registry.example.com"),
        ("global/imageRegistry", "registry.example.com/"),
        ("global/imageRegistry", "registry.example.com/octavo:1"),
        ("nodeSelector/a", "b c"),
        ("nodeSelector/a", "x" * 64),
        ("defaults/scheduling/nodeSelector/-a", "b"),
        ("podLabels/-a", "b"),
        ("commonLabels/a", "-b"),
        ("podAnnotations/a b", "c"),
        ("monitoring/podMonitor/labels/a", "b c"),
        ("monitoring/rules/alertLabels/a-b", "c"),
        ("monitoring/podMonitor/interval", "0s"),
        ("monitoring/dashboards/namespace", "A"),
        ("serviceAccount/name", "Mine"),
        ("serviceAccount/annotations/a b", "c"),
        ("fullnameOverride", "My_Octavo"),
        ("nameOverride", "-x"),
        ("priorityClassName", "High"),
        ("defaults/scheduling/runtimeClassName", "a_b"),
        ("defaults/scheduling/schedulerName", "A"),
        ("clusterDomain", "cluster.local."),
        ("clusterDomain", "a b"),
        ("extraEnv", [{"name": "1A"}]),
        ("extraEnv", [{"name": "A", "value": "b", "valueFrom": ENV}]),
        ("extraEnv", [{"name": "A", "valueFrom": {}}]),
        ("tolerations", [{"operator": "Exists", "key": "a", "value": "b"}]),
        ("tolerations", [{"key": "a b"}]),
        ("tolerations", [{"operator": "Equal", "value": "b"}]),
        ("tolerations", [{}]),
        ("tolerations", [{"key": "a", "tolerationSeconds": 5}]),
        (TERM, terms(operator="In")),
        (TERM, terms(operator="In", values=[])),
        (TERM, terms(operator="Exists", values=["a"])),
        (TERM, terms(operator="Gt", values=["a"])),
        (TERM, terms(operator="Gt", values=["1", "2"])),
        ("topologySpreadConstraints", [{"maxSkew": 1, "topologyKey": "", "whenUnsatisfiable": "ScheduleAnyway"}]),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_its_field(path: str, value: Any) -> None:
    errors = list(VALIDATOR.iter_errors(values(path, value)))
    assert errors
    field = path.partition("/")[0]
    assert all(str(next(iter(one.instance_path), "")) == field for one in errors), "the message says where"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("resources/requests/cpu", 0.5),
        ("resources/requests/cpu", "500m"),
        ("resources/limits/memory", "1e9"),
        ("resources/limits/memory", 1073741824),
        ("resources/limits/memory", "0.5Gi"),
        ("resources/limits/hugepages-2Mi", "4Mi"),
        ("resources|limits|example.com/a", "1"),
        ("image/repository", "localhost:5000/a"),
        ("image/repository", "octavo"),
        ("image/repository", "10.0.0.1:443/a/b_c/d--e.f"),
        ("image/tag", "1.0.0-rc.1_x"),
        ("image/tag", ""),
        ("defaults|images|nvidia.com/gpu", "registry:5000/a/b:1"),
        ("defaults/images/cpu", "a/b@sha256:" + "0" * 64),
        ("selector", ""),
        ("selector", "tier=canary,!old"),
        ("selector", "tier in (a, b),team notin (c)"),
        ("selector", "example.com/tier!=a"),
        ("selector", "tier"),
        ("selector", "tier==a"),
        ("selector", "tier=, team = a"),
        ("podLabels|example.com/a", "B_c.d"),
        ("nodeSelector/a", ""),
        ("podAnnotations/a", "any text: 1"),
        ("imagePullSecrets", ["a.b-c", {"name": "d"}]),
        ("global/imagePullSecrets", [{"name": "a"}]),
        ("global/imageRegistry", "registry.example.com:5000/a/b"),
        ("global/imageRegistry", ""),
        ("global/of a chart that has this one", {"a": 1}),
        ("priorityClassName", "system-cluster-critical"),
        ("priorityClassName", ""),
        ("extraEnv", [{"name": "A"}]),
        ("extraEnv", [{"name": "A", "valueFrom": ENV}]),
        ("tolerations", [{"operator": "Exists"}]),
        ("tolerations", [{"key": "a", "effect": "NoSchedule"}]),
        (TERM, terms(operator="Gt", values=["5"])),
        (TERM, terms(operator="DoesNotExist")),
    ],
)
def test_a_value_that_kubernetes_takes_is_taken(path: str, value: Any) -> None:
    assert [one.message for one in VALIDATOR.iter_errors(values(path, value))] == []
