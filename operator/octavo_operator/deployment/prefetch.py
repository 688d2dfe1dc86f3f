"""Fetch a new model before the pods are replaced (`model.cache.prefetch`). Pure.

The Deployment keeps its pod template until a Job has brought the model into the cache; then it is changed, and the Job
goes. A Job of a model that is no longer wanted goes at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.deployment.world import DeploymentWorld
from octavo_operator.observed.children import child, pods_of
from octavo_operator.observed.diagnosis import Problem, diagnose, most_severe
from octavo_operator.observed.hanging import events_of_controllers
from octavo_operator.observed.refusals import refused_in_events
from octavo_operator.render.names import PREFETCH
from octavo_operator.render.prefetch import expected_prefetch, fetched_model
from octavo_operator.times import parse_time
from octavo_operator.writes.plan import recorded_template

Json = dict[str, Any]

_POD_SECONDS = 30.0  # until a Job has its pod
_FAILED_SECONDS = 60.0  # until a Job that has ended in failure is replaced


@dataclass(frozen=True)
class Prefetch:
    """`job`: that is to exist. `holds`: the pods are not to be replaced yet."""

    job: Json | None = None
    holds: bool = False
    problem: Problem | None = None
    requeue_after: float | None = None

    @property
    def is_done(self) -> bool:
        """True if the Job has brought the model."""
        return self.job is not None and not self.holds


def observe(deployment: LLMDeployment, live: Json | None, template: Json | None, world: DeploymentWorld) -> Prefetch:
    """Find the state of the Job. `template`: of the current spec; None: it yields none. `live`: the Deployment."""
    children, events, now = world.children, world.pod_events, world.now
    if not deployment.spec.model.cache.prefetch or deployment.spec.suspend or template is None:
        return Prefetch()
    running = recorded_template(live)  # None: not known, so it cannot be kept
    wanted = fetched_model(template)
    if running is None or wanted is None or wanted == fetched_model(running):
        return Prefetch()
    job = expected_prefetch(deployment, template)
    name = job["metadata"]["name"]
    found = child(children, "Job", name)
    if found is None:
        return Prefetch(job, holds=True)
    ends = {one["type"]: one for one in (found.get("status") or {}).get("conditions") or [] if one["status"] == "True"}
    if "Complete" in ends:
        return Prefetch(job)
    if failed := ends.get("Failed"):
        text = f"Job {name}: {failed.get('reason', '')}: {failed.get('message', '')}; it is replaced after a minute"
        remaining = parse_time(failed["lastTransitionTime"]) + _FAILED_SECONDS - now
        kept = job if remaining > 0 else None
        return Prefetch(
            kept, True, Problem("DownloadFailed", f"the model cannot be fetched; {text}"), max(remaining, 1)
        )
    pods = [pod for pod in pods_of(children, PREFETCH) if _is_of(pod, name)]
    problems = [one for pod in pods if (one := diagnose(_unready(pod), None, events.get(pod["metadata"]["uid"], ())))]
    if problems or pods:
        return Prefetch(job, True, most_severe(problems))
    if refused := refused_in_events(events_of_controllers("Job", events), "resources"):
        return Prefetch(job, True, refused)
    remaining = parse_time(found["metadata"].get("creationTimestamp") or "1970-01-01T00:00:00Z") + _POD_SECONDS - now
    if remaining > 0:
        return Prefetch(job, True, requeue_after=remaining)
    text = f"no pod of the Job {name}, which fetches the model, can be created; `kubectl describe job {name}` says why"
    return Prefetch(job, True, Problem("PodsNotCreated", text))


def _is_of(pod: Json, job: str) -> bool:
    references = pod["metadata"].get("ownerReferences") or []
    return any((one.get("kind"), one.get("name")) == ("Job", job) for one in references)


def _unready(pod: Json) -> Json:
    """The pod as if it had not recovered: a fetch that is tried again has failed until it has ended well."""
    status = pod.get("status") or {}
    statuses = [{**one, "ready": False} for one in status.get("containerStatuses") or []]
    return {**pod, "status": {**status, "containerStatuses": statuses}}
