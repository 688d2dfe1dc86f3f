"""Compares desired with live objects, and plans the writes. Pure.

Nothing is written that is up to date, nothing is changed that is not ours, and objects no longer desired are deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo_operator.api import GROUP, LLMDeployment, Owner, stable_json
from octavo_operator.diff import digest, first_difference, overlay, without
from octavo_operator.kube.field_ownership import is_allowed
from octavo_operator.kube.resources import CHILD_KINDS
from octavo_operator.kube.store import ObjectRef, Observed
from octavo_operator.render.names import ENGINE, ROUTER, group

Manifest = dict[str, Any]

CREATED, CHANGED = "created", "changed"  # reasons of an Apply; otherwise it reverts a change by others
APPLIED = f"{GROUP}/applied"  # annotation: hash of the manifest that was applied last
TEMPLATE = f"{GROUP}/pod-template"  # annotation of the Deployment: its pod template, with a hash of the spec
_POD_FIELDS = (
    "model",
    "engine",
    "accelerator",
    "parallelism",
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
    "adapters",
    "maxLoras",
    "maxRank",
    "adapterCredentialsSecretRef",
)
_ROUTER_FIELDS = ("lifecycle", "clusterAssignedIds")  # and what routing.prefix says but for replicas
_ROLLOUT_FIELDS = ("imagePolicy", "imagePriority")  # of engine: they do not change the pods


@dataclass(frozen=True)
class Apply:
    """Server-side apply of a whole object. `why`: created, changed, or which field others have changed."""

    manifest: Manifest
    why: str
    exists: bool

    @property
    def is_revert(self) -> bool:
        """True if it only reverts a change by others."""
        return self.why not in (CREATED, CHANGED)


@dataclass(frozen=True)
class RemoveForeignFields:
    """Replaces the spec by one without fields that other managers added, and with the desired values, in one write.
    Server-side apply does not remove such fields, and removing them first would leave a Service without a selector."""

    target: Observed
    spec: Manifest
    why: str
    applied: str  # hash of the desired manifest


@dataclass(frozen=True)
class Delete:
    """Deletes an object that is no longer desired."""

    target: Observed


@dataclass(frozen=True)
class CreateToken:
    """Creates a Secret with a random token, unless there is one of that name: it is never read, nor changed."""

    manifest: Manifest  # without the token


@dataclass(frozen=True)
class Evict:
    """Evicts a pod, as long as budgets allow it."""

    pod: Manifest


@dataclass(frozen=True)
class Annotate:
    """Sets annotations of a pod: its kubelet then updates the volumes at once, not within a minute or two. Not done
    when an earlier action has failed."""

    target: Observed
    annotations: dict[str, str]


Action = Apply | RemoveForeignFields | Delete | CreateToken | Evict | Annotate


@dataclass(frozen=True)
class Plan:
    """Writes to carry out, in order."""

    actions: list[Action] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)  # objects of our names that are not ours
    waits: bool = False  # for children of a deleted owner of the same name to be gone

    def changes_pods(self, name: str) -> bool:
        """True if the Deployment or LeaderWorkerSet of `name` is yet to be updated to the current spec. Reverts do not
        count: a webhook may change it at each write, and the update is complete all the same."""
        refs = workload_refs(name)
        return any(
            isinstance(action, Apply) and not action.is_revert and _ref(action.manifest) in refs
            for action in self.actions
        )


def workload_refs(name: str) -> tuple[ObjectRef, ObjectRef]:
    """Return the objects that may run the engine's pods of an LLMDeployment."""
    return ("Deployment", name), ("LeaderWorkerSet", group(name))


