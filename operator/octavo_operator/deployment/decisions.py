"""Decide what an LLMDeployment needs now: pod template, stage of its routers, what waits and why. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.autoscaling.condition import Scaling
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.prefetch import Prefetch
from octavo_operator.deployment.prefetch import observe as observe_prefetch
from octavo_operator.deployment.rollout import Room, make_room
from octavo_operator.deployment.routing import Routers
from octavo_operator.deployment.routing import observe as observe_routers
from octavo_operator.deployment.world import DeploymentWorld
from octavo_operator.groups.scheduling import GroupSchedule, schedule_groups
from octavo_operator.kube.resources import IMAGE_VOLUMES
from octavo_operator.lora.summary import AdapterSummary, summarize
from octavo_operator.observed.diagnosis import Problem
from octavo_operator.observed.workload import Workload, groups, live_of
from octavo_operator.render import InvalidTemplateError, expected_template
from octavo_operator.render.template_checks import GROUPS_NOT_INSTALLED
from octavo_operator.render.workload import KIND as GROUPS
from octavo_operator.render.workload import is_grouped
from octavo_operator.times import parse_time
from octavo_operator.writes.plan import (
    kept_annotation,
    pinned_template,
    recorded_image,
    recorded_template,
    replaced_image,
    template_annotation,
)

Json = dict[str, Any]

_GATEWAY_SECONDS = 10.0  # objects applied together with an LLMDeployment, such as its gateway, arrive within this time


@dataclass(frozen=True)
class Template:
    """`rendered`: the pod template to render; None: there is none. `current`: the one of the current spec; None: the
    spec yields none, and `problem` says why. `record`: the annotation that records `rendered`."""

    rendered: Json | None = None
    current: Json | None = None
    record: dict[str, str] = field(default_factory=dict)
    problem: Problem | None = None


@dataclass(frozen=True)
class Decisions:
    """The decisions of one reconciliation. `reconcile` plans by them, and the status reports them."""

    workload: Workload = field(default_factory=Workload)
    is_grouped: bool = False  # its pods are to be groups
    is_other_kind: bool = False  # the live workload is a Deployment where groups are wanted, or the reverse
    template: Template = field(default_factory=Template)
    room: Room | None = None  # old pods are stopped before new ones start
    routers: Routers = field(default_factory=Routers)
    prefetch: Prefetch = field(default_factory=Prefetch)
    schedule: GroupSchedule = field(default_factory=GroupSchedule)  # groups that run, wait or are evicted
    scaling: Scaling = field(default_factory=Scaling)
    adapters: AdapterSummary | None = None  # None: LoRA is off
    pending: bool = False  # the live workload is not yet updated to the current spec
    problem: Problem | None = None  # with the operator's own work: an invalid patch, a rejected write
    dues: tuple[float | None, ...] = ()  # seconds until something is to be decided again

    @property
    def live(self) -> Json | None:
        """The Deployment or LeaderWorkerSet."""
        return self.workload.live


def decide(deployment: LLMDeployment, world: DeploymentWorld, config: OperatorConfig) -> Decisions:
    """Compute all decisions but those that follow from the plan (`pending`, `problem`)."""
    now = world.now
    grouped = is_grouped(deployment, world.apis)
    live = live_of(deployment.name, world.children, grouped)
    is_other_kind = live is not None and (live["kind"] == GROUPS) != grouped  # parallelism.nodes was changed
    room, room_due = make_room(deployment, live, world.pods, now)
    schedule = schedule_groups(deployment, live, groups(world.pods, world.workers), world.other_groups, now)
    routers = observe_routers(deployment, world)
    template = _choose_template(deployment, live, config, world)
    prefetch = observe_prefetch(deployment, None if is_other_kind else live, template.current, world)
    if prefetch.holds and live is not None:
        template = dataclasses.replace(template, rendered=recorded_template(live), record=kept_annotation(live))
    young = parse_time(deployment.created) + _GATEWAY_SECONDS - now if deployment.created else 0.0
    holds = deployment.routers_hold or bool(world.gateways) or young > 0
    turn_due = world.image_turn.requeue_after if world.image_turn else None
    young_due = young if deployment.scales_to_zero and young > 0 else None
    return Decisions(
        workload=Workload.of(live, world.pods, world.workers),
        is_grouped=grouped,
        is_other_kind=is_other_kind,
        template=template,
        room=room,
        routers=routers,
        prefetch=prefetch,
        schedule=schedule,
        scaling=dataclasses.replace(world.scaling, holds=holds),
        adapters=summarize(deployment, world.pods, world.adapters),
        dues=(room_due, turn_due, routers.requeue_after, prefetch.requeue_after, schedule.requeue_after, young_due),
    )


def _choose_template(
    deployment: LLMDeployment, live: Json | None, config: OperatorConfig, world: DeploymentWorld
) -> Template:
    may_update = world.image_turn is not None and world.image_turn.may_update
    try:
        if deployment.spec.parallelism.nodes > 1 and GROUPS not in world.apis:
            raise InvalidTemplateError(
                "parallelism.nodes: this cluster has no LeaderWorkerSets (leaderworkerset.x-k8s.io/v1), which groups "
                "of pods need; install LeaderWorkerSet, and the groups start, or set nodes to 1",
                GROUPS_NOT_INSTALLED,
            )
        template = pinned_template(deployment, live)
        if template is None or live is None or may_update:
            template = expected_template(deployment, config, IMAGE_VOLUMES in world.apis)
            replaced = recorded_image(live) if live and may_update else None
            image = config.image(deployment.spec.accelerator)
            return Template(template, template, template_annotation(deployment, template, image, replaced))
        if live["spec"].get("replicas") == deployment.replicas:
            return Template(template, template, kept_annotation(live))
        # The Deployment is written in any case.
        record = template_annotation(deployment, template, recorded_image(live), replaced_image(live))
        return Template(template, template, record)
    except InvalidTemplateError as error:
        problem = Problem(error.reason, f"{error}; running pods are unchanged")
        kept = recorded_template(live)
        return Template(kept, None, kept_annotation(live) if live and kept else {}, problem)
