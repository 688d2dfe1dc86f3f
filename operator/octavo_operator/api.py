# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""LLMDeployment v1alpha1: what a user may say. Everything else is made from it: the CRD (crd.py), its documentation in
`kubectl explain`, and what the renderers read. Pure data, no Kubernetes client."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_operator import kubernetes_schemas as k8s
from octavo_operator.schema import QUANTITY, Rule, SpecError, from_json, spec_field, to_json

GROUP = "octavo.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMDeployment"
PLURAL = "llmdeployments"

Amount = int | str  # a Kubernetes quantity: 20Gi, 2, 500m

_SECRET_NAME: dict[str, Any] = {"pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
_KEY: dict[str, Any] = {"pattern": r"^[-._a-zA-Z0-9]+$", "maxLength": 253}
_SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}
_BY_NAME: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
_MAP: dict[str, Any] = {"maxProperties": 64}


@dataclass(frozen=True, kw_only=True)
class SecretKey:
    name: str = spec_field("Name of a Secret in the same namespace.", **_SECRET_NAME)
    key: str = spec_field("Key of the Secret that holds the value.", default="token", **_KEY)


@dataclass(frozen=True, kw_only=True)
class ConfigMapKey:
    name: str = spec_field("Name of a ConfigMap in the same namespace.", **_SECRET_NAME)
    key: str = spec_field("Key of the ConfigMap that holds the text.", default="chat_template.jinja", **_KEY)


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    RULES: ClassVar = (
        Rule("has(self.inline) != has(self.configMapRef)", "chatTemplate: give exactly one of inline and configMapRef"),
    )
    inline: str | None = spec_field("The template itself (Jinja).", default=None, minLength=1, maxLength=32768)
    config_map_ref: ConfigMapKey | None = spec_field("A ConfigMap that holds the template.", default=None)


