"""Compare the LoRA adapters that are wanted with what each pod reports. Pure; the time is an argument.

Nothing is remembered of what was done: a pod that lacks something is asked to read its list, whatever the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.observed.diagnosis import is_finished
from octavo_operator.render.lora import listed

Json = dict[str, Any]
Entry = tuple[str, str, str]  # uri, revision and pinned digest of an adapter

KIND = "AdaptersReady"  # the condition
LOADED, LOADING, NO_REPLICA, NOT_MOUNTED, DIFFERENT = (
    "Loaded",
    "Loading",
    "NoReplica",
    "PVCNotMounted",
    "DigestMismatch",
)
PATIENCE_SECONDS = 10.0  # for a pod that loads, until the next one is asked
_MAX_MESSAGE = 500


@dataclass(frozen=True)
class AdapterState:
    """An adapter in a pod. `entry`: as it was listed; `is_loaded`: requests may name it; `reason`, `message`: why it
    cannot be used; `digest`: of what is served."""

    entry: Entry
    is_loaded: bool
    reason: str = ""
    message: str = ""
    digest: str = ""


@dataclass(frozen=True)
class PodAdapters:
    """The report of a pod. `listed`: SHA-256 of the list that it has read."""

    listed: str
    states: Mapping[str, AdapterState] = field(default_factory=dict)  # by name

    @property
    def is_loading(self) -> bool:
        """True if it is yet to find out about one."""
        return any(not (one.is_loaded or one.reason) for one in self.states.values())


AdapterReports = Mapping[str, PodAdapters]  # by the pods' uids; of those that have answered


def parse_report(answer: Any) -> PodAdapters:
    """Parse the answer of a pod's /v1/adapters. Raises ValueError."""
    try:
        states = {
            str(one["name"]): AdapterState(
                (one.get("uri", ""), one.get("revision", ""), one.get("expected", "")),
                one["state"] == "loaded" and bool(one["served"]),
                one.get("reason", "") if one["state"] == "failed" else "",
                one.get("message", "")[:_MAX_MESSAGE],
                one.get("digest", ""),
            )
            for one in answer["adapters"]
        }
        return PodAdapters(str(answer["listed"]), states)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no report of adapters: {error!r}") from error


def wanted_entries(deployment: LLMDeployment) -> dict[str, Entry]:
    """Return the adapters that the pods are to serve, by name."""
    return {
        name: (one["uri"], one.get("revision", ""), one.get("digest", "")) for name, one in listed(deployment).items()
    }


def next_to_ask(
    digest: str, uids: Iterable[str], reports: AdapterReports, asked: Mapping[str, float], now: float
) -> str | None:
    """The pod that is to read its list now; None: nobody. One after the other, so that no adapter stops more than one
    pod: while a pod loads, the next one waits, but not for ever. `asked`: when each was asked last."""
    behind = []
    for uid in uids:
        if uid not in reports:
            continue  # it starts, or does not answer
        if reports[uid].listed != digest:
            behind.append(uid)
        elif reports[uid].is_loading and now - asked.get(uid, float("-inf")) < PATIENCE_SECONDS:
            return None
    return min(behind, key=lambda uid: asked.get(uid, float("-inf")), default=None)


@dataclass(frozen=True)
class AdapterSummary:
    """`status.adapters`, and the condition: status (None: unknown), reason and message."""

    adapters: list[Json]
    condition: tuple[bool | None, str, str]


def summarize(deployment: LLMDeployment, pods: Sequence[Json], reports: AdapterReports) -> AdapterSummary | None:
    """None: LoRA is off."""
    if deployment.spec.adapters is None:
        return None
    uids, wanted = serving_uids(pods), wanted_entries(deployment)
    found = []
    for one in deployment.spec.adapters:
        if one.name in wanted:
            found.append(_status(one.name, wanted[one.name], uids, reports))
        else:
            text = (
                f"the pods do not mount the claim of {one.uri}; mount it by volumes and volumeMounts, which replaces "
                "the pods once"
            )
            found.append({"name": one.name, "ready": 0, "of": len(uids), "reason": NOT_MOUNTED, "message": text})
    return AdapterSummary(found, _condition(found, len(uids)))


def serving_uids(pods: Iterable[Json]) -> list[str]:
    """Return the uids of the pods that are to have the adapters: neither ended nor terminating."""
    return [
        str(pod["metadata"]["uid"])
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"] and not is_finished(pod)
    ]


def is_behind(digest: str, report: PodAdapters | None) -> bool:
    """True if a pod is to be read again soon. `digest`: of the list that it is to have."""
    return report is None or report.listed != digest or report.is_loading


def _status(name: str, entry: Entry, uids: Sequence[str], reports: AdapterReports) -> Json:
    states = [one for uid in uids if uid in reports and (one := reports[uid].states.get(name)) and one.entry == entry]
    loaded = [one for one in states if one.is_loaded]
    status: Json = {"name": name, "ready": len(loaded), "of": len(uids)}
    if failed := next((one for one in states if one.reason), None):
        return {**status, "reason": failed.reason, "message": failed.message}
    if len(loaded) < len(uids):
        return {**status, "reason": LOADING}
    if len({one.digest for one in loaded}) > 1:
        text = f"pods have other files of {entry[0]} than others; give its commit as revision, or its digest"
        return {**status, "reason": DIFFERENT, "message": text}
    return status


def _condition(adapters: list[Json], num_pods: int) -> tuple[bool | None, str, str]:
    if not adapters:
        return True, LOADED, "no adapter is listed"
    troubled = [one for one in adapters if one.get("reason", LOADING) not in (LOADING,)]
    if troubled:
        one, more = troubled[0], len(troubled) - 1
        text = f"{one['name']}: {one['ready']} of {one['of']} pods serve it: {one['message']}"
        return False, one["reason"], text + (f" (and {more} other adapters)" if more else "")
    if not num_pods:
        return None, NO_REPLICA, "no pod runs that could load them"
    waiting = [one for one in adapters if one["ready"] < num_pods]
    if waiting:
        one = waiting[0]
        return False, LOADING, f"{one['name']}: {one['ready']} of {num_pods} pods serve it"
    return True, LOADED, f"{len(adapters)} adapters on {num_pods} pods"
