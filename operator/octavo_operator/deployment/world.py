"""The input of the reconciliation of an LLMDeployment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from octavo_operator.autoscaling.condition import Scaling
from octavo_operator.deployment.image_rollout import ImageTurn
from octavo_operator.groups.scheduling import OtherGroups
from octavo_operator.lora.summary import AdapterReports
from octavo_operator.observed.children import pods_of
from octavo_operator.observed.world import World
from octavo_operator.render import names

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DeploymentWorld(World):
    """The cluster at one time, as far as an LLMDeployment is concerned."""

    scaling: Scaling
    image_turn: ImageTurn | None  # None: it does not follow the operator's engine image
    start: Json | None  # of the last pod that became ready
    gateways: Sequence[str]  # names of the LLMGateways that select it
    other_groups: Callable[[], OtherGroups]  # a function, because it looks at all groups, and is rarely needed
    adapters: AdapterReports  # LoRA adapters as the pods report them

    @cached_property
    def pods(self) -> list[Json]:
        """The pods that serve: of a group its leader."""
        return pods_of(self.children)

    @cached_property
    def workers(self) -> list[Json]:
        """The other pods of groups."""
        return pods_of(self.children, names.WORKER)

    @cached_property
    def claim(self) -> Json | None:
        """The PersistentVolumeClaim of the cache."""
        return next((one.body for one in self.children if one.kind == "PersistentVolumeClaim"), None)