@dataclass(frozen=True, kw_only=True)
class CachePVC:
    RULES: ClassVar = (
        Rule(
            "has(self.existingClaim) != has(self.size)",
            "cache.pvc: give either size, for a claim to be made, or existingClaim",
        ),
        Rule(
            "!has(self.existingClaim) || (!has(self.storageClassName) && !self.retain)",
            "cache.pvc: storageClassName and retain are for claims that are made here; leave them out with "
            "existingClaim",
        ),
        Rule(
            "has(self.existingClaim) || has(oldSelf.existingClaim) || (has(self.storageClassName) == "
            "has(oldSelf.storageClassName) && "
            "(!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName))",
            "cache.pvc.storageClassName cannot be changed, as a claim's cannot; switch cache.mode to emptyDir and "
            "back for a new claim",
        ),
        Rule(
            "has(self.existingClaim) || has(oldSelf.existingClaim) || self.accessModes == oldSelf.accessModes",
            "cache.pvc.accessModes cannot be changed, as a claim's cannot; switch cache.mode to emptyDir and back "
            "for a new claim",
        ),
        Rule(
            "!has(self.size) || !has(oldSelf.size) || "
            "!quantity(string(self.size)).isLessThan(quantity(string(oldSelf.size)))",
            "cache.pvc.size cannot shrink, as a claim's cannot; switch cache.mode to emptyDir and back for a new claim",
        ),
    )
    existing_claim: str | None = spec_field("Use this claim, which somebody else made.", default=None, **_SECRET_NAME)
    size: Amount | None = spec_field(
        "Size of the claim to be made, such as 20Gi. It may grow later where the storage class allows that.",
        default=None,
        override=QUANTITY,
    )
    storage_class_name: str | None = spec_field(
        "Storage class of the claim; absent: the cluster's default.", default=None, maxLength=253
    )
    access_modes: tuple[str, ...] = spec_field(
        "ReadWriteMany lets several replicas share the cache; ReadWriteOnce allows one replica, which is then replaced "
        "by stopping the old pod before starting the new one.",
        default=("ReadWriteOnce",),
        minItems=1,
        maxItems=2,
        items_schema={"type": "string", "enum": ["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"]},
    )
    retain: bool = spec_field(
        "Keep the claim, and with it the downloaded model, when the LLMDeployment is deleted. One of the same name "
        "finds it again.",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class Cache:
    RULES: ClassVar = (
        Rule("(self.mode == 'pvc') == has(self.pvc)", "cache: mode pvc needs cache.pvc, and cache.pvc needs mode pvc"),
        Rule(
            "self.mode == 'emptyDir' || !has(self.sizeLimit)",
            "cache.sizeLimit is for mode emptyDir; a claim has pvc.size",
        ),
    )
    mode: str = spec_field(
        "Where fetched models are kept: emptyDir, gone with the pod; pvc, fetched once and kept.",
        default="emptyDir",
        enum=["emptyDir", "pvc"],
    )
    size_limit: Amount | None = spec_field(
        "Most that the emptyDir may hold; absent: what the node has.", default=None, override=QUANTITY
    )
    pvc: CachePVC | None = spec_field("The claim of mode pvc.", default=None)


@dataclass(frozen=True, kw_only=True)
class Model:
    RULES: ClassVar = (
        Rule(
            "!self.uri.contains('://') || self.uri.matches('^(hf|pvc|https|file|pypi)://.')",
            "model.uri: unknown source; use hf://org/name, pvc://claim/path, https://host/file.gguf, file:///path or "
            "an alias "
            "such as smollm2-135m-instruct",
        ),
        Rule(
            "self.uri.contains('://') || "
            "self.uri.matches('^[A-Za-z0-9][-A-Za-z0-9._]*(/[A-Za-z0-9][-A-Za-z0-9._]*)?$')",
            "model.uri: neither an alias such as smollm2-135m-instruct nor org/name",
        ),
        Rule(
            "!self.uri.startsWith('hf://') || "
            "self.uri.matches('^hf://[A-Za-z0-9][-A-Za-z0-9._]*/[A-Za-z0-9][-A-Za-z0-9._]*(/[-A-Za-z0-9._/]+)?(:[-A-Za-z0-9._]+)?$')",
            "model.uri: hf:// is followed by org/name, and for one GGUF file of several by /file.gguf or :QUANT",
        ),
        Rule(
            "!self.uri.startsWith('pvc://') || (self.uri.matches('^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^/].*)?$') "
            "&& !self.uri.contains('..'))",
            "model.uri: pvc:// is followed by the name of a claim and the path of the model in it, without '..'",
        ),
        Rule(
            "!self.uri.startsWith('https://') || "
            "self.uri.matches('^https://[-A-Za-z0-9.]+(:[0-9]+)?/.+[.]gguf([?#].*)?$')",
            "model.uri: https:// must lead to one .gguf file",
        ),
        Rule(
            "!self.uri.startsWith('file://') || (self.uri.matches('^file:///.+') && !self.uri.contains('..'))",
            "model.uri: file:// is followed by an absolute path in the image, without '..'",
        ),
        Rule(
            "!has(self.revision) || self.uri.startsWith('hf://') || !self.uri.contains('://')",
            "model.revision is for models of a hub (hf://); other sources have none",
        ),
        Rule(
            "!has(self.credentialsSecretRef) || self.uri.startsWith('hf://') || self.uri.startsWith('https://') || "
            "!self.uri.contains('://')",
            "model.credentialsSecretRef is for sources that are fetched (hf://, https://)",
        ),
        Rule(
            "self.cache.mode == 'emptyDir' || !(self.uri.startsWith('pvc://') || self.uri.startsWith('file://'))",
            "model.cache.mode pvc is for models that are fetched; one from pvc:// or file:// is read where it is",
        ),
        Rule(
            "!has(self.name) || !has(self.aliases) || !self.aliases.exists(a, a == self.name)",
            "model.aliases must not repeat model.name",
        ),
    )
    uri: str = spec_field(
        "Where the model comes from: hf://org/name (or org/name) from the Hugging Face hub, pvc://claim/path on a "
        "claim that "
        "holds it, https://host/file.gguf, file:///path in the image, or an alias that the engine knows "
        "(smollm2-135m-instruct).",
        minLength=1,
        maxLength=512,
    )
    name: str | None = spec_field(
        "Name under which clients ask for it; absent: the name of the LLMDeployment.",
        default=None,
        minLength=1,
        maxLength=253,
    )
    aliases: tuple[str, ...] = spec_field(
        "Further names under which clients may ask for it.",
        default=(),
        maxItems=16,
        items_schema={"type": "string", "minLength": 1, "maxLength": 253},
        **_SET,
    )
    revision: str | None = spec_field(
        "Branch, tag or commit on the hub; absent: its main branch.",
        default=None,
        maxLength=128,
        pattern=r"^[-A-Za-z0-9._/]+$",
    )
    chat_template: ChatTemplate | None = spec_field("Chat template to use instead of the model's own.", default=None)
    credentials_secret_ref: SecretKey | None = spec_field(
        "Secret with the access token for gated or private models (HF_TOKEN of the engine).", default=None
    )
    cache: Cache = spec_field("Where fetched models are kept.", default=Cache)

    @property
    def source(self) -> str:
        """hf | pvc | https | file | pypi | alias."""
        scheme, mark, _ = self.uri.partition("://")
        if mark:
            return scheme
        return "hf" if "/" in self.uri else "alias"

    @property
    def is_fetched(self) -> bool:
        return self.source not in ("pvc", "file")


@dataclass(frozen=True, kw_only=True)
class Engine:
    image: str | None = spec_field(
        "Image of the engine. Absent: the one that the operator is configured with at the time; later versions of "
        "the operator "
        "do not change it by themselves, any change of the spec does.",
        default=None,
        minLength=1,
        maxLength=512,
        pattern=r"^[^\s]+$",
    )
    image_pull_policy: str = spec_field(
        "When the image is pulled.", default="IfNotPresent", enum=["Always", "IfNotPresent", "Never"]
    )
    image_pull_secrets: tuple[str, ...] = spec_field(
        "Names of Secrets for pulling the image.",
        default=(),
        maxItems=8,
        items_schema={"type": "string", **_SECRET_NAME},
    )
    dtype: str = spec_field(
        "What the model computes in.", default="auto", enum=["auto", "float32", "float16", "bfloat16"]
    )
    quantization: str | None = spec_field(
        "How weights are held in memory; absent: as the model comes.",
        default=None,
        maxLength=32,
        pattern="^[a-z0-9_-]+$",
    )
    max_model_len: int | str | None = spec_field(
        "Most tokens of a prompt and its answer together; auto: what the memory allows; absent: the model's own limit.",
        default=None,
        rules=(
            Rule(
                "type(self) == int ? self >= 1 : self == 'auto'",
                "engine.maxModelLen: a number of tokens of at least 1, or auto",
            ),
        ),
    )
    max_num_seqs: int | None = spec_field(
        "Most requests that are computed together.", default=None, minimum=1, maximum=65536
    )
    gpu_memory_utilization: int = spec_field(
        "Percent of a GPU's memory that the engine may use.", default=90, minimum=1, maximum=100
    )
    prefix_caching: bool = spec_field("Reuse what earlier prompts with the same beginning have computed.", default=True)
    args: tuple[str, ...] = spec_field(
        "Further arguments of `octavo serve`, after those that the other fields make.",
        default=(),
        maxItems=64,
        items_schema={"type": "string", "maxLength": 4096},
        rules=(
            Rule(
                "!self.exists(a, "
                "a.matches('^--(host|port|uds|management-host|management-port|api-key|served-model-name|shutdown-timeout)(=.*)?$'))",
                "engine.args: --host, --port, --uds, --management-host, --management-port, --api-key, "
                "--served-model-name and "
                "--shutdown-timeout are set by the operator; use service, auth, model.name and lifecycle",
            ),
        ),
    )
    env: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Environment variables of the engine, and of the container that fetches the model.",
        default=(),
        maxItems=64,
        items_schema=k8s.ENV_VAR,
        **_BY_NAME,
    )


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    RULES: ClassVar = (
        Rule(
            "!(has(self.resourceName) && has(self.mig))",
            "accelerator: mig names a resource of its own; leave resourceName out",
        ),
    )
    resource_name: str | None = spec_field(
        "Resource that the device plugin offers; absent: nvidia.com/gpu.",
        default=None,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        maxLength=317,
    )
    mig: str | None = spec_field(
        "Slice of a GPU, such as 1g.10gb: nvidia.com/mig-1g.10gb.", default=None, pattern=r"^[0-9]+g\.[0-9]+gb(\.me)?$"
    )
    count: int = spec_field("How many a replica gets.", default=1, minimum=1, maximum=16)

    @property
    def resource(self) -> str:
        if self.mig:
            return f"nvidia.com/mig-{self.mig}"
        return self.resource_name or "nvidia.com/gpu"


