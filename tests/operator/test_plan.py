"""Plans: what is up to date is not written, and an upgrade of the operator replaces no pods."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from support.llmd import FULL, parsed
from support.llmd_strategies import specs
from support.worlds import world

from octavo_operator.api.resources import Shm
from octavo_operator.config import OperatorConfig
from octavo_operator.defaults import Defaults
from octavo_operator.deployment.reconcile import reconcile
from octavo_operator.diff import digest
from octavo_operator.kube.resources import IMAGE_VOLUMES
from octavo_operator.kube.store import Observed
from octavo_operator.render import expected_template, render
from octavo_operator.writes.plan import (
    Apply,
    RemoveForeignFields,
    compute_plan,
    pinned_template,
    pod_spec_digest,
    recorded_image,
    template_annotation,
    with_digest,
)

CONFIG = OperatorConfig(engine_image="example.com/engine:1", management_namespaces=("monitoring",))
APIS = frozenset({"PodMonitor", "ServiceMonitor", IMAGE_VOLUMES})


def deployment_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    return next(manifest for manifest in manifests if manifest["kind"] == "Deployment")


def as_live(manifest: dict[str, Any]) -> Observed:
    """As it comes back from the API server, defaults left out."""
    body = json.loads(json.dumps(manifest))
    body["metadata"] |= {"uid": f"uid-{manifest['kind']}", "resourceVersion": "1", "generation": 1}
    return Observed.of(manifest["kind"], manifest["apiVersion"], body)


@given(specs)
def test_an_applied_object_is_not_applied_again(spec: dict[str, Any]) -> None:
    deployment = parsed(**spec)
    first = reconcile(deployment, world(apis=APIS), CONFIG)
    applied = [action.manifest for action in first.plan.actions if isinstance(action, Apply)]
    assert len(applied) == len(first.plan.actions)
    second = reconcile(deployment, world([as_live(manifest) for manifest in applied], now=1.0, apis=APIS), CONFIG)
    assert second.plan.actions == []
    assert second.plan.conflicts == []


@given(specs, specs)
def test_pods_change_by_the_spec_alone_never_by_the_operator(one: dict[str, Any], other: dict[str, Any]) -> None:
    before = parsed(**one)
    template = expected_template(before, CONFIG)
    live = {"metadata": {"annotations": template_annotation(before, template)}}
    defaults = Defaults.parse('{"images": {"cpu": "other:1"}, "scheduling": {"nodeSelector": {"a": "b"}}}')
    newer = dataclasses.replace(
        CONFIG, engine_image="example.com/engine:2", image_pull_secrets=("new",), defaults=defaults
    )
    assert pinned_template(before, live) == template
    after = reconcile(before, world(apis=APIS), newer)
    assert deployment_of([a.manifest for a in after.plan.actions])["spec"]["template"] == expected_template(
        before, newer
    )
    changed = parsed(**other)
    if pod_spec_digest(changed) != pod_spec_digest(before):
        assert pinned_template(changed, live) is None


def test_a_forged_record_of_the_template_is_not_believed() -> None:
    deployment = parsed()
    annotation = template_annotation(deployment, expected_template(deployment, CONFIG))
    record = json.loads(annotation["octavo.dev/pod-template"])
    record["template"]["spec"]["containers"][0]["image"] = "evil"
    forged = {"metadata": {"annotations": {"octavo.dev/pod-template": json.dumps(record)}}}
    assert pinned_template(deployment, forged) is None
    assert pinned_template(deployment, {"metadata": {"annotations": {"octavo.dev/pod-template": "[]"}}}) is None


@pytest.mark.parametrize(
    "field", ["replicas", "service", "monitoring", "networkPolicy", "podDisruptionBudget", "rollout", "suspend"]
)
def test_fields_that_are_not_about_pods_replace_none(field: str) -> None:
    values: dict[str, Any] = {"replicas": 4, "suspend": True, "service": {"port": 81}, "rollout": {"type": "Recreate"}}
    changed = parsed(**{field: values.get(field, {"enabled": False})})
    assert pod_spec_digest(changed) == pod_spec_digest(parsed())
    assert expected_template(changed, CONFIG) == expected_template(parsed(), CONFIG)


def test_a_child_that_is_no_longer_wanted_goes_but_not_one_of_others() -> None:
    deployment = parsed()
    wanted = render(deployment, CONFIG)
    extra = as_live({**wanted[0], "metadata": {**wanted[0]["metadata"], "name": "old"}})
    foreign = as_live({**wanted[0], "metadata": {**wanted[0]["metadata"], "name": "theirs", "ownerReferences": []}})
    todo = compute_plan(deployment, wanted, [extra, foreign])
    deleted = [action.target.name for action in todo.actions if not isinstance(action, Apply)]
    assert deleted == ["old"]


def stored(template: Any, deployment: Any) -> dict[str, Any]:
    """The Deployment, with what is recorded of a template."""
    return {"metadata": {"annotations": template_annotation(deployment, template)}, "spec": {}}


def test_a_default_that_changes_replaces_no_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server stores the defaults of the day with every object."""
    explicit = {"shm": {"size": "256Mi"}}
    size = next(field for field in dataclasses.fields(Shm) if field.name == "size")
    before, live = pod_spec_digest(parsed(**explicit)), stored(expected_template(parsed(), CONFIG), parsed())
    monkeypatch.setattr(size, "default", "1Gi")
    assert pod_spec_digest(parsed(**explicit)) == before
    assert pinned_template(parsed(**explicit), live)
    # Stored by a version that did not know the field: the default of today appears, and nobody has written it.
    assert pinned_template(parsed(shm={"size": "1Gi"}), live)
    written = dataclasses.replace(parsed(shm={"size": "1Gi"}), generation=2)
    assert pinned_template(written, live) is None, "somebody did"
    assert pinned_template(dataclasses.replace(parsed(shm={"size": "1Gi"}), uid="another"), live) is None


