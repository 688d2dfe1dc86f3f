"""Reconciliation of one LLMGateway, without I/O: from observed objects to a plan and a status."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import SpecError, stable_json
from octavo_operator.api.engine import FOLLOW
from octavo_operator.api.gateway import KIND, InvalidLLMGateway, LLMGateway
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.conditions import degraded, make_condition, set_times
from octavo_operator.deployment.reconcile import Outcome
from octavo_operator.deployment.routing import router_problem
from octavo_operator.diff import digest
from octavo_operator.gateway.links import is_available, ready_adapters
from octavo_operator.gateway.world import GatewayWorld
from octavo_operator.observed.diagnosis import Problem, is_finished
from octavo_operator.observed.workload import Workload
from octavo_operator.render import names, snippets
from octavo_operator.render.exposure import external_url, refusal, refused_ingress, render_exposure
from octavo_operator.render.gateway import (
    SETTINGS,
    GatewayPods,
    expected_template,
    render_gateway,
    selector,
    settings_digest,
    url,
)
from octavo_operator.render.router.gateway import MODEL_FILES, ModelName, files
from octavo_operator.render.router.objects import FILES, has_peers, unchanged_files
from octavo_operator.render.router.served import Served, gateway_spec, served_models
from octavo_operator.writes.plan import (
    Action,
    Annotate,
    Apply,
    Delete,
    Plan,
    PodFields,
    compute_plan,
    kept_annotation,
    ownership_of,
    pinned,
    record_annotation,
    recorded_image,
)

Json = dict[str, Any]

MAX_FILES_BYTES = 1_000_000  # of a ConfigMap; the API server takes 1 MiB
_KEPT = ("url", "models", "replicas", "readyReplicas", "selector")  # of the status, while the spec is invalid
_POD_FIELDS = ("routing", "tls", "tenants")


def parse(body: Json) -> LLMGateway | InvalidLLMGateway:
    """The LLMGateway of an object of the API; an InvalidLLMGateway where its spec does not parse."""
    try:
        return LLMGateway.from_json(body)
    except SpecError as error:
        return InvalidLLMGateway.of(body, error)


def reconcile_invalid(gateway: InvalidLLMGateway, now: float) -> Outcome:
    """Changes nothing until the spec is valid; running routers stay."""
    problem = Problem("InvalidSpec", f"{gateway.error}; correct it. Running routers are unchanged")
    conditions = [
        *(make_condition(kind, False, problem.reason, problem.message) for kind in ("Ready", "Progressing")),
        degraded(problem),
    ]
    set_times(conditions, gateway, now)
    kept = {name: value for name, value in gateway.status.items() if name in _KEPT}
    return Outcome(status={"observedGeneration": gateway.generation, **kept, "conditions": conditions})


def reconcile(gateway: LLMGateway, world: GatewayWorld, config: OperatorConfig) -> Outcome:
    """Compute the writes and the status."""
    if gateway.deleting:
        return Outcome()
    plan, planning = Plan(), None
    if not world.has_namesake or _has_service(gateway, world):
        plan, planning = _plan(gateway, world, config)
    pods = [pod for pod in world.router_pods if not is_finished(pod)]
    live = world.child("Deployment", names.router(gateway.name))
    pod_problem, requeue_after = router_problem(live, pods, world, "routing.resources")
    if plan.waits:
        requeue_after = 2.0
    problem = _namesake(gateway, world) or world.write_problem or planning or pod_problem
    return Outcome(plan, _status(gateway, world, config, plan, problem), requeue_after)


def _status(
    gateway: LLMGateway, world: GatewayWorld, config: OperatorConfig, plan: Plan, problem: Problem | None
) -> Json:
    """Return the whole status. `problem`: one that keeps routers from serving by the current spec."""
    served = served_models(gateway, world.candidates)
    workload = Workload.of(world.child("Deployment", names.router(gateway.name)))
    progress = _progressing(gateway, workload, _is_pending(plan), world.write_problem, problem)
    harmless = _conflict(served) or _unexposed(gateway, world, config) or world.field_conflict
    conditions = [
        _ready(gateway, workload, progress, problem, world.rejected is not None),
        progress,
        degraded(problem or harmless),
    ]
    set_times(conditions, gateway, world.now)
    statuses = {one.deployment.name: one.deployment.status for one in world.candidates}
    models = [
        {"name": one.name, "llmdeployment": one.owner, "ready": any(_is_ready(one, statuses[it]) for it in one.pools)}
        for one in served.models
    ]
    outside = external_url(gateway, *(world.child(kind, gateway.name) for kind in ("Ingress", "HTTPRoute", "Service")))
    return {
        "observedGeneration": gateway.generation,
        "replicas": workload.replicas,
        "readyReplicas": workload.ready,
        "selector": ",".join(f"{name}={value}" for name, value in selector(gateway).items()),
        "url": outside or url(gateway, config.cluster_domain),
        "models": models,
        "conditions": conditions,
    }


def _namesake(gateway: LLMGateway, world: GatewayWorld) -> Problem | None:
    if not world.has_namesake:
        return None
    return Problem(
        "NameConflict",
        f"an LLMDeployment is named {gateway.name}, too, and both need a Service of that name; rename one of them",
    )


def _is_pending(plan: Plan) -> bool:
    """True if the Deployment of routers is yet to be updated to the current spec."""
    applied = (one for one in plan.actions if isinstance(one, Apply) and not one.is_revert)
    return any(one.manifest["kind"] == "Deployment" for one in applied)


def _is_ready(model: ModelName, status: Json) -> bool:
    return is_available(status) and (not model.parent or model.served in ready_adapters(status))


def _has_service(gateway: LLMGateway, world: GatewayWorld) -> bool:
    """True if the Service of the gateway's name is its own: it was there before its namesake."""
    service = world.child("Service", gateway.name)
    return service is not None and ownership_of(service, gateway) == "ours"


