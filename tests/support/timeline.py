"""When the cluster changed, and when an LLMDeployment's status said so."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.worlds import world

from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.reconcile import parse, reconcile
from octavo_operator.kube.store import Observed

Json = dict[str, Any]
_KINDS = {"Pod": "v1", "Deployment": "apps/v1", "PersistentVolumeClaim": "v1", "LLMDeployment": "octavo.dev/v1alpha1"}


class Timeline:
    """Changes of a namespace in the order in which they became known."""

    def __init__(self) -> None:
        self._changes: list[tuple[float, str, str, Json]] = []  # time, ADDED | MODIFIED | DELETED, kind, object

    def delay(self, name: str, reason: str) -> float | None:
        """Seconds from the change that made `reason` true to the status that says so; None: it was not said.

        What is true is what the operator's own pure judgement makes of all that was visible at the time, so what is
        measured is how soon it looked and wrote. With a spec that cannot be carried out at all the clock starts. Some
        causes become true by waiting: the judgement says when it has to be asked again.
        """
        seen: dict[tuple[str, str], Json] = {}
        became_true = written = due = None
        for when, kind_of_change, kind, body in sorted(self._changes, key=lambda change: change[0]):
            if became_true is None and due is not None and due <= when and _truth(name, seen, due)[0] == reason:
                became_true = due
            place = (kind, body["metadata"]["name"])
            if kind == "LLMDeployment" and body["metadata"]["name"] == name:
                before = seen.get(place, {}).get("metadata", {}).get("generation")
                if body["metadata"]["generation"] != before:
                    written = when
                if reason in _reasons(body):
                    start = became_true if became_true is not None else written
                    return max(0.0, when - start) if start is not None else None
            if kind_of_change == "DELETED":
                seen.pop(place, None)
            else:
                seen[place] = body
            truth, requeue_after = _truth(name, seen, when)
            due = when + requeue_after if requeue_after is not None else None
            if became_true is None and truth == reason:
                became_true = when
        return None

    def states(self, kind: str) -> Iterator[tuple[float, list[Json]]]:
        """All objects of a kind after each change of one of them, and when that was known."""
        there: dict[str, Json] = {}
        for when, kind_of_change, of_kind, body in list(self._changes):
            if of_kind == kind:
                there[body["metadata"]["uid"]] = body
                if kind_of_change == "DELETED":
                    del there[body["metadata"]["uid"]]
                yield when, list(there.values())

    def note(self, kind: str, change: Json) -> None:
        self._changes.append((time.time(), change["type"], kind, change["object"]))


def _reasons(body: Json) -> list[str]:
    conditions = (body.get("status") or {}).get("conditions") or []
    return [condition["reason"] for condition in conditions if condition["type"] == "Degraded"]


def _truth(name: str, seen: dict[tuple[str, str], Json], now: float) -> tuple[str | None, float | None]:
    """The cause, and after how many seconds it may be another though nothing changes."""
    if not (body := seen.get(("LLMDeployment", name))):
        return None, None
    children = [Observed.of(kind, _KINDS[kind], one) for (kind, _), one in seen.items() if kind != "LLMDeployment"]
    outcome = reconcile(parse(body), world(children, now=now), OperatorConfig())  # type: ignore[arg-type]
    return next(iter(_reasons({"status": outcome.status})), None), outcome.requeue_after


@contextmanager
def timeline(kubectl: list[str], namespace: str) -> Iterator[Timeline]:
    """Watches until the end of the block. `kubectl`: the command with its kubeconfig."""
    out = Timeline()
    watches = []
    for kind in _KINDS:
        command = [*kubectl, "get", kind, "-n", namespace, "--watch", "--output-watch-events", "-o", "json"]
        watch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        threading.Thread(target=_read, args=(watch, kind, out), daemon=True).start()
        watches.append(watch)
    try:
        yield out
    finally:
        for watch in watches:
            watch.kill()
            watch.wait()


def _read(watch: subprocess.Popen[str], kind: str, out: Timeline) -> None:
    assert watch.stdout is not None
    for line in watch.stdout:
        out.note(kind, json.loads(line))
