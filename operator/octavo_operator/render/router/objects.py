"""The objects of `spec.routing.strategy: prefix`: routers between the Service and the engine's pods.

The Service of clients keeps its name, address and port; its selector alone becomes the routers'. The engine's pods are
the same with and without routers.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.api.common import RESTARTED_AT
from octavo_operator.api.lifecycle import Lifecycle
from octavo_operator.api.network import Affinity, Hold
from octavo_operator.api.resources import Resources
from octavo_operator.config import OperatorConfig
from octavo_operator.diff import digest, quantity
from octavo_operator.render import names
from octavo_operator.render.router.body_limits import most_bytes
from octavo_operator.render.router.envoy import Endpoint, Pool, RouterSpec, files
from octavo_operator.render.router.replies import MAX_BODY_BYTES

Json = dict[str, Any]

FILES = "octavo.dev/router-files"  # annotation of the ConfigMap: hash of its files, as the operator wrote them
BOOTSTRAP = "octavo.dev/router-bootstrap"  # annotation of the pods: hash of the file that Envoy reads once
_CONFIG_VOLUME, _PEERS = "config", "peers"
_SAID_VOLUME, _SAID_PATH = "said", "/run/octavo-router"  # what Envoy has said of files that it rejected
_SAID_FILE = f"{_SAID_PATH}/rejections"
_REQUESTS = {"cpu": "100m", "memory": "128Mi"}
_MEMORY_LIMIT = "1Gi"  # eight images of 20 MB at once: a router holds copies of each for a moment
_PICKER_REQUESTS = {"cpu": "50m", "memory": "64Mi"}
_PICKER_MEMORY_LIMIT = "256Mi"
PICKER_GRPC_PORT = 9002  # on loopback
_WORKERS = 2  # threads of a router without a limit of CPU: not one for each core of the node


class Stage(enum.Enum):
    """The pods that answer at the Service of clients. Each step is taken only when the one before it serves."""

    NONE = "the engine's pods"
    STARTING = "the engine's pods, while the first router starts"
    ROUTED = "routers; earlier connections to pods continue"
    CLOSED = "routers, and nobody reaches the pods but them"
    LEAVING = "routers, until the Service selects the pods again"
    DRAINING = "the engine's pods; routers finish what they have"

    @property
    def is_routed(self) -> bool:
        """True if the Service of clients is to select the routers."""
        return self in (Stage.ROUTED, Stage.CLOSED)

    @property
    def has_routers(self) -> bool:
        """True if the spec asks for routers."""
        return self in (Stage.STARTING, Stage.ROUTED, Stage.CLOSED)


@dataclass(frozen=True)
class RouterPods:
    """Routers as they are rendered: their pod template, their files, and the annotation that records the template."""

    template: Json
    files: dict[str, str]
    record: dict[str, str]


def router_spec(affinity: Affinity) -> RouterSpec:
    """The settings of Envoy's configuration."""
    limits = _resources(affinity.resources, _REQUESTS, _MEMORY_LIMIT)["limits"]
    memory, workers = int(quantity(limits["memory"])), _workers(limits)
    return RouterSpec(
        affinity.session_headers, affinity.load_factor, affinity.key_bytes, memory_bytes=memory, workers=workers
    )


def _settings(deployment: LLMDeployment) -> RouterSpec:
    prefix = deployment.spec.routing.routers
    assert prefix is not None
    seconds = prefix.hold.max_seconds if deployment.routers_hold else 0
    most = most_bytes(deployment) or MAX_BODY_BYTES
    own = dataclasses.replace(router_spec(prefix), picker_port=PICKER_GRPC_PORT, most_bytes=most)
    return dataclasses.replace(own, hold_seconds=seconds)


def _lifecycle(deployment: LLMDeployment) -> Lifecycle:
    prefix, lifecycle = deployment.spec.routing.routers, deployment.spec.lifecycle
    return holding(lifecycle, prefix.hold) if prefix and deployment.routers_hold else lifecycle


def holding(lifecycle: Lifecycle, hold: Hold) -> Lifecycle:
    """Return the lifecycle of routers that hold requests: they end once every held request is served or has timed
    out."""
    seconds = max(lifecycle.drain_seconds, hold.max_seconds)
    longer = dataclasses.replace(lifecycle, drain_seconds=seconds, termination_grace_period_seconds=None)
    grace = max(lifecycle.grace_seconds, longer.grace_seconds)
    return dataclasses.replace(longer, termination_grace_period_seconds=grace)


