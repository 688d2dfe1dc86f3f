"""One look at one LLMDeployment, without any I/O: from what is known to what is to be done and to be said."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from octavo_operator.api import KIND, LLMDeployment, Unreadable
from octavo_operator.api.schema import SpecError
from octavo_operator.autoscaling.condition import Scaling
from octavo_operator.config import OperatorConfig
from octavo_operator.diagnosis import Events, Problem, claim_pending
from octavo_operator.image_rollout import ImageTurn
from octavo_operator.kube.store import Observed
from octavo_operator.plan import (
    Delete,
    Plan,
    kept_annotation,
    pinned_template,
    plan,
    recorded_image,
    recorded_template,
    replaced_image,
    template_annotation,
)
from octavo_operator.render import BadTemplate, expected_template, names, render
from octavo_operator.render.autoscaling import autoscaler_kind
from octavo_operator.rollout import MAKE_ROOM, make_room
from octavo_operator.status import Observation, expected_status, unreadable_status

Json = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What to do now, what to say, and after how many seconds to look again at the latest."""

    plan: Plan = field(default_factory=Plan)
    status: Json | None = None
    again_after: float | None = None


def parse(body: Json) -> LLMDeployment | Unreadable:
    """The LLMDeployment, or why it cannot be read."""
    try:
        return LLMDeployment.from_json(body)
    except SpecError as error:
        return Unreadable.of(body, error)


def look_at_unreadable(deployment: Unreadable, children: list[Observed], now: float) -> Outcome:
    """What runs goes on running, and nothing is changed until the spec can be read."""
    live = next((one.body for one in children if one.kind == "Deployment" and one.name == deployment.name), None)
    return Outcome(status=unreadable_status(deployment, live, now))


def look(
    deployment: LLMDeployment,
    children: list[Observed],
    config: OperatorConfig,
    apis: frozenset[str],
    now: float,
    problem: Problem | None = None,
    scaling: Scaling = Scaling(),
    image_turn: ImageTurn | None = None,
    contested: Problem | None = None,
    pod_events: Events = MappingProxyType({}),
) -> Outcome:
    """`problem`: what went wrong when this was tried last, to be said along with the rest. `image_turn`: of one that
    follows the operator's engine image. `contested`: what somebody else alters again and again. `pod_events`: of pods
    that hang."""
    if deployment.deleting:
        return Outcome()
    live = next((one.body for one in children if one.kind == "Deployment" and one.name == deployment.name), None)
    pods = [one.body for one in children if one.kind == "Pod"]
    claim = next((one.body for one in children if one.kind == "PersistentVolumeClaim"), None)
    room, again = make_room(deployment, live, pods, now)
    todo, pending = Plan(), True
    made: Json | None = None  # the template of the spec of today
    try:
        template = pinned_template(deployment, live)
        if template is None or live is None or (image_turn and image_turn.may_go):
            template = expected_template(deployment, config)
            replaced = recorded_image(live) if live and image_turn and image_turn.may_go else None
            record = template_annotation(deployment, template, config.engine_image, replaced)
        elif live["spec"].get("replicas") == deployment.replicas:
            record = kept_annotation(live)
        else:  # the Deployment is written anyway
            record = template_annotation(deployment, template, recorded_image(live), replaced_image(live))
        made = template
    except BadTemplate as error:
        problem = Problem(error.reason, f"{error}; the pods stay as they were")
        template = recorded_template(live)
        record = kept_annotation(live) if live and template else {}
    if template is not None:
        unavailable = room.unavailable if room else None
        desired = render(deployment, config, template=template, unavailable=unavailable, apis=apis)
        for manifest in desired:
            if manifest["kind"] == "Deployment":
                made_room = {MAKE_ROOM: str(room)} if room else {}
                manifest["metadata"]["annotations"] = {**record, **made_room}
        todo = plan(deployment, desired, children)
        if made is None:  # the pods that stay may need what the spec of today does not
            todo = dataclasses.replace(todo, actions=[one for one in todo.actions if not isinstance(one, Delete)])
        pending = todo.changes_pods or made is None
        if todo.conflicts and problem is None:
            problem = Problem(
                "NameConflict",
                f"{', '.join(todo.conflicts)} belongs to somebody else; delete it or choose another name for the "
                f"{KIND}",
            )
    if todo.waits:
        again = 2.0
    autoscaler = next(
        (one.body for one in children if (one.kind, one.name) == (autoscaler_kind(deployment), deployment.name)), None
    )
    if problem is None:
        problem, claim_again = claim_pending(claim, pods, now)
        again = min((one for one in (again, claim_again) if one is not None), default=None)
    if image_turn and (turn_again := image_turn.again_after):
        again = min(turn_again, again or turn_again)
    seen = Observation(
        live, pods, claim, problem, room is not None, autoscaler, scaling, apis, pending, made, image_turn,
        contested, pod_events,
    )  # fmt: skip
    return Outcome(todo, expected_status(deployment, seen, config.cluster_domain, now), again)


__all__ = ["Outcome", "Plan", "look", "names", "parse"]
