"""Find children of an LLMDeployment by kind, name and component. All carry its label; pods differ by their component:
only those of the engine are diagnosed, counted and scraped for their load."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo_operator.kube.store import Observed
from octavo_operator.render.names import COMPONENT_LABEL, ENGINE

Json = dict[str, Any]


def child(children: Iterable[Observed], kind: str | None, name: str) -> Json | None:
    """The child of this kind and name; None: there is none."""
    return next((one.body for one in children if (one.kind, one.name) == (kind, name)), None)


def pods_of(children: Iterable[Observed], component: str = ENGINE) -> list[Json]:
    """The pods of one component."""
    bodies = (one.body for one in children if one.kind == "Pod")
    return [body for body in bodies if (body["metadata"].get("labels") or {}).get(COMPONENT_LABEL) == component]