def expected_files(deployment: LLMDeployment, config: OperatorConfig) -> dict[str, str]:
    """The files of the ConfigMap, by name. Needs strategy prefix."""
    # With the dot at its end the name is complete: no search domains are tried.
    service = f"{names.pods_service(deployment.name)}.{deployment.namespace}.svc.{config.cluster_domain}."
    endpoint = Endpoint(service, names.API_PORT, names.MANAGEMENT_PORT)
    return files(_settings(deployment), Pool(deployment.name, (endpoint,)))


def expected_config_map(deployment: LLMDeployment, content: dict[str, str]) -> Json:
    """The ConfigMap with the files; a mounted directory of it is updated in running pods."""
    out = _manifest(deployment, "v1", "ConfigMap", {"data": content})
    out["metadata"]["annotations"] = {FILES: digest(content)}
    return out


def unchanged_files(config_map: Json | None) -> dict[str, str] | None:
    """The files of a live ConfigMap; None: there is none, or others have changed it."""
    if config_map is None:
        return None
    content = config_map.get("data") or {}
    written = (config_map["metadata"].get("annotations") or {}).get(FILES)
    return dict(content) if written == digest(content) else None


def expected_router_template(deployment: LLMDeployment, config: OperatorConfig, content: dict[str, str]) -> Json:
    """The routers' pod template. `content`: the files that they are given."""
    prefix = deployment.spec.routing.routers
    assert prefix is not None
    assigned = deployment.spec.cluster_assigned_ids
    frame = PodFrame(
        config_map=names.router(deployment.name),
        labels=names.labels(deployment, names.ROUTER),
        selector=names.selector(deployment, names.ROUTER),
        lifecycle=_lifecycle(deployment),
        affinity=prefix,
        image_pull_secrets=(*config.image_pull_secrets, *deployment.spec.engine.image_pull_secrets),
        assigned_ids=config.cluster_assigned_ids if assigned is None else assigned,
        service_account=deployment.name,
        restarted_at=deployment.restarted_at,
        hold=prefix.hold if deployment.routers_hold else dataclasses.replace(prefix.hold, max_requests=0),
    )
    return pod_template(frame, _settings(deployment), config.router_image, content)


@dataclass(frozen=True)
class PodFrame:
    """The differences among routers' pods.

    `config_map` holds the files of their configuration; `affinity` their resources; `assigned_ids`: the cluster sets
    uid and gid; `secrets`: volumes beside the configuration, keyed by mount folder; `service_account`: None is the
    namespace's default; `hold`: what the picker lets wait for a first replica, None without a picker; `limits`: the
    file of tenants' limits, for the picker; `peers`: the DNS name of all routers, which share these limits (None: each
    has its share); `restarted_at`: the owner's restart annotation.
    """

    config_map: str
    labels: dict[str, str]
    selector: dict[str, str]
    lifecycle: Lifecycle
    affinity: Affinity
    image_pull_secrets: tuple[str, ...]
    assigned_ids: bool
    service_account: str | None = None
    secrets: dict[str, Json] = field(default_factory=dict)
    hold: Hold | None = None
    limits: str | None = None
    peers: str | None = None
    restarted_at: str | None = None


def _spread(selector: dict[str, str]) -> Json:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector},
    }


def pod_template(frame: PodFrame, settings: RouterSpec, image: str, content: dict[str, str]) -> Json:
    """The pod template of routers, of an LLMDeployment's or of a gateway's."""
    lifecycle = frame.lifecycle
    ids = {} if frame.assigned_ids else dict.fromkeys(("runAsUser", "runAsGroup"), names.USER_ID)
    wanted = _resources(frame.affinity.resources, _REQUESTS, _MEMORY_LIMIT)
    drain = [str(number) for number in (lifecycle.pre_stop_seconds, lifecycle.drain_seconds, settings.admin_port)]
    volumes, mounts = _volumes(frame, settings)
    pod: Json = {
        "containers": [
            _envoy(image, settings, mounts, wanted, drain),
            *([_picker(image, settings, frame, frame.hold, drain)] if frame.hold else []),
        ],
        "volumes": volumes,
        **({"serviceAccountName": frame.service_account} if frame.service_account else {}),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, **ids, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": lifecycle.grace_seconds,
        "imagePullSecrets": [{"name": name} for name in dict.fromkeys(frame.image_pull_secrets)],
        "topologySpreadConstraints": [_spread(frame.selector)],
    }
    restarted = {RESTARTED_AT: frame.restarted_at} if frame.restarted_at else {}
    metadata = {"labels": frame.labels, "annotations": {BOOTSTRAP: digest(content["envoy.yaml"]), **restarted}}
    return {"metadata": metadata, "spec": {name: value for name, value in pod.items() if value != []}}