_RESOURCES: dict[str, Any] = {
    "type": "object",
    "maxProperties": 16,
    "additionalProperties": dict(QUANTITY),
}


@dataclass(frozen=True, kw_only=True)
class Resources:
    requests: dict[str, Amount] = spec_field(
        "What the scheduler sets aside for a replica, such as cpu: 2, memory: 4Gi.", default={}, override=_RESOURCES
    )
    limits: dict[str, Amount] = spec_field(
        "What a replica may use at most. The engine sizes threads and caches by them.", default={}, override=_RESOURCES
    )


@dataclass(frozen=True, kw_only=True)
class Shm:
    size: Amount = spec_field(
        "Size of /dev/shm; what is written there counts as memory.",
        default="256Mi",
        override={**QUANTITY, "default": "256Mi"},
    )


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    node_selector: dict[str, str] = spec_field("Labels that a node must have.", default={}, **_MAP)
    affinity: dict[str, Any] | None = spec_field("Kubernetes' own affinity rules.", default=None, override=k8s.AFFINITY)
    tolerations: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Taints that are tolerated. That of the accelerator is tolerated anyway.",
        default=(),
        maxItems=32,
        items_schema=k8s.TOLERATION,
    )
    topology_spread_constraints: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "How replicas are spread over nodes or zones; the label selector is filled in.",
        default=(),
        maxItems=8,
        items_schema=k8s.TOPOLOGY_SPREAD,
    )
    priority_class_name: str | None = spec_field("Priority class of the pods.", default=None, maxLength=253)
    runtime_class_name: str | None = spec_field(
        "Runtime class of the pods; absent: the node's default.", default=None, maxLength=253
    )
    scheduler_name: str | None = spec_field(
        "Scheduler to use; absent: the cluster's default.", default=None, maxLength=253
    )


