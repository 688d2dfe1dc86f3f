"""Rolls a new engine image out over LLMDeployments of imagePolicy Follow: by priority, then age, so many at a time, the
next one when an earlier one is ready.

An upgrade of the operator alone never replaces pods (plan.py); this is how to ask for it. Who goes next follows from
the state of the objects alone, so it survives restarts, and a broken image stops at the first ones that took it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from octavo_operator.api import KIND, LLMDeployment
from octavo_operator.api.engine import FOLLOW
from octavo_operator.claims import claimant
from octavo_operator.config import OperatorConfig
from octavo_operator.kube.store import Store
from octavo_operator.plan import recorded_image, replaced_image
from octavo_operator.render import TEMPLATE_PROBLEMS
from octavo_operator.rollout import is_complete

Json = dict[str, Any]

_LOOK_AGAIN_SECONDS = 5.0  # a rollout takes longer; of those that wait, the later ones look less often
_FLEET_SECONDS = 2.0  # how long the state of all is remembered: thousands may ask for it


@dataclass(frozen=True)
class Member:
    """An LLMDeployment that follows the operator's engine image, and how far it is."""

    namespace: str
    name: str
    priority: int
    created: str  # RFC 3339, which sorts as text
    is_behind: bool  # its pods are of another image of the operator
    is_complete: bool  # all replicas are of the latest template and available
    is_stuck: bool = False  # its spec makes no pod template, so nobody waits for it
    took_it: bool = True  # its pods were replaced for the image, not for a change of its own
    is_down: bool = False  # no replica answers

    @property
    def order(self) -> tuple[bool, int, str, str, str]:
        """What is down before it has the image comes last: it may never be complete, and would stop all others."""
        return (self.is_behind and self.is_down, -self.priority, self.created, self.namespace, self.name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class ImageTurn:
    """Of one that follows: whether its pods are of another image, and whose turn comes before."""

    image: str  # the operator's
    is_behind: bool
    waits_for: tuple[str, ...] = ()

    @property
    def may_go(self) -> bool:
        return self.is_behind and not self.waits_for

    @property
    def again_after(self) -> float | None:
        return min(300.0, _LOOK_AGAIN_SECONDS * len(self.waits_for)) if self.waits_for else None


class ImageRollout:
    """`clock` counts seconds."""

    def __init__(self, store: Store, config: OperatorConfig, clock: Callable[[], float]) -> None:
        self._store, self._config, self._clock = store, config, clock
        self._fleet: list[Member] = []
        self._known_until = 0.0

    def turn(self, deployment: LLMDeployment) -> ImageTurn | None:
        """None: it does not follow, or has no pods yet."""
        one = self._member(deployment.namespace, deployment.name)
        if one is None:
            return None
        image = self._config.engine_image
        if not one.is_behind:
            return ImageTurn(image, False)
        if self._clock() >= self._known_until:
            found = (self._member(*key) for key in self._store.deployments())
            self._fleet = [other for other in found if other]
            self._known_until = self._clock() + _FLEET_SECONDS
        return ImageTurn(image, True, tuple(map(str, before(one, self._fleet, self._config.image_rollouts))))

    def _member(self, namespace: str, name: str) -> Member | None:
        seen, live = self._store.get(KIND, namespace, name), self._store.get("Deployment", namespace, name)
        if seen is None or live is None or seen.owner != live.owner:
            return None
        return member(seen.body, live.body, self._config)


def member(body: Json, live: Json, config: OperatorConfig) -> Member | None:
    """`body`: an LLMDeployment, `live`: its Deployment."""
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
        recorded_image(live) != config.engine_image,
        is_complete(live),
        any(one["type"] == "Degraded" and one["reason"] in TEMPLATE_PROBLEMS for one in conditions),
        replaced_image(live) is not None,
        bool(live["spec"].get("replicas", 1)) and not (live.get("status") or {}).get("availableReplicas"),
    )


def before(one: Member, fleet: Iterable[Member], limit: int) -> list[Member]:
    """Those for whom `one` waits; empty: it may take the new image now. `limit`: how many may be under way."""
    ahead = [
        other
        for other in fleet
        if not other.is_stuck
        and str(other) != str(one)
        and (other.order < one.order if other.is_behind else other.took_it and not other.is_complete)
    ]
    return sorted(ahead, key=lambda other: other.order) if len(ahead) >= limit else []