def compute_plan(owner: Owner, desired: Iterable[Manifest], observed: Iterable[Observed]) -> Plan:
    """The writes that turn the `observed` children into the `desired` manifests."""
    out = Plan()
    live = {(one.kind, one.name): one for one in observed if one.kind in CHILD_KINDS}
    wanted = set()
    waits = False
    for manifest in desired:
        ref = _ref(manifest)
        wanted.add(ref)
        one = live.get(ref)
        marked = with_digest(manifest)
        if one is None:
            out.actions.append(Apply(marked, CREATED, exists=False))
            continue
        body = one.body
        whose = ownership_of(body, owner)
        if whose == "terminating":
            waits = True
        elif whose == "foreign":
            out.conflicts.append(f"{one.kind} {one.name}")
        elif one.kind == "Job":
            continue  # it cannot be changed, and its name says what it is for
        else:
            rules = owner.spec.foreign_fields if isinstance(owner, LLMDeployment) else ()
            allowed = [rule.path for rule in rules if rule.kind == one.kind]
            if foreign := tuple(pointer for pointer in one.foreign if not is_allowed(pointer, body, allowed)):
                spec = overlay(manifest.get("spec", {}), without(body, foreign)["spec"])
                why = f"{', '.join(foreign)} was added or changed"
                out.actions.append(RemoveForeignFields(one, spec, why, marked["metadata"]["annotations"][APPLIED]))
            if reason := _why_apply(marked, body):
                out.actions.append(Apply(marked, reason, exists=True))
    for ref, one in live.items():
        if ref not in wanted and _controller(one.body) == owner.uid and not _is_terminating(one.body):
            out.actions.append(Delete(one))
    return Plan(out.actions, out.conflicts, waits)


def ownership_of(body: Manifest, owner: Owner) -> str:
    """Classify a live object of one of our names: ours, foreign, or terminating (being deleted with its owner)."""
    if _is_terminating(body):
        return "terminating"
    references = body["metadata"].get("ownerReferences") or []
    controller = next((reference for reference in references if reference.get("controller")), None)
    if controller is None:
        # Left from an earlier owner of this name: a retained cache claim, or `kubectl delete --cascade=orphan`.
        labelled = (body["metadata"].get("labels") or {}).get(owner.label) == owner.name
        return "ours" if labelled else "foreign"
    if controller["uid"] == owner.uid:
        return "ours"
    same_name = controller["kind"] == owner.kind and controller["name"] == owner.name
    return "terminating" if same_name else "foreign"


def with_digest(manifest: Manifest) -> Manifest:
    """`manifest` with its own hash as an annotation."""
    metadata = dict(manifest["metadata"])
    metadata["annotations"] = {**metadata.get("annotations", {}), APPLIED: digest(manifest)}
    return {**manifest, "metadata": metadata}


def pod_spec_digest(deployment: LLMDeployment, component: str = ENGINE, *, or_default: bool = False) -> str:
    """Hash of the fields that change the pods of a component. Fields at their first default do not count, so that
    defaults may change. `or_default`: those at the current default do not count, either."""
    fields = stable_json(deployment.spec, or_default=or_default)
    restarted = {"restartedAt": deployment.restarted_at} if deployment.restarted_at else {}
    if component == ROUTER:
        prefix = (fields.get("routing") or {}).get("prefix") or {}
        secrets = (fields.get("engine") or {}).get("imagePullSecrets")
        return digest(
            {
                "prefix": {name: value for name, value in prefix.items() if name != "replicas"},
                "secrets": secrets,
                **{name: fields[name] for name in _ROUTER_FIELDS if name in fields},
                **({"holds": True} if deployment.routers_hold else {}),
                **({"adapters": True} if "adapters" in fields else {}),  # their files may be from before there were any
                **restarted,
            }
        )
    if "adapters" in fields:
        fields["adapters"] = True  # which ones there are is data
    if "prefetch" in (cache := (fields.get("model") or {}).get("cache") or {}):
        kept = {name: value for name, value in cache.items() if name != "prefetch"}
        fields["model"] = {**fields["model"], "cache": kept}
    fields["engine"] = {name: value for name, value in fields.get("engine", {}).items() if name not in _ROLLOUT_FIELDS}
    kept = {name: fields[name] for name in _POD_FIELDS if name in fields and (name, fields[name]) != ("engine", {})}
    return digest({**kept, **restarted})