_INT_OR_PERCENT: dict[str, Any] = {
    "x-kubernetes-int-or-string": True,
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "pattern": r"^(100|[0-9]{1,2})%$",
    "minimum": 0,
    "maximum": 1000,
}


@dataclass(frozen=True, kw_only=True)
class Rollout:
    RULES: ClassVar = (
        Rule(
            "self.type == 'RollingUpdate' || (!has(self.maxSurge) && !has(self.maxUnavailable))",
            "rollout.maxSurge and rollout.maxUnavailable need rollout.type RollingUpdate",
        ),
        Rule(
            "!(has(self.maxSurge) && has(self.maxUnavailable) && string(self.maxSurge) in ['0', '0%'] && "
            "string(self.maxUnavailable) in ['0', '0%'])",
            "rollout.maxSurge and rollout.maxUnavailable cannot both be 0: no pod could ever be replaced",
        ),
        Rule(
            "!has(self.progressDeadlineSeconds) || self.progressDeadlineSeconds > self.minReadySeconds",
            "rollout.progressDeadlineSeconds must be above rollout.minReadySeconds",
        ),
    )
    type: str = spec_field(
        "How pods are replaced. Auto: a new pod first, and when none can be scheduled (all GPUs are taken) one old "
        "pod makes room. "
        "RollingUpdate: by maxSurge and maxUnavailable. Recreate: all old pods first.",
        default="Auto",
        enum=["Auto", "RollingUpdate", "Recreate"],
    )
    max_surge: int | str | None = spec_field(
        "Most pods above replicas, a number or percentage.", default=None, override=_INT_OR_PERCENT
    )
    max_unavailable: int | str | None = spec_field(
        "Most pods below replicas, a number or percentage.", default=None, override=_INT_OR_PERCENT
    )
    surge_patience_seconds: int = spec_field(
        "With type Auto: how long an additional pod may wait for a place before an old one makes room; 0: at once.",
        default=60,
        minimum=0,
        maximum=86400,
    )
    progress_deadline_seconds: int | None = spec_field(
        "A rollout without progress for so long is reported as stuck; absent: the startup budget, and an hour for "
        "fetching, and ten minutes.",
        default=None,
        minimum=1,
        maximum=604800,
    )
    min_ready_seconds: int = spec_field(
        "How long a new pod must be ready to count as available.", default=0, minimum=0, maximum=3600
    )


