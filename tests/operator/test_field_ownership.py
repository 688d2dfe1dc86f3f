"""Which fields belong to other managers, from managedFields."""

from __future__ import annotations

from typing import Any

import pytest

from octavo_operator.kube.field_ownership import foreign_additions, is_allowed


def owned(manager: str, fields: dict[str, Any], operation: str = "Update", subresource: str = "") -> dict[str, Any]:
    return {"manager": manager, "operation": operation, "subresource": subresource, "fieldsV1": {"f:spec": fields}}


def test_fields_added_by_others_are_found_unless_they_may_touch_them() -> None:
    engine = 'k:{"name":"engine"}'
    live = {
        "metadata": {
            "managedFields": [
                owned("us", {"f:replicas": {}, "f:list": {engine: {".": {}, "f:name": {}, "f:image": {}}}}, "Apply"),
                owned("hpa", {"f:replicas": {}}, subresource="scale"),
                owned("edit", {"f:paused": {}, "f:list": {engine: {"f:tty": {}}, 'k:{"name":"more"}': {".": {}}}}),
                owned("restart", {"f:template": {"f:metadata": {"f:annotations": {"f:restartedAt": {}}}}}),
                owned("us", {"f:schedulerName": {}, "f:list": {'k:{"name":"left"}': {".": {}, "f:name": {}}}}),
                owned("gone", {"f:vanished": {}}),
            ]
        },
        "spec": {
            "replicas": 1,
            "paused": True,
            "schedulerName": "x",
            "list": [{"name": "engine", "image": "i", "tty": True}, {"name": "more"}, {"name": "left"}],
            "template": {"metadata": {"annotations": {"restartedAt": "now"}}},
        },
    }
    assert foreign_additions(live, "us") == ["/spec/paused", "/spec/list/2", "/spec/list/1", "/spec/list/0/tty"]


ENV = "/spec/template/spec/containers/engine/env"


@pytest.mark.parametrize(
    ("pointer", "path", "alone"),
    [
        ("/spec/loadBalancerIP", "/spec/loadBalancerIP", True),
        ("/spec/loadBalancerIP", "/spec/loadBalancer", False),
        ("/spec/loadBalancerIP", "/spec/load*", True),
        ("/spec/template/spec/containers/0/env/1", f"{ENV}/STAKATER_*", True),
        ("/spec/template/spec/containers/0/env/1", f"{ENV}", True),
        ("/spec/template/spec/containers/0/env/1", "/spec/template/spec/containers/*/env/STAKATER_KEYS", True),
        ("/spec/template/spec/containers/0/env/1", "/spec/template/spec/containers/0/env/1", True),
        ("/spec/template/spec/containers/0/env/0", f"{ENV}/STAKATER_*", False),
        ("/spec/template/spec/containers/0/env", f"{ENV}/STAKATER_*", False),
        ("/spec/template/spec/nodeSelector/a.b~1c", "/spec/template/spec/nodeSelector/a.b~1c", True),
    ],
)
def test_allowed_additions_of_others_are_found_by_path(pointer: str, path: str, alone: bool) -> None:
    env = [{"name": "HOME"}, {"name": "STAKATER_KEYS"}]
    pod = {"containers": [{"name": "engine", "env": env}], "nodeSelector": {"a.b/c": "x"}}
    live = {"spec": {"loadBalancerIP": "10.0.0.9", "template": {"spec": pod}}}
    assert is_allowed(pointer, live, ["/spec/other", path]) is alone
