"""Reconciliation of one LLMDeployment, without I/O: from observed objects to a plan and a status."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from octavo_operator.api import KIND, InvalidLLMDeployment, LLMDeployment
from octavo_operator.api.schema import SpecError
from octavo_operator.autoscaling.condition import Scaling
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.image_rollout import ImageTurn
from octavo_operator.deployment.prefetch import Prefetch
from octavo_operator.deployment.prefetch import observe as observe_prefetch
from octavo_operator.deployment.rollout import MAKE_ROOM, Room, make_room
from octavo_operator.deployment.routing import Routers, kept_objects, observe
from octavo_operator.deployment.status import Observation, expected_status, invalid_status
from octavo_operator.groups.places import HELD, Places, Rivals, find_places
from octavo_operator.kube.resources import IMAGE_VOLUMES
from octavo_operator.kube.store import ObjectRef, Observed
from octavo_operator.lora.summary import Said, summarize
from octavo_operator.observed.children import child, pods_of
from octavo_operator.observed.diagnosis import Events, Problem, claim_pending
from octavo_operator.observed.workload import Workload, groups, live_of
from octavo_operator.render import InvalidTemplateError, expected_template, names, render
from octavo_operator.render.adapters import LISTED, list_digest
from octavo_operator.render.autoscaling import autoscaler_kind
from octavo_operator.render.group_token import expected_token, needs_token
from octavo_operator.render.router.objects import (
    RouterPods,
    expected_files,
    expected_router_template,
    unchanged_files,
)
from octavo_operator.render.snippets import SNIPPET, refused_service
from octavo_operator.render.template_checks import GROUPS_NOT_INSTALLED
from octavo_operator.render.workload import KIND as GROUPS
from octavo_operator.render.workload import is_grouped
from octavo_operator.times import parse_time
from octavo_operator.writes.plan import (
    Action,
    Annotate,
    CreateToken,
    Delete,
    Evict,
    Plan,
    compute_plan,
    kept_annotation,
    pinned_template,
    recorded_image,
    recorded_template,
    replaced_image,
    template_annotation,
    workload_refs,
)

Json = dict[str, Any]

_GATEWAY_SECONDS = 10.0  # in which what was created with an LLMDeployment arrives, such as its gateway


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
    live = live_of(deployment.name, children, grouped=True)
    workload = Workload.of(live, pods_of(children), pods_of(children, names.WORKER))
    return Outcome(status=invalid_status(deployment, workload, now))


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
    rivals: Callable[[], Rivals] = Rivals,
    said: Said = MappingProxyType({}),
    rejected: Problem | None = None,
) -> Outcome:
    """`children`: observed objects of the LLMDeployment; `apis`: optional kinds and features that the cluster has;
    `problem`: of the last execution of the plan, for the status; `image_turn`: of one that follows the operator's
    engine image; `contested`: an object that others keep changing; `pod_events`: of hanging pods; `start`: of
    the last pod that became ready; `gateways`: names of the LLMGateways that serve it;
    `rivals`: groups of others that wait for places; `said`: by its pods, of their LoRA adapters;
    `rejected`: what Envoy says of an update of its routers."""
    if deployment.deleting:
        return Outcome()
    young = parse_time(deployment.created) + _GATEWAY_SECONDS - now if deployment.created else 0.0
    scaling = dataclasses.replace(scaling, holds=deployment.routers_hold or bool(gateways) or young > 0)
    grouped = is_grouped(deployment, apis)
    live = live_of(deployment.name, children, grouped)
    is_other_kind = live is not None and (live["kind"] == GROUPS) != grouped  # parallelism.nodes was changed
    pods, workers = pods_of(children), pods_of(children, names.WORKER)
    claim = next((one.body for one in children if one.kind == "PersistentVolumeClaim"), None)
    room, requeue_after = make_room(deployment, live, pods, now)
    places = find_places(deployment, live, groups(pods, workers), rivals, now)
    plan, pending = Plan(), True
    routers = observe(deployment, children, pod_events, now, rejected)
    template, current, record, invalid = _choose_template(deployment, live, config, image_turn, apis)
    problem = invalid or problem
    prefetch = observe_prefetch(deployment, None if is_other_kind else live, current, children, pod_events, now)
    if prefetch.holds and live is not None:
        template, record = recorded_template(live), kept_annotation(live)
    if template is not None:
        unavailable = room.unavailable if room else None
        desired = render(
            deployment, config, template=template, unavailable=unavailable, apis=apis, stage=routers.stage,
            routers=_choose_routers(deployment, routers, children, config, image_turn), gateways=gateways,
            held=places.num_held,
        )  # fmt: skip
        _annotate(desired, deployment.name, record, room, places)
        if prefetch.job:
            desired.append(prefetch.job)
        plan = compute_plan(deployment, desired, children)
        kept = kept_objects(deployment, routers.stage)
        actions = [one for one in plan.actions if _may_be_done(one, current, prefetch, kept)]
        if grouped and (live is None or is_other_kind or needs_token(deployment, [*pods, *workers])):
            actions.insert(0, CreateToken(expected_token(deployment)))
        if places.evicted:
            actions.append(Evict(places.evicted))
        actions += _hurried_kubelets(deployment, children)
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
    dues = [one.requeue_after for one in (image_turn, routers, prefetch, places) if one is not None]
    for due in (*dues, young if deployment.scales_to_zero and young > 0 else None):
        if due:
            requeue_after = min(due, requeue_after or due)
    seen = Observation(
        live, pods, claim, problem, room is not None, autoscaler, scaling, apis, pending, current, image_turn,
        contested or _left_out(deployment, config), pod_events, routers, prefetch, start, workers, places,
        summarize(deployment, pods, said),
    )  # fmt: skip
    return Outcome(plan, expected_status(deployment, seen, config.cluster_domain, now), requeue_after)


def _annotate(desired: list[Json], name: str, record: dict[str, str], room: Room | None, places: Places) -> None:
    """Adds to the workload of an LLMDeployment what is to be known of it later."""
    notes = {**record, **({MAKE_ROOM: str(room)} if room else {}), **({HELD: str(places.held)} if places.held else {})}
    for manifest in desired:
        meta = manifest["metadata"]
        if (manifest["kind"], meta["name"]) in workload_refs(name):
            meta["annotations"] = {**meta.get("annotations", {}), **notes}


def _hurried_kubelets(deployment: LLMDeployment, children: list[Observed]) -> list[Action]:
    """Tells the kubelets of running pods that their list of adapters has changed."""
    if deployment.spec.adapters is None:
        return []
    stamp, behind = {LISTED: list_digest(deployment)}, []
    for one in children:
        meta = one.body["metadata"] if one.kind == "Pod" else {}
        annotations = meta.get("annotations") or {}
        if "deletionTimestamp" not in meta and LISTED in annotations and not stamp.items() <= annotations.items():
            behind.append(Annotate(one, stamp))
    return list(behind)


def _left_out(deployment: LLMDeployment, config: OperatorConfig) -> Problem | None:
    why = refused_service(deployment.spec.service.annotations, config)
    return Problem(SNIPPET, why) if why else None


def _may_be_done(action: Action, current: Json | None, prefetch: Prefetch, kept: frozenset[ObjectRef]) -> bool:
    """Running pods may need objects that the current spec does not."""
    if not isinstance(action, Delete) or action.target.kind == "Job":
        return True
    return current is not None and not prefetch.holds and (action.target.kind, action.target.name) not in kept


def _choose_template(
    deployment: LLMDeployment,
    live: Json | None,
    config: OperatorConfig,
    image_turn: ImageTurn | None,
    apis: frozenset[str],
) -> tuple[Json | None, Json | None, dict[str, str], Problem | None]:
    """The pod template to render (None: there is none), that of the current spec (None: the spec yields none), the
    annotation that records the template, and what is wrong with the spec."""
    may_update = image_turn is not None and image_turn.may_update
    try:
        if deployment.spec.parallelism.nodes > 1 and GROUPS not in apis:
            raise InvalidTemplateError(
                "parallelism.nodes: this cluster has no LeaderWorkerSets (leaderworkerset.x-k8s.io/v1), which groups "
                "of pods need; install LeaderWorkerSet, and the groups start, or set nodes to 1",
                GROUPS_NOT_INSTALLED,
            )
        template = pinned_template(deployment, live)
        if template is None or live is None or may_update:
            template = expected_template(deployment, config, IMAGE_VOLUMES in apis)
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