@dataclass(frozen=True, kw_only=True)
class Lifecycle:
    RULES: ClassVar = (
        Rule(
            "!has(self.terminationGracePeriodSeconds) || self.terminationGracePeriodSeconds > self.preStopSeconds + "
            "self.drainSeconds",
            "lifecycle.terminationGracePeriodSeconds must be above preStopSeconds + drainSeconds, or requests would "
            "be cut off; leave it out to have it computed",
        ),
    )
    pre_stop_seconds: int = spec_field(
        "How long a pod that is to go still takes requests, until every client has learnt of it.",
        default=10,
        minimum=0,
        maximum=600,
    )
    drain_seconds: int = spec_field(
        "How long running requests are then given to finish.", default=60, minimum=0, maximum=86400
    )
    termination_grace_period_seconds: int | None = spec_field(
        "When a pod that has not ended is killed; absent: preStopSeconds + drainSeconds + 10.",
        default=None,
        minimum=1,
        maximum=90000,
    )

    @property
    def grace_seconds(self) -> int:
        return self.termination_grace_period_seconds or self.pre_stop_seconds + self.drain_seconds + 10


@dataclass(frozen=True, kw_only=True)
class StartupProbe:
    budget_seconds: int = spec_field(
        "How long loading the model may take before the pod is started anew.", default=600, minimum=10, maximum=86400
    )
    period_seconds: int = spec_field("How often is looked.", default=2, minimum=1, maximum=60)


@dataclass(frozen=True, kw_only=True)
class ReadinessProbe:
    period_seconds: int = spec_field("How often is looked.", default=2, minimum=1, maximum=60)
    failure_threshold: int = spec_field(
        "After how many failures no new requests are sent.", default=2, minimum=1, maximum=100
    )
    timeout_seconds: int = spec_field("How long an answer may take.", default=2, minimum=1, maximum=60)


@dataclass(frozen=True, kw_only=True)
class LivenessProbe:
    period_seconds: int = spec_field("How often is looked.", default=10, minimum=1, maximum=300)
    failure_threshold: int = spec_field(
        "After how many failures the container is started anew.", default=3, minimum=1, maximum=100
    )
    timeout_seconds: int = spec_field("How long an answer may take.", default=5, minimum=1, maximum=60)


@dataclass(frozen=True, kw_only=True)
class Probes:
    startup: StartupProbe = spec_field("Has the model been loaded?", default=StartupProbe)
    readiness: ReadinessProbe = spec_field("Can it take requests?", default=ReadinessProbe)
    liveness: LivenessProbe = spec_field("Does the engine make progress? Never depends on load.", default=LivenessProbe)


@dataclass(frozen=True, kw_only=True)
class ClientIP:
    timeout_seconds: int = spec_field(
        "How long a client that sends nothing keeps its replica.", default=10800, minimum=1, maximum=86400
    )


@dataclass(frozen=True, kw_only=True)
class Routing:
    RULES: ClassVar = (
        Rule("self.strategy == 'clientIP' || !has(self.clientIP)", "routing.clientIP needs routing.strategy clientIP"),
    )
    strategy: str = spec_field(
        "Which replica gets a request: none, any of them; clientIP, the one that the same address had before.",
        default="none",
        enum=["none", "clientIP"],
    )
    client_ip: ClientIP | None = spec_field("Of strategy clientIP.", default=None)