def _plan(gateway: LLMGateway, world: GatewayWorld, config: OperatorConfig) -> tuple[Plan, Problem | None]:
    pods = _choose_pods(gateway, world, config)
    size = sum(len(content.encode()) for content in pods.files.values())
    if size > MAX_FILES_BYTES:
        text = (
            f"the configuration of its routers has {size} bytes, and a ConfigMap takes {MAX_FILES_BYTES}; select fewer "
            "LLMDeployments and use several gateways. Routers keep the last configuration that fitted"
        )
        return Plan(), Problem("ConfigTooLarge", text)
    desired = [*render_gateway(gateway, world.candidates, config, pods), *render_exposure(gateway, config, world.apis)]
    plan = compute_plan(gateway, desired, world.children)
    if refused_ingress(gateway, config):
        plan.actions[:] = [one for one in plan.actions if not _deletes(one, "Ingress")]
    stamp = {FILES: digest(pods.files)}
    for one in world.children:
        if one.kind != "Pod" or "deletionTimestamp" in one.body["metadata"]:
            continue
        annotations = one.body["metadata"].get("annotations") or {}
        if annotations and not stamp.items() <= annotations.items():
            plan.actions.append(Annotate(one, stamp))
    problem = None
    if plan.conflicts:
        text = f"{', '.join(plan.conflicts)} exists and is not managed by this {KIND}; delete it or choose another name"
        problem = Problem("NameConflict", text)
    return plan, problem


def _choose_pods(gateway: LLMGateway, world: GatewayWorld, config: OperatorConfig) -> GatewayPods:
    """Return the pods and files of the routers. Running ones stay as they are until the spec changes, or, with
    imagePolicy Follow, the operator's image of routers: another version of Envoy could reject the files. The files
    that name the models always follow them."""
    content = files(gateway_spec(gateway, world.candidates, config))
    live = world.child("Deployment", names.router(gateway.name))
    fields = _pod_fields(gateway)
    template = pinned(gateway, live, fields)
    config_map = world.child("ConfigMap", names.router(gateway.name))
    annotations = (config_map or {}).get("metadata", {}).get("annotations") or {}
    kept = unchanged_files(config_map) if annotations.get(SETTINGS) == settings_digest(gateway) else None
    is_behind = config.image_policy == FOLLOW and live is not None and recorded_image(live) != config.router_image
    if not kept and template and gateway.spec.tenants and not has_peers(template):
        is_behind = True  # its picker is of an operator before: the limits in these files it would not keep
    if template is None or live is None or is_behind:
        template = expected_template(gateway, config, content)
        return GatewayPods(template, content, record_annotation(gateway, template, fields, config.router_image))
    if kept:
        content = {**kept, **{name: content[name] for name in MODEL_FILES}}
    return GatewayPods(template, content, kept_annotation(live))


