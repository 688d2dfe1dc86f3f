"""Rolls a new engine image out over LLMDeployments with imagePolicy Follow: by priority, then age, a limited number at
a time, the next one when an earlier one is complete.

An upgrade of the operator alone never replaces pods (plan.py); imagePolicy Follow asks for it. The order follows from
the state of the objects alone, so it survives restarts, and a broken image stops at the first ones that got it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from octavo_operator.api import KIND, LLMDeployment
from octavo_operator.api.engine import FOLLOW
from octavo_operator.api.resources import Accelerator
from octavo_operator.api.schema import SpecError, from_json
from octavo_operator.claims.claims import claimant
from octavo_operator.config import OperatorConfig
from octavo_operator.kube.store import Store
from octavo_operator.observed.children import pods_of
from octavo_operator.observed.workload import Workload
from octavo_operator.render import TEMPLATE_PROBLEMS, names
from octavo_operator.render.workload import KIND as GROUPS
from octavo_operator.writes.plan import recorded_image, replaced_image

Json = dict[str, Any]

_REQUEUE_SECONDS = 5.0  # times the number of those before; a rollout takes longer
_FLEET_CACHE_SECONDS = 2.0  # of the state of all members: thousands may need it


@dataclass(frozen=True)
class Member:
    """The rollout state of an LLMDeployment that follows the operator's engine image."""

    namespace: str
    name: str
    priority: int
    created: str  # RFC 3339, which sorts as text
    is_behind: bool  # its pods have another image of the operator
    is_complete: bool  # all replicas are of the latest template and available
    is_stuck: bool = False  # its spec yields no pod template, so no other one waits for it
    updated_for_image: bool = True  # its pods were replaced because of the image, not of its spec
    is_down: bool = False  # no replica is available

    @property
    def order(self) -> tuple[bool, int, str, str, str]:
        """Sort key. One that is down before the update comes last: it might never complete, and block the others."""
        return (self.is_behind and self.is_down, -self.priority, self.created, self.namespace, self.name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class ImageTurn:
    """True if the pods have another image than the operator's, and which members are updated first."""

    image: str  # the operator's
    is_behind: bool
    waits_for: tuple[str, ...] = ()

    @property
    def may_update(self) -> bool:
        """True if the pods may get the new image now."""
        return self.is_behind and not self.waits_for

    @property
    def requeue_after(self) -> float | None:
        """Seconds until the next check; None: there is nothing to wait for."""
        return min(300.0, _REQUEUE_SECONDS * len(self.waits_for)) if self.waits_for else None


class ImageRollout:
    """Decides which members may be updated. `clock` counts seconds."""

    def __init__(self, store: Store, config: OperatorConfig, clock: Callable[[], float]) -> None:
        self._store, self._config, self._clock = store, config, clock
        self._fleet: list[Member] = []
        self._cached_until = 0.0

    def turn(self, deployment: LLMDeployment) -> ImageTurn | None:
        """The turn of an LLMDeployment; None: it does not follow, or has no Deployment yet."""
        one = self._member(deployment.namespace, deployment.name)
        if one is None:
            return None
        image = self._config.image(deployment.spec.accelerator)
        if not one.is_behind:
            return ImageTurn(image, False)
        if self._clock() >= self._cached_until:
            found = (self._member(*key) for key in self._store.deployments())
            self._fleet = [other for other in found if other]
            self._cached_until = self._clock() + _FLEET_CACHE_SECONDS
        return ImageTurn(image, True, tuple(map(str, members_before(one, self._fleet, self._config.image_rollouts))))

    def _member(self, namespace: str, name: str) -> Member | None:
        seen = self._store.get(KIND, namespace, name)
        if seen is None:
            return None
        body = seen.body
        if _nodes(body) > 1 and (live := self._store.get(GROUPS, namespace, names.group(name))):
            children = self._store.children((namespace, name))
            workload = Workload.of(live.body, pods_of(children), pods_of(children, names.WORKER))
        elif live := self._store.get("Deployment", namespace, name):
            workload = Workload.of(live.body)
        if live is None or seen.owner != live.owner:
            return None
        return member(body, workload, self._config)


def member(body: Json, workload: Workload, config: OperatorConfig) -> Member | None:
    """The state of an LLMDeployment (`body`) with its workload; None: it does not follow."""
    live = workload.live or {}
    meta, engine = body["metadata"], (body.get("spec") or {}).get("engine") or {}
    if "deletionTimestamp" in meta or engine.get("image") or claimant(body) not in (None, config.operator_id):
        return None
    if (engine.get("imagePolicy") or config.image_policy) != FOLLOW:
        return None
    conditions = (body.get("status") or {}).get("conditions") or []
    return Member(
        meta["namespace"],
        meta["name"],
        engine.get("imagePriority") or 0,
        meta.get("creationTimestamp", ""),
        recorded_image(live) != config.image(_accelerator(body)),
        workload.is_complete,
        any(one["type"] == "Degraded" and one["reason"] in TEMPLATE_PROBLEMS for one in conditions),
        replaced_image(live) is not None,
        bool(workload.wanted) and not workload.available,
    )


def _nodes(body: Json) -> int:
    nodes: int = ((body.get("spec") or {}).get("parallelism") or {}).get("nodes") or 1
    return nodes


def _accelerator(body: Json) -> Accelerator | None:
    accelerator = (body.get("spec") or {}).get("accelerator")
    try:
        return None if accelerator is None else from_json(Accelerator, accelerator)
    except SpecError:  # stored before a rule existed: it keeps its image, as it keeps its pods
        return None


def members_before(one: Member, fleet: Iterable[Member], limit: int) -> list[Member]:
    """Members that `one` waits for; empty: it may be updated. `limit`: number of updates at the same time."""
    ahead = [
        other
        for other in fleet
        if not other.is_stuck
        and str(other) != str(one)
        and (other.order < one.order if other.is_behind else other.updated_for_image and not other.is_complete)
    ]
    return sorted(ahead, key=lambda other: other.order) if len(ahead) >= limit else []
