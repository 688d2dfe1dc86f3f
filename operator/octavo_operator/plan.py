"""From what should exist and what does to what is to be done. Pure.

Nothing is written that is there already, nothing is touched that is not ours, and what is no longer wanted goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo_operator.api import GROUP, KIND, LLMDeployment, to_json
from octavo_operator.diff import digest, first_difference
from octavo_operator.render.names import OWNER_LABEL
from octavo_operator.store import Observed

Manifest = dict[str, Any]

CREATED, CHANGED = "created", "changed"  # why something is applied, besides what others altered
APPLIED = f"{GROUP}/applied"  # annotation: hash of what was applied last
TEMPLATE = f"{GROUP}/pod-template"  # annotation of the Deployment: the pod template, and the spec that it was made for
CHILD_KINDS = (
    "ServiceAccount", "PersistentVolumeClaim", "NetworkPolicy", "Service", "Deployment", "PodDisruptionBudget",
    "HorizontalPodAutoscaler", "PodMonitor", "ServiceMonitor", "ScaledObject",
)  # fmt: skip
_POD_FIELDS = (
    "model",
    "engine",
    "accelerator",
    "resources",
    "shm",
    "scheduling",
    "lifecycle",
    "probes",
    "auth",
    "podPatches",
)


@dataclass(frozen=True)
class Apply:
    """Server-side apply of a whole object. `why`: created, changed, or what others had altered."""

    manifest: Manifest
    why: str
    exists: bool


@dataclass(frozen=True)
class TakeOut:
    """Removal of what others added to a spec of ours."""

    target: Observed
    pointers: tuple[str, ...]
    manifest: Manifest  # what it should be


@dataclass(frozen=True)
class Delete:
    target: Observed


@dataclass(frozen=True)
class Plan:
    actions: list[Apply | TakeOut | Delete] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)  # objects of our names that belong to somebody else
    waits: bool = False  # for the children of a predecessor of the same name to be gone

    @property
    def changes_pods(self) -> bool:
        """Whether the Deployment has yet to be told of the spec of today. What others alter in it does not count: a
        webhook may do so at every write, and what we said was taken all the same."""
        return any(
            isinstance(action, Apply) and action.manifest["kind"] == "Deployment" and action.why in (CREATED, CHANGED)
            for action in self.actions
        )


def plan(deployment: LLMDeployment, desired: Iterable[Manifest], observed: Iterable[Observed]) -> Plan:
    out = Plan()
    live = {(one.kind, one.name): one for one in observed if one.kind in CHILD_KINDS}
    wanted = set()
    waits = False
    for manifest in desired:
        place = (manifest["kind"], manifest["metadata"]["name"])
        wanted.add(place)
        one = live.get(place)
        marked = with_digest(manifest)
        if one is None:
            out.actions.append(Apply(marked, CREATED, exists=False))
            continue
        body = one.body
        owner = standing(body, deployment)
        if owner == "leaving":
            waits = True
        elif owner == "foreign":
            out.conflicts.append(f"{one.kind} {one.name}")
        else:
            if one.foreign:
                out.actions.append(TakeOut(one, one.foreign, manifest))
            if why := _why_apply(marked, body):
                out.actions.append(Apply(marked, why, exists=True))
    for place, one in live.items():
        if place not in wanted and _controller(one.body) == deployment.uid and not _leaving(one.body):
            out.actions.append(Delete(one))
    return Plan(out.actions, out.conflicts, waits)


def standing(body: Manifest, deployment: LLMDeployment) -> str:
    """Whose a live object of one of our names is: ours, foreign, or leaving (it goes with its former owner)."""
    if _leaving(body):
        return "leaving"
    references = body["metadata"].get("ownerReferences") or []
    controller = next((reference for reference in references if reference.get("controller")), None)
    if controller is None:
        # Left over from a predecessor: a retained cache claim, or `kubectl delete --cascade=orphan`.
        labelled = (body["metadata"].get("labels") or {}).get(OWNER_LABEL) == deployment.name
        return "ours" if labelled else "foreign"
    if controller["uid"] == deployment.uid:
        return "ours"
    same_name = controller["kind"] == KIND and controller["name"] == deployment.name
    return "leaving" if same_name else "foreign"


def with_digest(manifest: Manifest) -> Manifest:
    metadata = dict(manifest["metadata"])
    metadata["annotations"] = {**metadata.get("annotations", {}), APPLIED: digest(manifest)}
    return {**manifest, "metadata": metadata}


def pod_spec_digest(deployment: LLMDeployment) -> str:
    """Hash of all that a user said about the pods; defaults do not count, so that a new field changes nothing."""
    said = to_json(deployment.spec)
    return digest({name: said[name] for name in _POD_FIELDS if name in said})


def pinned_template(deployment: LLMDeployment, live: Manifest | None) -> Manifest | None:
    """The pod template that is running, if it was made for the very spec of today: another version of the operator, or
    other settings of it, must not replace pods."""
    if live is None:
        return None
    try:
        record = json.loads((live["metadata"].get("annotations") or {})[TEMPLATE])
        if record["spec"] == pod_spec_digest(deployment) and record["digest"] == digest(record["template"]):
            return dict(record["template"])
    except (KeyError, ValueError, TypeError):
        pass
    return None


def template_annotation(deployment: LLMDeployment, template: Manifest) -> dict[str, str]:
    record = {"spec": pod_spec_digest(deployment), "digest": digest(template), "template": template}
    return {TEMPLATE: json.dumps(record, separators=(",", ":"), sort_keys=True)}


def _why_apply(marked: Manifest, live: Manifest) -> str | None:
    annotations = live["metadata"].get("annotations") or {}
    if annotations.get(APPLIED) != marked["metadata"]["annotations"][APPLIED]:
        return CHANGED
    if where := first_difference(marked, live):
        return f"{where} was altered"
    return None


def _controller(body: Manifest) -> str | None:
    references = body["metadata"].get("ownerReferences") or []
    return next((reference["uid"] for reference in references if reference.get("controller")), None)


def _leaving(body: Manifest) -> bool:
    return "deletionTimestamp" in body["metadata"]
