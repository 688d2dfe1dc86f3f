"""Events of an LLMDeployment or LLMGateway, from the change of its conditions. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo_operator.deployment.routing import KIND as ROUTER_READY
from octavo_operator.deployment.routing import NOT_READY
from octavo_operator.lora.summary import KIND as ADAPTERS_READY
from octavo_operator.lora.summary import LOADING
from octavo_operator.observed.diagnosis import Event

Json = dict[str, Any]


def events(before: Json, after: Json) -> list[Event]:
    """Return the events for conditions whose status or reason changed between two statuses."""
    known = {condition["type"]: condition for condition in before.get("conditions") or []}
    out = []
    for condition in after["conditions"]:
        old = known.get(condition["type"])
        if old and (old["status"], old["reason"]) == (condition["status"], condition["reason"]):
            continue
        if (rule := _RULES.get(condition["type"])) and (event := rule(condition, old)):
            out.append(event)
    return out


def _is(status: str, condition: Json | None) -> bool:
    return condition is not None and condition["status"] == status


def _degraded(new: Json, old: Json | None) -> Event | None:
    if _is("True", new):
        return Event("Warning", new["reason"], new["message"])
    if old and _is("True", old):
        return Event("Normal", "Recovered", f"{old['reason']} is resolved")
    return None


def _achieved(new: Json, _: Json | None) -> Event | None:
    return Event("Normal", new["type"], new["message"]) if _is("True", new) else None


def _available(new: Json, old: Json | None) -> Event | None:
    if not (_is("False", new) and _is("True", old)):
        return None
    if new["reason"] == "ScaledToZero":  # by design
        return Event("Normal", new["reason"], new["message"])
    return Event("Warning", "Unavailable", new["message"])


def _router_ready(new: Json, old: Json | None) -> Event | None:
    return Event("Warning", NOT_READY, new["message"]) if _is("False", new) and _is("True", old) else None


def _lost_or_regained(new: Json, old: Json | None) -> Event | None:
    if _is("False", new) and new["reason"] != LOADING:
        return Event("Warning", new["reason"], new["message"])
    if _is("True", new) and _is("False", old):
        return Event("Normal", new["type"], new["message"])
    return None


def _progressing(new: Json, _: Json | None) -> Event | None:
    kind = {"StoppingOldPods": "Warning", "Prefetching": "Normal"}.get(new["reason"])
    return Event(kind, new["reason"], new["message"]) if kind else None


_RULES: dict[str, Callable[[Json, Json | None], Event | None]] = {
    "Degraded": _degraded,
    "Ready": _achieved,
    "ModelCached": _achieved,
    "Available": _available,
    ROUTER_READY: _router_ready,
    "AutoscalerReady": _lost_or_regained,
    ADAPTERS_READY: _lost_or_regained,
    "Progressing": _progressing,
}