@dataclass(frozen=True)
class PodFields:
    """Hashes of the fields of a spec that change the pods. `explicit`: without those at their current default."""

    spec: str
    explicit: str

    @classmethod
    def of(cls, deployment: LLMDeployment, component: str = ENGINE) -> PodFields:
        """Compute the hashes for a component of an LLMDeployment."""
        return cls(pod_spec_digest(deployment, component), pod_spec_digest(deployment, component, or_default=True))


def pinned_template(deployment: LLMDeployment, live: Manifest | None, component: str = ENGINE) -> Manifest | None:
    """The running pod template, if it was made for the current spec: another version of the operator, or other settings
    of it, must not replace pods."""
    return pinned(deployment, live, PodFields.of(deployment, component))


def pinned(owner: Owner, live: Manifest | None, fields: PodFields) -> Manifest | None:
    """The running pod template, if it was made for a spec with these fields."""
    record, template = _record(live), recorded_template(live)
    if record is None or template is None:
        return None
    if record["spec"] == fields.spec:
        return template
    # In objects stored before a field existed the API server fills in the current default, which may change later.
    # A spec of the same generation is unchanged.
    same = (owner.uid, owner.generation, fields.explicit)
    return template if (record.get("uid"), record.get("generation"), record.get("explicit")) == same else None


def recorded_template(live: Manifest | None) -> Manifest | None:
    """The running pod template, whatever spec it was made for."""
    record = _record(live)
    if record is None or record["digest"] != digest(record["template"]):
        return None
    return dict(record["template"])


def template_annotation(
    deployment: LLMDeployment,
    template: Manifest,
    image: str | None = None,
    replaced: str | None = None,
    component: str = ENGINE,
) -> dict[str, str]:
    """The annotation that records a pod template. `image`: the operator's image when the template was made;
    `replaced`: the image before it, where the template was made because of the image."""
    return record_annotation(deployment, template, PodFields.of(deployment, component), image, replaced)


def record_annotation(
    owner: Owner, template: Manifest, fields: PodFields, image: str | None = None, replaced: str | None = None
) -> dict[str, str]:
    """The annotation that records a pod template which was made for a spec with these fields."""
    record = {
        "spec": fields.spec,
        "explicit": fields.explicit,
        "uid": owner.uid,
        "generation": owner.generation,
        "image": image,
        "digest": digest(template),
        "template": template,
    }
    if replaced is not None:
        record["replaced"] = replaced
    return {TEMPLATE: json.dumps(record, separators=(",", ":"), sort_keys=True)}


def kept_annotation(live: Manifest) -> dict[str, str]:
    """The annotation of `live`, unchanged: a new generation alone is no reason to write the Deployment."""
    return {TEMPLATE: live["metadata"]["annotations"][TEMPLATE]}


def recorded_image(live: Manifest) -> str | None:
    """The operator's engine image when the pod template of `live` was made."""
    record = _record(live)
    if record and record.get("image"):
        return str(record["image"])
    # Made by a version that did not record it.
    containers = ((live.get("spec", {}).get("template") or {}).get("spec") or {}).get("containers") or []
    return next((container.get("image") for container in containers if container.get("name") == ENGINE), None)


def replaced_image(live: Manifest) -> str | None:
    """The engine image that the pod template of `live` replaced; None: it was made because of the spec."""
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
        return f"{where} was changed"
    return None


def _ref(manifest: Manifest) -> ObjectRef:
    return manifest["kind"], manifest["metadata"]["name"]


def _controller(body: Manifest) -> str | None:
    references = body["metadata"].get("ownerReferences") or []
    return next((reference["uid"] for reference in references if reference.get("controller")), None)


def _is_terminating(body: Manifest) -> bool:
    return "deletionTimestamp" in body["metadata"]