@dataclass(frozen=True, kw_only=True)
class Service:
    type: str = spec_field("Kind of the Service.", default="ClusterIP", enum=["ClusterIP", "NodePort", "LoadBalancer"])
    port: int = spec_field("Port on which clients reach the model.", default=80, minimum=1, maximum=65535)
    annotations: dict[str, str] = spec_field("Annotations of the Service, for load balancers.", default={}, **_MAP)


@dataclass(frozen=True, kw_only=True)
class ApiKeySecret:
    name: str = spec_field("Name of a Secret in the same namespace.", **_SECRET_NAME)
    key: str = spec_field("Key of the Secret that holds the API key.", default="apiKey", **_KEY)


@dataclass(frozen=True, kw_only=True)
class Auth:
    api_key_secret_ref: ApiKeySecret = spec_field("Clients must send this key (Authorization: Bearer ...).")


@dataclass(frozen=True, kw_only=True)
class Monitoring:
    RULES: ClassVar = (
        Rule(
            "self.interval.endsWith('s') ? duration(self.interval) >= duration('1s') : true",
            "monitoring.interval must be at least 1s",
        ),
    )
    enabled: bool = spec_field(
        "Have Prometheus collect the engine's metrics, where its operator is installed.", default=True
    )
    kind: str = spec_field("By which object.", default="PodMonitor", enum=["PodMonitor", "ServiceMonitor"])
    interval: str = spec_field("How often.", default="15s", maxLength=8, pattern="^[0-9]+(s|m)$")
    labels: dict[str, str] = spec_field("Labels by which your Prometheus finds the object.", default={}, **_MAP)


@dataclass(frozen=True, kw_only=True)
class NetworkPolicy:
    enabled: bool = spec_field("Guard the pods by a NetworkPolicy.", default=True)
    ingress_from: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Who may reach the API; absent: everybody.", default=(), maxItems=32, items_schema=k8s.NETWORK_PEER
    )
    management_from: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Who may reach health and metrics besides the node; absent: this namespace and those that the operator is "
        "told of.",
        default=(),
        maxItems=32,
        items_schema=k8s.NETWORK_PEER,
    )
    egress: tuple[dict, ...] | None = spec_field(  # type: ignore[type-arg]
        "What the pods may reach; absent: everything; []: nothing.",
        default=None,
        maxItems=32,
        items_schema=k8s.EGRESS_RULE,
    )


@dataclass(frozen=True, kw_only=True)
class PodDisruptionBudget:
    RULES: ClassVar = (
        Rule(
            "!(has(self.minAvailable) && has(self.maxUnavailable))",
            "podDisruptionBudget: give minAvailable or maxUnavailable, not both",
        ),
    )
    enabled: bool = spec_field("Limit how many pods a drain of nodes may take at a time.", default=True)
    min_available: int | str | None = spec_field(
        "So many stay, a number or percentage.", default=None, override=_INT_OR_PERCENT
    )
    max_unavailable: int | str | None = spec_field(
        "So many may go, a number or percentage; absent, and without minAvailable: 1.",
        default=None,
        override=_INT_OR_PERCENT,
    )


@dataclass(frozen=True, kw_only=True)
class PodPatch:
    # Rules cannot see a value of any type, so this one is plain OpenAPI.
    EXTRA_SCHEMA: ClassVar = {
        "anyOf": [{"properties": {"op": {"enum": ["remove", "move", "copy"]}}}, {"required": ["value"]}],
    }
    RULES: ClassVar = (Rule("!(self.op in ['move', 'copy']) || has(self.from)", "podPatches: move and copy need from"),)
    op: str = spec_field("What to do.", enum=["add", "remove", "replace", "move", "copy", "test"])
    path: str = spec_field(
        "Where, in the pod template, such as /spec/containers/0/env/-.", maxLength=512, pattern="^/(spec|metadata)/.+"
    )
    from_: str | None = spec_field(
        "Where from, for move and copy.", default=None, maxLength=512, pattern="^/(spec|metadata)/.+"
    )
    value: Any = spec_field("The value.", default=None, override={"x-kubernetes-preserve-unknown-fields": True})