def _pod_fields(gateway: LLMGateway) -> PodFields:
    restarted = {"restartedAt": gateway.restarted_at} if gateway.restarted_at else {}

    def of(fields: Json) -> str:
        return digest({**{name: fields[name] for name in _POD_FIELDS if name in fields}, **restarted})

    return PodFields(of(stable_json(gateway.spec)), of(stable_json(gateway.spec, or_default=True)))


def _progressing(
    gateway: LLMGateway, seen: Workload, is_pending: bool, refused: Problem | None, problem: Problem | None
) -> Json:
    """`is_pending`: their Deployment is not yet as the spec wants it; `refused`: a write that was; `problem`: any."""
    if refused:
        return make_condition("Progressing", False, refused.reason, refused.message)
    if seen.live is None or is_pending or seen.wanted != gateway.spec.replicas:
        if problem:
            return make_condition("Progressing", False, problem.reason, problem.message)
        return make_condition("Progressing", True, "Applying", "the spec is being applied")
    if seen.is_complete:
        return make_condition("Progressing", False, "Complete", "all routers are of the latest spec")
    done = f"{seen.updated} of {seen.wanted} routers are of the latest spec, {seen.available} serve requests"
    if any(one.get("reason") == "ProgressDeadlineExceeded" for one in seen.conditions):
        cause = f"; {problem.message}" if problem else "; see the log of a router that is not ready"
        return make_condition("Progressing", False, "ProgressDeadlineExceeded", f"{done}{cause}")
    reason = "RollingOut" if seen.replicas > seen.updated or not seen.is_observed else "Starting"
    return make_condition("Progressing", True, reason, done)


def _ready(gateway: LLMGateway, seen: Workload, progressing: Json, problem: Problem | None, is_behind: bool) -> Json:
    """All routers serve, all of the latest spec, and none has rejected an update of its files (`is_behind`)."""
    count = f"{seen.available} of {gateway.spec.replicas} routers serve requests"
    if progressing["reason"] == "Complete" and not is_behind:
        return make_condition("Ready", True, "Ready", count)
    if problem:
        return make_condition("Ready", False, problem.reason, f"{count}; {problem.message}")
    if seen.available < gateway.spec.replicas:
        return make_condition("Ready", False, "Starting", count)
    return make_condition("Ready", False, progressing["reason"], f"{count}; {progressing['message']}")


def _conflict(served: Served) -> Problem | None:
    return Problem("ModelNameConflict", "; ".join(served.conflicts)) if served.conflicts else None


def _deletes(action: Action, kind: str) -> bool:
    return isinstance(action, Delete) and action.target.kind == kind


def _unexposed(gateway: LLMGateway, world: GatewayWorld, config: OperatorConfig) -> Problem | None:
    """Return a problem if it cannot be reached from outside as specified; in the cluster it serves all the same."""
    if why := refused_ingress(gateway, config) or snippets.refused_service(gateway.spec.service.annotations, config):
        return Problem(snippets.SNIPPET, why)
    if gateway.spec.http_route is None:
        return None
    if "HTTPRoute" not in world.apis:
        return Problem(
            "GatewayAPINotInstalled",
            "this cluster has no HTTPRoutes (gateway.networking.k8s.io/v1); install the Gateway API, or remove "
            "spec.httpRoute. The Service keeps serving",
        )
    if why := refusal(world.child("HTTPRoute", gateway.name)):
        return Problem("RouteNotAccepted", f"the HTTPRoute is not accepted; correct spec.httpRoute. {why}")
    return None
