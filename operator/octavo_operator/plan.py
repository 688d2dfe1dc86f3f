"""From what should exist and what does to what is to be done. Pure.

Nothing is written that is there already, nothing is touched that is not ours, and what is no longer wanted goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo_operator.api import GROUP, KIND, LLMDeployment, stable_json
from octavo_operator.diff import digest, first_difference, overlay, without
from octavo_operator.kube.field_ownership import left_alone
from octavo_operator.kube.store import Observed
from octavo_operator.render.names import ENGINE, OWNER_LABEL

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
    "podLabels",
    "podAnnotations",
    "volumes",
    "volumeMounts",
    "envFrom",
    "clusterAssignedIds",
)
_NOT_OF_PODS = ("imagePolicy", "imagePriority")  # of engine: they say when, not what


@dataclass(frozen=True)
class Apply:
    """Server-side apply of a whole object. `why`: created, changed, or what others had altered."""

    manifest: Manifest
    why: str
    exists: bool

    @property
    def puts_right(self) -> bool:
        """Whether it only says once more what was said before."""
        return self.why not in (CREATED, CHANGED)


@dataclass(frozen=True)
class Repair:
    """Replacement of a spec to which others added something: at once without that, and as it should be. Server-side
    apply does not remove what others added, and a removal before it would leave a Service without a selector."""

    target: Observed
    spec: Manifest
    why: str
    applied: str  # hash of what it should be


@dataclass(frozen=True)
class Delete:
    target: Observed


@dataclass(frozen=True)
class Plan:
    actions: list[Apply | Repair | Delete] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)  # objects of our names that belong to somebody else
    waits: bool = False  # for the children of a predecessor of the same name to be gone

    @property
    def changes_pods(self) -> bool:
        """Whether the Deployment has yet to be told of the spec of today. What others alter in it does not count: a
        webhook may do so at every write, and what we said was taken all the same."""
        return any(
            isinstance(action, Apply) and action.manifest["kind"] == "Deployment" and not action.puts_right
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
            allowed = [rule.path for rule in deployment.spec.foreign_fields if rule.kind == one.kind]
            if foreign := tuple(pointer for pointer in one.foreign if not left_alone(pointer, body, allowed)):
                spec = overlay(manifest.get("spec", {}), without(body, foreign)["spec"])
                said = f"{', '.join(foreign)} was added or altered"
                out.actions.append(Repair(one, spec, said, marked["metadata"]["annotations"][APPLIED]))
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


def pod_spec_digest(deployment: LLMDeployment, *, or_default: bool = False) -> str:
    """Hash of all that a user said about the pods. Defaults do not count, and neither do later changes of them.
    `or_default`: what equals a default of today does not count, either."""
    said = stable_json(deployment.spec, or_default=or_default)
    said["engine"] = {name: value for name, value in said.get("engine", {}).items() if name not in _NOT_OF_PODS}
    return digest({name: said[name] for name in _POD_FIELDS if name in said and (name, said[name]) != ("engine", {})})


def pinned_template(deployment: LLMDeployment, live: Manifest | None) -> Manifest | None:
    """The pod template that is running, if it was made for the very spec of today: another version of the operator, or
    other settings of it, must not replace pods."""
    record, template = _record(live), recorded_template(live)
    if record is None or template is None:
        return None
    if record["spec"] == pod_spec_digest(deployment):
        return template
    # Where an object was stored before a field was known, the API server fills in the default of today, and that may
    # have changed since. What is of the same generation was not written by anybody.
    same = (deployment.uid, deployment.generation, pod_spec_digest(deployment, or_default=True))
    if (record.get("uid"), record.get("generation"), record.get("explicit")) == same:
        return template
    return None


def recorded_template(live: Manifest | None) -> Manifest | None:
    """The pod template that is running, whatever spec it was made for."""
    record = _record(live)
    if record is None or record["digest"] != digest(record["template"]):
        return None
    return dict(record["template"])


def template_annotation(
    deployment: LLMDeployment, template: Manifest, image: str | None = None, replaced: str | None = None
) -> dict[str, str]:
    """`image`: the operator's engine image of the time when the template was made. `replaced`: the one before it, where
    the template was made for the image's sake."""
    record = {
        "spec": pod_spec_digest(deployment), "explicit": pod_spec_digest(deployment, or_default=True),
        "uid": deployment.uid, "generation": deployment.generation,
        "image": image, "digest": digest(template), "template": template,
    }  # fmt: skip
    if replaced is not None:
        record["replaced"] = replaced
    return {TEMPLATE: json.dumps(record, separators=(",", ":"), sort_keys=True)}


def kept_annotation(live: Manifest) -> dict[str, str]:
    """What is recorded, as it is: a new generation alone is no reason to write the Deployment."""
    return {TEMPLATE: live["metadata"]["annotations"][TEMPLATE]}


def recorded_image(live: Manifest) -> str | None:
    """The operator's engine image of the time when the pod template of `live` was made."""
    record = _record(live)
    if record and record.get("image"):
        return str(record["image"])
    # Made by a version that did not record it.
    containers = ((live["spec"].get("template") or {}).get("spec") or {}).get("containers") or []
    return next((container.get("image") for container in containers if container.get("name") == ENGINE), None)


def replaced_image(live: Manifest) -> str | None:
    """The engine image that the pod template of `live` replaced; None: it was made for other reasons."""
    return (_record(live) or {}).get("replaced")


def _record(live: Manifest | None) -> Manifest | None:
    try:
        record = json.loads(((live or {})["metadata"].get("annotations") or {})[TEMPLATE])
        return record if {"spec", "digest", "template"} <= record.keys() else None
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


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