def test_templates_of_the_operators_first_versions_are_kept() -> None:
    """As 0.1 recorded them: the hash of a spec with these fields must never be another one."""
    full = parsed(**{**FULL, "accelerator": {"count": 2}})
    assert pod_spec_digest(full) == "39c033e53123991b"
    assert pod_spec_digest(parsed()) == "31a3c233cf3bcbcb"
    template = {"metadata": {}, "spec": {"containers": [{"name": "engine", "image": "old:1"}]}}
    record = json.dumps({"spec": pod_spec_digest(parsed()), "digest": digest(template), "template": template})
    live = {"metadata": {"annotations": {"octavo.dev/pod-template": record}}, "spec": {"template": template}}
    assert pinned_template(parsed(), live) == template
    assert recorded_image(live) == "old:1"


def test_only_what_the_spec_allows_is_left_of_what_others_add() -> None:
    made = [with_digest(one) for one in render(parsed(), CONFIG)]

    def edited(kind: str, **fields: Any) -> Observed:
        one = next(manifest for manifest in made if manifest["kind"] == kind)
        live = as_live({**one, "spec": {**one["spec"], **fields}})
        return dataclasses.replace(live, foreign=tuple(f"/spec/{name}" for name in fields))

    added = edited("Service", loadBalancerIP="10.0.0.9", externalIPs=["10.0.0.8"])
    paused = edited("Deployment", paused=True)

    def left(**spec: Any) -> dict[str, set[str]]:
        """What is still there of it, by kind, where something is put right."""
        todo = compute_plan(parsed(**spec), made, [added, paused])
        ours = {"loadBalancerIP", "externalIPs", "paused"}
        return {one.target.kind: ours & set(one.spec) for one in todo.actions if isinstance(one, RemoveForeignFields)}

    both = [{"kind": "Service", "path": "/spec/loadBalancerIP"}, {"kind": "Deployment", "path": "/spec/paused"}]
    assert left() == {"Service": set(), "Deployment": set()}
    assert left(foreignFields=both) == {"Service": {"loadBalancerIP"}}
    assert left(foreignFields=[{"kind": "Deployment", "path": "/spec/*"}]) == {"Service": set()}
