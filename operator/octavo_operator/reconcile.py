"""Reconciliation of one LLMDeployment, without I/O: from observed objects to a plan and a status."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from octavo_operator.api import KIND, InvalidLLMDeployment, LLMDeployment
from octavo_operator.api.schema import SpecError
from octavo_operator.autoscaling.condition import Scaling
from octavo_operator.children import child, pods_of
from octavo_operator.config import OperatorConfig
from octavo_operator.diagnosis import Events, Problem, claim_pending
from octavo_operator.image_rollout import ImageTurn
from octavo_operator.kube.resources import IMAGE_VOLUMES
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
from octavo_operator.prefetch import observe as observe_prefetch
from octavo_operator.render import InvalidTemplateError, expected_template, names, render
from octavo_operator.render.autoscaling import autoscaler_kind
from octavo_operator.render.router.objects import (
    RouterPods,
    expected_files,
    expected_router_template,
    unchanged_files,
)
from octavo_operator.rollout import MAKE_ROOM, make_room
from octavo_operator.routing import Routers, kept_objects, observe
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
    live = child(children, "Deployment", deployment.name)
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
    start: Json | None = None,
    gateways: Sequence[str] = (),
) -> Outcome:
    """`children`: observed objects of the LLMDeployment; `apis`: optional kinds and features that the cluster has;
    `problem`: of the last execution of the plan, for the status; `image_turn`: of one that follows the operator's
    engine image; `contested`: an object that others keep changing; `pod_events`: of hanging pods; `start`: of
    the last pod that became ready; `gateways`: names of the LLMGateways that serve it."""
    if deployment.deleting:
        return Outcome()
    scaling = dataclasses.replace(scaling, holds=deployment.routers_hold or bool(gateways))
    live = child(children, "Deployment", deployment.name)
    pods = pods_of(children)
    claim = next((one.body for one in children if one.kind == "PersistentVolumeClaim"), None)
    room, requeue_after = make_room(deployment, live, pods, now)
    plan, pending = Plan(), True
    routers = observe(deployment, children, pod_events, now)
    template, current, record, invalid = _choose_template(deployment, live, config, image_turn, IMAGE_VOLUMES in apis)
    problem = invalid or problem
    prefetch = observe_prefetch(deployment, live, current, children, pod_events, now)
    if prefetch.holds and live is not None:
        template, record = recorded_template(live), kept_annotation(live)
    if template is not None:
        unavailable = room.unavailable if room else None
        desired = render(
            deployment, config, template=template, unavailable=unavailable, apis=apis, stage=routers.stage,
            routers=_choose_routers(deployment, routers, children, config, image_turn), gateways=gateways,
        )  # fmt: skip
        for manifest in desired:
            if (manifest["kind"], manifest["metadata"]["name"]) == ("Deployment", deployment.name):
                made_room = {MAKE_ROOM: str(room)} if room else {}
                manifest["metadata"]["annotations"] = {**record, **made_room}
        if prefetch.job:
            desired.append(prefetch.job)
        plan = compute_plan(deployment, desired, children)
        kept = kept_objects(deployment, routers.stage)
        # Running pods may need objects that the current spec does not.
        actions = [
            one
            for one in plan.actions
            if not isinstance(one, Delete)
            or one.target.kind == "Job"
            or (current and not prefetch.holds and (one.target.kind, one.target.name) not in kept)
        ]
        plan = dataclasses.replace(plan, actions=actions)
        pending = plan.changes_pods(deployment.name) or current is None or prefetch.holds
        if plan.conflicts and problem is None:
            problem = Problem(
                "NameConflict",
                f"{', '.join(plan.conflicts)} exists and is not managed by this {KIND}; delete it or choose another "
                "name",
            )
    if plan.waits:
        requeue_after = 2.0
    autoscaler = child(children, autoscaler_kind(deployment), deployment.name)
    if problem is None:
        problem, claim_due = claim_pending(claim, pods, now)
        requeue_after = min((one for one in (requeue_after, claim_due) if one is not None), default=None)
    for due in (image_turn.requeue_after if image_turn else None, routers.requeue_after, prefetch.requeue_after):
        if due:
            requeue_after = min(due, requeue_after or due)
    seen = Observation(
        live, pods, claim, problem, room is not None, autoscaler, scaling, apis, pending, current, image_turn,
        contested, pod_events, routers, prefetch, start,
    )  # fmt: skip
    return Outcome(plan, expected_status(deployment, seen, config.cluster_domain, now), requeue_after)


def _choose_template(
    deployment: LLMDeployment,
    live: Json | None,
    config: OperatorConfig,
    image_turn: ImageTurn | None,
    image_volumes: bool,
) -> tuple[Json | None, Json | None, dict[str, str], Problem | None]:
    """The pod template to render (None: there is none), that of the current spec (None: the spec yields none), the
    annotation that records the template, and what is wrong with the spec."""
    may_update = image_turn is not None and image_turn.may_update
    try:
        template = pinned_template(deployment, live)
        if template is None or live is None or may_update:
            template = expected_template(deployment, config, image_volumes)
            replaced = recorded_image(live) if live and may_update else None
            image = config.image(deployment.spec.accelerator)
            return template, template, template_annotation(deployment, template, image, replaced), None
        if live["spec"].get("replicas") == deployment.replicas:
            return template, template, kept_annotation(live), None
        # The Deployment is written in any case.
        record = template_annotation(deployment, template, recorded_image(live), replaced_image(live))
        return template, template, record, None
    except InvalidTemplateError as error:
        problem = Problem(error.reason, f"{error}; running pods are unchanged")
        template = recorded_template(live)
        return template, None, kept_annotation(live) if live and template else {}, problem


def _choose_routers(
    deployment: LLMDeployment,
    routers: Routers,
    children: list[Observed],
    config: OperatorConfig,
    image_turn: ImageTurn | None,
) -> RouterPods | None:
    """What the routers are made of; None: there are none. Running ones stay as they are until the spec changes, or,
    with imagePolicy Follow, until it is their turn: files for another version of Envoy could be rejected."""
    if not routers.stage.has_routers:
        return None
    is_pinned = image_turn is None or bool(image_turn.waits_for)
    template = pinned_template(deployment, routers.live, names.ROUTER) if is_pinned else None
    if template is not None and routers.live is not None:
        config_map = child(children, "ConfigMap", names.router(deployment.name))
        content = unchanged_files(config_map) or expected_files(deployment, config)
        return RouterPods(template, content, kept_annotation(routers.live))
    content = expected_files(deployment, config)
    template = expected_router_template(deployment, config, content)
    record = template_annotation(deployment, template, config.router_image, component=names.ROUTER)
    return RouterPods(template, content, record)
