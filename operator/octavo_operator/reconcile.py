"""Reconciliation of one LLMDeployment, without I/O: from observed objects to a plan and a status."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from octavo_operator.api import KIND, InvalidLLMDeployment, LLMDeployment
from octavo_operator.api.schema import SpecError
from octavo_operator.autoscaling.condition import Scaling
from octavo_operator.config import OperatorConfig
from octavo_operator.diagnosis import Events, Problem, claim_pending
from octavo_operator.image_rollout import ImageTurn
from octavo_operator.kube.store import Observed
from octavo_operator.plan import (
    Delete,
    Plan,
    compute_plan,
    kept_annotation,
    pinned_template,
    recorded_image,
    recorded_template,
    replaced_image,
    template_annotation,
)
from octavo_operator.render import InvalidTemplateError, expected_template, render
from octavo_operator.render.autoscaling import autoscaler_kind
from octavo_operator.rollout import MAKE_ROOM, make_room
from octavo_operator.status import Observation, expected_status, invalid_status

Json = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Writes, the status, and seconds until the next reconciliation at the latest."""

    plan: Plan = field(default_factory=Plan)
    status: Json | None = None
    requeue_after: float | None = None


def parse(body: Json) -> LLMDeployment | InvalidLLMDeployment:
    """The LLMDeployment of an object of the API; an InvalidLLMDeployment where its spec does not parse."""
    try:
        return LLMDeployment.from_json(body)
    except SpecError as error:
        return InvalidLLMDeployment.of(body, error)


def reconcile_invalid(deployment: InvalidLLMDeployment, children: list[Observed], now: float) -> Outcome:
    """Changes nothing until the spec is valid; running pods stay."""
    live = next((one.body for one in children if one.kind == "Deployment" and one.name == deployment.name), None)
    return Outcome(status=invalid_status(deployment, live, now))


def reconcile(
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
    """`children`: observed objects of the LLMDeployment; `apis`: optional kinds that the cluster has; `problem`: of the
    last execution of the plan, for the status; `image_turn`: of one that follows the operator's engine image;
    `contested`: an object that others keep changing; `pod_events`: of hanging pods."""
    if deployment.deleting:
        return Outcome()
    live = next((one.body for one in children if one.kind == "Deployment" and one.name == deployment.name), None)
    pods = [one.body for one in children if one.kind == "Pod"]
    claim = next((one.body for one in children if one.kind == "PersistentVolumeClaim"), None)
    room, requeue_after = make_room(deployment, live, pods, now)
    plan, pending = Plan(), True
    template, current, record, invalid = _choose_template(deployment, live, config, image_turn)
    problem = invalid or problem
    if template is not None:
        unavailable = room.unavailable if room else None
        desired = render(deployment, config, template=template, unavailable=unavailable, apis=apis)
        for manifest in desired:
            if manifest["kind"] == "Deployment":
                made_room = {MAKE_ROOM: str(room)} if room else {}
                manifest["metadata"]["annotations"] = {**record, **made_room}
        plan = compute_plan(deployment, desired, children)
        if current is None:  # running pods may need objects that the current spec does not
            plan = dataclasses.replace(plan, actions=[one for one in plan.actions if not isinstance(one, Delete)])
        pending = plan.changes_pods or current is None
        if plan.conflicts and problem is None:
            problem = Problem(
                "NameConflict",
                f"{', '.join(plan.conflicts)} exists and is not managed by this {KIND}; delete it or choose another "
                "name",
            )
    if plan.waits:
        requeue_after = 2.0
    autoscaler = next(
        (one.body for one in children if (one.kind, one.name) == (autoscaler_kind(deployment), deployment.name)), None
    )
    if problem is None:
        problem, claim_due = claim_pending(claim, pods, now)
        requeue_after = min((one for one in (requeue_after, claim_due) if one is not None), default=None)
    if image_turn and (turn_due := image_turn.requeue_after):
        requeue_after = min(turn_due, requeue_after or turn_due)
    seen = Observation(
        live, pods, claim, problem, room is not None, autoscaler, scaling, apis, pending, current, image_turn,
        contested, pod_events,
    )  # fmt: skip
    return Outcome(plan, expected_status(deployment, seen, config.cluster_domain, now), requeue_after)


def _choose_template(
    deployment: LLMDeployment, live: Json | None, config: OperatorConfig, image_turn: ImageTurn | None
) -> tuple[Json | None, Json | None, dict[str, str], Problem | None]:
    """The pod template to render (None: there is none), that of the current spec (None: the spec yields none), the
    annotation that records the template, and what is wrong with the spec."""
    may_update = image_turn is not None and image_turn.may_update
    try:
        template = pinned_template(deployment, live)
        if template is None or live is None or may_update:
            template = expected_template(deployment, config)
            replaced = recorded_image(live) if live and may_update else None
            return template, template, template_annotation(deployment, template, config.engine_image, replaced), None
        if live["spec"].get("replicas") == deployment.replicas:
            return template, template, kept_annotation(live), None
        # The Deployment is written in any case.
        record = template_annotation(deployment, template, recorded_image(live), replaced_image(live))
        return template, template, record, None
    except InvalidTemplateError as error:
        problem = Problem(error.reason, f"{error}; running pods are unchanged")
        template = recorded_template(live)
        return template, None, kept_annotation(live) if live and template else {}, problem