@dataclass(frozen=True, kw_only=True)
class LLMDeploymentSpec:
    RULES: ClassVar = (
        Rule(
            "self.replicas <= 1 || !has(self.model.cache.pvc) || self.model.cache.pvc.accessModes.exists(m, m == "
            "'ReadWriteMany')",
            "replicas: a cache that is ReadWriteOnce serves one replica; use cache.pvc.accessModes [ReadWriteMany], "
            "cache.mode emptyDir, or replicas 1",
        ),
        Rule(
            "!has(self.rollout.progressDeadlineSeconds) || self.rollout.progressDeadlineSeconds > "
            "self.probes.startup.budgetSeconds",
            "rollout.progressDeadlineSeconds must be above probes.startup.budgetSeconds, or every slow start would "
            "count as stuck",
        ),
        Rule(
            "!has(self.auth) || !has(self.engine.env) || !self.engine.env.exists(e, e.name in ['OCTAVO_API_KEY', "
            "'VLLM_API_KEY'])",
            "engine.env: OCTAVO_API_KEY is set by auth.apiKeySecretRef; give one of the two",
        ),
        Rule(
            "!has(self.model.credentialsSecretRef) || !has(self.engine.env) || !self.engine.env.exists(e, e.name == "
            "'HF_TOKEN')",
            "engine.env: HF_TOKEN is set by model.credentialsSecretRef; give one of the two",
        ),
    )
    model: Model = spec_field("What is served.")
    engine: Engine = spec_field("How it is served.", default=Engine)
    accelerator: Accelerator | None = spec_field("GPUs of a replica; absent: it runs on CPUs.", default=None)
    resources: Resources = spec_field("CPU and memory of a replica.", default=Resources)
    shm: Shm = spec_field("Shared memory of a replica.", default=Shm)
    scheduling: Scheduling = spec_field("On which nodes replicas run.", default=Scheduling)
    replicas: int = spec_field(
        "How many pods serve the model. An autoscaler writes it through /scale.", default=1, minimum=0, maximum=1000
    )
    rollout: Rollout = spec_field("How changes reach the pods.", default=Rollout)
    lifecycle: Lifecycle = spec_field("How pods end without losing requests.", default=Lifecycle)
    probes: Probes = spec_field("How pods are judged.", default=Probes)
    routing: Routing = spec_field("How requests find a replica.", default=Routing)
    service: Service = spec_field("Address of the model in the cluster.", default=Service)
    auth: Auth | None = spec_field("Who may ask; absent: whoever reaches the Service.", default=None)
    monitoring: Monitoring = spec_field("Metrics.", default=Monitoring)
    network_policy: NetworkPolicy = spec_field("Who reaches the pods.", default=NetworkPolicy)
    pod_disruption_budget: PodDisruptionBudget = spec_field(
        "How many pods a drain of nodes may take.", default=PodDisruptionBudget
    )
    pod_patches: tuple[PodPatch, ...] = spec_field(
        "Changes to the pod template that no other field makes, as a JSON patch (RFC 6902), applied last.",
        default=(),
        maxItems=32,
    )
    suspend: bool = spec_field("Run no pod, and keep everything else.", default=False)


@dataclass(frozen=True)
class LLMDeployment:
    """One object as the API server has it."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: LLMDeploymentSpec
    deleting: bool = False
    status: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LLMDeployment:
        """Raises SpecError for a spec that the CRD would refuse by its types."""
        meta = data["metadata"]
        return cls(
            meta["name"],
            meta["namespace"],
            meta["uid"],
            meta.get("generation", 1),
            from_json(LLMDeploymentSpec, data.get("spec") or {}, "spec"),
            "deletionTimestamp" in meta,
            data.get("status") or {},
        )

    @functools.cached_property
    def served_names(self) -> list[str]:
        return [self.spec.model.name or self.name, *self.spec.model.aliases]

    @property
    def replicas(self) -> int:
        return 0 if self.spec.suspend else self.spec.replicas

    def owner_reference(self) -> dict[str, Any]:
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }


__all__ = ["LLMDeployment", "LLMDeploymentSpec", "SpecError", "to_json"]
