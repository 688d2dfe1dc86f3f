"""Reconciliation of one LLMDeployment, without I/O: from observed objects to a plan and a status."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo_operator.api import KIND, InvalidLLMDeployment, LLMDeployment
from octavo_operator.api.schema import SpecError
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.decisions import Decisions, decide
from octavo_operator.deployment.rollout import MAKE_ROOM
from octavo_operator.deployment.routing import Routers, kept_objects
from octavo_operator.deployment.status import expected_status, invalid_status
from octavo_operator.deployment.world import DeploymentWorld
from octavo_operator.groups.scheduling import HELD
from octavo_operator.kube.store import ObjectRef, Observed
from octavo_operator.observed.children import pods_of
from octavo_operator.observed.diagnosis import Problem, claim_pending
from octavo_operator.observed.workload import Workload, live_of
from octavo_operator.render import names, render
from octavo_operator.render.group_token import expected_token, needs_token
from octavo_operator.render.lora import LISTED, list_digest
from octavo_operator.render.router.objects import RouterPods, expected_files, expected_router_template, unchanged_files
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
    template_annotation,
    workload_refs,
)

Json = dict[str, Any]

_TERMINATING_SECONDS = 2.0  # between looks at children of a deleted owner of the same name


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


def reconcile_invalid(deployment: InvalidLLMDeployment, children: Sequence[Observed], now: float) -> Outcome:
    """Changes nothing until the spec is valid; running pods stay."""
    live = live_of(deployment.name, children, grouped=True)
    workload = Workload.of(live, pods_of(children), pods_of(children, names.WORKER))
    return Outcome(status=invalid_status(deployment, workload, now))


def reconcile(deployment: LLMDeployment, world: DeploymentWorld, config: OperatorConfig) -> Outcome:
    """Compute the writes and the status."""
    if deployment.deleting:
        return Outcome()
    decisions = decide(deployment, world, config)
    plan = Plan()
    if decisions.template.rendered is not None:
        plan = _plan(deployment, world, config, decisions)
    problem = decisions.template.problem or world.write_problem or _name_conflict(plan)
    claim_due = None
    if problem is None:
        problem, claim_due = claim_pending(world.claim, world.pods, world.now)
    pending = plan.changes_pods(deployment.name) or decisions.template.current is None or decisions.prefetch.holds
    decisions = dataclasses.replace(decisions, pending=pending, problem=problem)
    dues = [due for due in (*decisions.dues, claim_due, _TERMINATING_SECONDS if plan.waits else None) if due]
    return Outcome(plan, expected_status(deployment, world, decisions, config), min(dues, default=None))


def _plan(deployment: LLMDeployment, world: DeploymentWorld, config: OperatorConfig, decisions: Decisions) -> Plan:
    routers, prefetch, schedule = decisions.routers, decisions.prefetch, decisions.schedule
    desired = render(
        deployment,
        config,
        template=decisions.template.rendered,
        unavailable=decisions.room.unavailable if decisions.room else None,
        apis=world.apis,
        stage=routers.stage,
        routers=_choose_routers(deployment, world, config, routers),
        gateways=world.gateways,
        held=schedule.num_held,
    )
    _annotate(desired, deployment.name, decisions)
    if prefetch.job:
        desired.append(prefetch.job)
    plan = compute_plan(deployment, desired, world.children)
    kept = kept_objects(deployment, routers.stage)
    actions = [one for one in plan.actions if _may_be_done(one, decisions, kept)]
    is_new = decisions.live is None or decisions.is_other_kind
    if decisions.is_grouped and (is_new or needs_token(deployment, [*world.pods, *world.workers])):
        actions.insert(0, CreateToken(expected_token(deployment)))
    if schedule.evicted:
        actions.append(Evict(schedule.evicted))
    actions += _refresh_adapter_lists(deployment, world)
    return dataclasses.replace(plan, actions=actions)


def _name_conflict(plan: Plan) -> Problem | None:
    if not plan.conflicts:
        return None
    return Problem(
        "NameConflict",
        f"{', '.join(plan.conflicts)} exists and is not managed by this {KIND}; delete it or choose another name",
    )


def _annotate(desired: list[Json], name: str, decisions: Decisions) -> None:
    """Add to the workload of an LLMDeployment what later reconciliations need to know."""
    notes = dict(decisions.template.record)
    if decisions.room:
        notes[MAKE_ROOM] = str(decisions.room)
    if decisions.schedule.held:
        notes[HELD] = str(decisions.schedule.held)
    for manifest in desired:
        meta = manifest["metadata"]
        if (manifest["kind"], meta["name"]) in workload_refs(name):
            meta["annotations"] = {**meta.get("annotations", {}), **notes}


def _refresh_adapter_lists(deployment: LLMDeployment, world: DeploymentWorld) -> list[Action]:
    """Annotate running pods whose list of adapters has changed: their kubelets then update it at once."""
    if deployment.spec.adapters is None:
        return []
    stamp: dict[str, str] = {LISTED: list_digest(deployment)}
    behind: list[Action] = []
    for one in world.children:
        meta = one.body["metadata"] if one.kind == "Pod" else {}
        annotations = meta.get("annotations") or {}
        if "deletionTimestamp" not in meta and LISTED in annotations and not stamp.items() <= annotations.items():
            behind.append(Annotate(one, stamp))
    return behind


def _may_be_done(action: Action, decisions: Decisions, kept: frozenset[ObjectRef]) -> bool:
    """False for deletions of objects that running pods may need, though the current spec does not."""
    if not isinstance(action, Delete) or action.target.kind == "Job":
        return True
    if decisions.template.current is None or decisions.prefetch.holds:
        return False
    return (action.target.kind, action.target.name) not in kept


def _choose_routers(
    deployment: LLMDeployment, world: DeploymentWorld, config: OperatorConfig, routers: Routers
) -> RouterPods | None:
    """Return the pods and files of the routers; None: there are none. Running ones stay as they are until the spec
    changes, or, with imagePolicy Follow, until it is their turn: another version of Envoy could reject the files."""
    if not routers.stage.has_routers:
        return None
    is_pinned = world.image_turn is None or bool(world.image_turn.waits_for)
    template = pinned_template(deployment, routers.live, names.ROUTER) if is_pinned else None
    if template is not None and routers.live is not None:
        content = unchanged_files(world.child("ConfigMap", names.router(deployment.name)))
        return RouterPods(template, content or expected_files(deployment, config), kept_annotation(routers.live))
    content = expected_files(deployment, config)
    template = expected_router_template(deployment, config, content)
    record = template_annotation(deployment, template, config.router_image, component=names.ROUTER)
    return RouterPods(template, content, record)
