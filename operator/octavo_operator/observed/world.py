"""The input of a reconciliation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from octavo_operator.kube.store import Observed
from octavo_operator.observed.children import child, pods_of
from octavo_operator.observed.diagnosis import Events, Problem
from octavo_operator.render import names

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class World:
    """The cluster at one time, as far as one owner is concerned. The controller builds it; `reconcile` and the status
    only read it. Fields have no defaults, so that none can be forgotten."""

    children: Sequence[Observed]  # live objects of the owner
    now: float
    apis: frozenset[str]  # optional kinds and features that the cluster has
    write_problem: Problem | None  # why the last execution of the plan failed
    field_conflict: Problem | None  # an object that another writer keeps changing
    pod_events: Events  # of hanging pods
    rejected: Problem | None  # an update of the routers' files that Envoy rejected

    @cached_property
    def router_pods(self) -> list[Json]:
        """The pods of routers."""
        return pods_of(self.children, names.ROUTER)

    def child(self, kind: str | None, name: str) -> Json | None:
        """The child of this kind and name; None if there is none."""
        return child(self.children, kind, name)
