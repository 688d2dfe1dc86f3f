"""Count replicas: pods of a Deployment, or groups of pods of a LeaderWorkerSet. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.kube.store import Observed
from octavo_operator.observed.children import child, pods_of
from octavo_operator.observed.diagnosis import is_finished
from octavo_operator.render import names
from octavo_operator.render.workload import INDEX_LABEL, KIND, TEMPLATE_HASH

Json = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """Numbers of replicas. `live`: the Deployment or LeaderWorkerSet; None: there is none."""

    live: Json | None = None
    wanted: int = 0  # by its spec
    replicas: int = 0
    ready: int = 0
    available: int = 0
    updated: int = 0  # of the latest template
    is_observed: bool = False  # its controller knows of the last change
    conditions: list[Json] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """All replicas are available and of the latest template, and no old one is left."""
        return self.is_observed and self.wanted == self.replicas == self.updated == self.available

    @property
    def counts(self) -> Json:
        """The numbers as fields of the status."""
        return {
            "replicas": self.replicas,
            "readyReplicas": self.ready,
            "availableReplicas": self.available,
            "updatedReplicas": self.updated,
        }

    @property
    def template(self) -> Json:
        """The pod template of the replicas, or of their leaders."""
        spec = (self.live or {}).get("spec") or {}
        found: Json = (spec.get("leaderWorkerTemplate") or {}).get("leaderTemplate") or spec.get("template") or {}
        return found

    @classmethod
    def of(cls, live: Json | None, leaders: Iterable[Json] = (), workers: Iterable[Json] = ()) -> Workload:
        """`leaders`, `workers`: the pods of groups; a Deployment's status counts its pods itself."""
        if live is None:
            return cls()
        if live.get("kind") == KIND:
            return _of_groups(live, groups(leaders, workers))
        status = live.get("status") or {}
        return cls(
            live,
            live["spec"].get("replicas", 1),
            status.get("replicas", 0),
            status.get("readyReplicas", 0),
            status.get("availableReplicas", 0),
            status.get("updatedReplicas", 0),
            status.get("observedGeneration", 0) >= live["metadata"].get("generation", 1),
            status.get("conditions") or [],
        )


@dataclass(frozen=True)
class Group:
    """The pods of a replica that are not about to go."""

    index: int
    leader: Json | None
    workers: list[Json]

    @property
    def pods(self) -> list[Json]:
        """All of them."""
        return [*([self.leader] if self.leader else []), *self.workers]


def groups(leaders: Iterable[Json], workers: Iterable[Json]) -> list[Group]:
    """Group pods by their index."""
    by_index: defaultdict[int, tuple[list[Json], list[Json]]] = defaultdict(lambda: ([], []))
    for place, pods in enumerate((leaders, workers)):
        for pod in pods:
            index = (pod["metadata"].get("labels") or {}).get(INDEX_LABEL)
            if index is not None and "deletionTimestamp" not in pod["metadata"] and not is_finished(pod):
                by_index[int(index)][place].append(pod)
    return [Group(index, next(iter(first), None), rest) for index, (first, rest) in sorted(by_index.items())]


def _of_groups(live: Json, found: list[Group]) -> Workload:
    """Counted here: a LeaderWorkerSet's status does not say which generation it is about."""
    template = live["spec"]["leaderWorkerTemplate"]
    latest = _template_hash(template.get("leaderTemplate") or {})
    led = [one for one in found if one.leader]
    ready = sum(len(one.pods) == template["size"] and all(is_ready(pod) for pod in one.pods) for one in led)
    updated = sum(_template_hash(one.leader or {}) == latest for one in led)
    return Workload(live, live["spec"].get("replicas", 1), len(led), ready, ready, updated, True)


def is_ready(pod: Json) -> bool:
    """True if its condition Ready is True."""
    found = (pod.get("status") or {}).get("conditions") or []
    return any((one["type"], one["status"]) == ("Ready", "True") for one in found)


def _template_hash(pod: Json) -> str | None:
    return ((pod.get("metadata") or {}).get("annotations") or {}).get(TEMPLATE_HASH)


def find(deployment: LLMDeployment, children: Iterable[Observed]) -> Workload:
    """The workload of an LLMDeployment: of the kind that its spec asks for, else of the other one."""
    children = list(children)
    live = live_of(deployment.name, children, deployment.spec.parallelism.nodes > 1)
    return Workload.of(live, pods_of(children), pods_of(children, names.WORKER))


def live_of(name: str, children: Iterable[Observed], grouped: bool) -> Json | None:
    """The Deployment or LeaderWorkerSet. `grouped`: which one where both are there, one about to go."""
    children = list(children)
    kinds = [("Deployment", name), (KIND, names.group(name))]
    found = (child(children, *one) for one in (reversed(kinds) if grouped else kinds))
    return next((one for one in found if one is not None), None)