def _volumes(frame: PodFrame, settings: RouterSpec) -> tuple[list[Json], list[Json]]:
    """The volumes of a pod, and where Envoy mounts them."""
    volumes: list[Json] = [
        {"name": _CONFIG_VOLUME, "configMap": {"name": frame.config_map}},
        {"name": _SAID_VOLUME, "emptyDir": {"sizeLimit": "1Mi"}},
    ]
    mounts: list[Json] = [
        {"name": _CONFIG_VOLUME, "mountPath": settings.directory, "readOnly": True},
        {"name": _SAID_VOLUME, "mountPath": _SAID_PATH},
    ]
    for folder, source in frame.secrets.items():
        name = folder.rpartition("/")[2]
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": folder, "readOnly": True})
    return volumes, mounts


def _envoy(image: str, settings: RouterSpec, mounts: list[Json], wanted: Json, drain: list[str]) -> Json:
    """The container of Envoy. ``wanted``: its resources; ``drain``: arguments of the script that ends it."""
    return {
        "name": names.ROUTER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["bash", "-c", script("router.sh"), "router"],
        "args": [
            _SAID_FILE,
            "--disable-hot-restart",
            "--config-path",
            f"{settings.directory}/envoy.yaml",
            "--concurrency",
            str(_workers(wanted["limits"])),
            "--log-level",
            "warning",
        ],
        "ports": [
            {"name": "http", "containerPort": settings.port, "protocol": "TCP"},
            {"name": "metrics", "containerPort": settings.metrics_port, "protocol": "TCP"},
        ],
        "resources": wanted,
        # The listener of clients is there once Envoy has accepted its configuration and looked for replicas once.
        "readinessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 2, "timeoutSeconds": 2},
        "livenessProbe": {
            "httpGet": {"path": "/ready", "port": "metrics", "scheme": "HTTP"},
            "initialDelaySeconds": 30,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "lifecycle": _pre_stop(drain),
        "volumeMounts": mounts,
        **_hardened(),
    }


def has_peers(template: Json) -> bool:
    """True if the routers' pickers of this pod template keep tenants' limits together."""
    containers = template["spec"]["containers"]
    return any(port["name"] == _PEERS for one in containers for port in one.get("ports") or [])


def _hardened() -> Json:
    return {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _pre_stop(drain: list[str]) -> Json:
    return {"preStop": {"exec": {"command": ["bash", "-c", script("drain.sh"), "drain", *drain]}}}


def _picker(image: str, settings: RouterSpec, frame: PodFrame, hold: Hold, drain: list[str]) -> Json:
    """The container beside a router that picks replicas and holds requests. It ends when the router has nothing left:
    what it holds would be lost. A picker that dies is started again inside of it: a container that ends would make the
    pod unready, and Envoy serves without."""
    flags: dict[str, object] = {
        "port": settings.picker_port,
        "admin-port": settings.admin_port,
        "management-port": names.PICKER_PORT,
        "control-port": names.CONTROL_PORT,
        "hold-requests": hold.max_requests,
        "hold-seconds": hold.max_seconds,
        "rejections": _SAID_FILE,
    }
    if frame.limits:
        flags |= {"tenants": f"{settings.directory}/{frame.limits}", "engine-port": names.MANAGEMENT_PORT}
    ports = [
        {"name": "management", "containerPort": names.PICKER_PORT, "protocol": "TCP"},
        {"name": "control", "containerPort": names.CONTROL_PORT, "protocol": "TCP"},
    ]
    if frame.peers:
        flags |= {"peers": frame.peers, "peer-address": "$(POD_IP)", "peer-port": names.PEER_PORT}
        ports.append({"name": _PEERS, "containerPort": names.PEER_PORT, "protocol": "TCP"})
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}
    places = {_CONFIG_VOLUME: settings.directory} if frame.limits else {}
    places[_SAID_VOLUME] = _SAID_PATH
    mounts = [{"name": name, "mountPath": path, "readOnly": True} for name, path in places.items()]
    held = {"httpGet": {"path": "/held", "port": "management", "scheme": "HTTP"}, "timeoutSeconds": 5}
    return {
        "name": names.PICKER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["bash", "-c", script("picker.sh"), "picker"],
        "args": [f"--{name}={value}" for name, value in flags.items()],
        **({"env": [address]} if frame.peers else {}),
        "ports": ports,
        "resources": _resources(frame.affinity.picker_resources, _PICKER_REQUESTS, _PICKER_MEMORY_LIMIT),
        # Once it knows its replicas; Envoy serves without it, so one that fails later is restarted, not gone around.
        "readinessProbe": {**held, "periodSeconds": 1, "failureThreshold": 100},
        "livenessProbe": {**held, "initialDelaySeconds": 30, "periodSeconds": 10, "failureThreshold": 6},
        "lifecycle": _pre_stop(drain),
        "volumeMounts": mounts,
        **_hardened(),
    }


def expected_router_deployment(deployment: LLMDeployment, pods: RouterPods) -> Json:
    """The routers' Deployment; a new router is there before an old one goes."""
    prefix = deployment.spec.routing.routers
    assert prefix is not None
    replicas = 0 if deployment.spec.suspend else prefix.replicas
    body = deployment_spec(replicas, names.selector(deployment, names.ROUTER), pods.template)
    out = _manifest(deployment, "apps/v1", "Deployment", {"spec": body})
    out["metadata"]["annotations"] = dict(pods.record)
    return out


def deployment_spec(replicas: int, selector: dict[str, str], template: Json) -> Json:
    """The spec of a Deployment of routers."""
    return {
        "replicas": replicas,
        "selector": {"matchLabels": selector},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "minReadySeconds": 0,
        "progressDeadlineSeconds": 600,
        "revisionHistoryLimit": 3,
        "template": template,
    }


def expected_pods_service(deployment: LLMDeployment, with_management: bool) -> Json:
    """The headless Service by whose name routers find the engine's pods that are ready. `with_management`: a
    ServiceMonitor finds the pods' metrics here."""
    ports = [{"name": "http", "port": names.API_PORT, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}]
    if with_management:
        ports.append(
            {"name": "management", "port": names.MANAGEMENT_PORT, "targetPort": "management", "protocol": "TCP"}
        )
    body = {"type": "ClusterIP", "clusterIP": "None", "selector": names.selector(deployment), "ports": ports}
    return names.manifest(deployment, "v1", "Service", {"spec": body}, names.pods_service(deployment.name))


def expected_router_budget(deployment: LLMDeployment) -> Json | None:
    """The PodDisruptionBudget of the routers; None: of one router it would block every drain."""
    prefix = deployment.spec.routing.routers
    if prefix is None or prefix.replicas == 1 or not deployment.spec.pod_disruption_budget.enabled:
        return None
    body = budget_spec(names.selector(deployment, names.ROUTER))
    return _manifest(deployment, "policy/v1", "PodDisruptionBudget", {"spec": body})


def budget_spec(selector: dict[str, str]) -> Json:
    """The spec of a PodDisruptionBudget of several routers."""
    return {"selector": {"matchLabels": selector}, "unhealthyPodEvictionPolicy": "AlwaysAllow", "maxUnavailable": 1}


def _manifest(deployment: LLMDeployment, api_version: str, kind: str, body: Json) -> Json:
    name = names.router(deployment.name)
    return names.manifest(deployment, api_version, kind, body, name, component=names.ROUTER)


def _resources(wanted: Resources, default_requests: dict[str, str], memory_limit: str) -> Json:
    requests = {name: str(value) for name, value in wanted.requests.items()}
    limits = {name: str(value) for name, value in wanted.limits.items()}
    for name, value in default_requests.items():
        if name not in limits:  # a limit without a request is the request, too
            requests.setdefault(name, value)
    if "memory" not in limits:
        limits["memory"] = max(memory_limit, requests["memory"], key=quantity)
    return {"requests": requests, "limits": limits} if requests else {"limits": limits}


def _workers(limits: dict[str, str]) -> int:
    return max(1, math.ceil(quantity(limits["cpu"]))) if "cpu" in limits else _WORKERS


@functools.cache
def script(name: str) -> str:
    """A file beside this module that routers' containers run."""
    return resources.files(__package__).joinpath(name).read_text()
