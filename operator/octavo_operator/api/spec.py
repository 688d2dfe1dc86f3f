# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""The whole spec, and rules over several groups of fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo_operator.api.adapters import MAX_ADAPTERS, Adapter, AdapterCredentials
from octavo_operator.api.autoscaling import Autoscaling
from octavo_operator.api.common import BY_NAME, MAP
from octavo_operator.api.engine import Engine
from octavo_operator.api.lifecycle import Lifecycle, Probes
from octavo_operator.api.model import Model
from octavo_operator.api.monitoring import Monitoring
from octavo_operator.api.network import Auth, InferencePool, NetworkPolicy, Routing, Service
from octavo_operator.api.parallelism import Parallelism
from octavo_operator.api.pod import (
    ENV_FROM,
    MOUNT_PATHS,
    POD_LABELS,
    VOLUME,
    VOLUME_MOUNT,
    VOLUME_NAMES,
    ForeignField,
    PodPatch,
)
from octavo_operator.api.resources import Accelerator, Resources, Scheduling, Shm
from octavo_operator.api.responses import Responses
from octavo_operator.api.rollout import PodDisruptionBudget, Rollout
from octavo_operator.api.schema import Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class LLMDeploymentSpec:
    """The whole spec."""

    RULES: ClassVar = (
        Rule(
            "self.replicas <= 1 || !has(self.model.cache.pvc) || self.model.cache.pvc.accessModes.exists(m, m == "
            "'ReadWriteMany')",
            "replicas: a cache that is ReadWriteOnce serves one replica; use cache.pvc.accessModes [ReadWriteMany], "
            "cache.mode emptyDir, or replicas 1",
        ),
        Rule(
            "!has(self.autoscaling) || self.autoscaling.maxReplicas <= 1 || !has(self.model.cache.pvc) || "
            "self.model.cache.pvc.accessModes.exists(m, m == 'ReadWriteMany')",
            "autoscaling.maxReplicas: a cache that is ReadWriteOnce serves one replica; use cache.pvc.accessModes "
            "[ReadWriteMany] or cache.mode emptyDir",
        ),
        Rule(
            "self.rollout.type != 'RollingUpdate' || !has(self.model.cache.pvc) || "
            "self.model.cache.pvc.accessModes.exists(m, m == 'ReadWriteMany')",
            "rollout.type RollingUpdate needs a second pod beside the old one, and a cache that is ReadWriteOnce "
            "serves one; "
            "use rollout.type Auto or Recreate, cache.pvc.accessModes [ReadWriteMany] or cache.mode emptyDir",
        ),
        Rule(
            # Lowering maxReplicas below what the autoscaler has written is allowed: the operator applies it at once.
            "!has(self.autoscaling) || self.replicas <= self.autoscaling.maxReplicas || "
            "(oldSelf.hasValue() && oldSelf.value().replicas == self.replicas)",
            "replicas must not be above autoscaling.maxReplicas; leave replicas out, the autoscaler writes it",
            optional_old_self=True,
        ),
        Rule(
            # Objects stored before this rule existed stay valid: the autoscaler writes replicas all the same.
            "!has(self.podDisruptionBudget.minAvailable) || !self.podDisruptionBudget.enabled || self.suspend || "
            "self.replicas == 0 || (type(self.podDisruptionBudget.minAvailable) == int ? "
            "self.podDisruptionBudget.minAvailable < (has(self.autoscaling) ? self.autoscaling.minReplicas : "
            "self.replicas) : self.podDisruptionBudget.minAvailable != '100%') || (has(self.autoscaling) && "
            "oldSelf.hasValue() && has(oldSelf.value().autoscaling) && oldSelf.value().autoscaling.minReplicas == "
            "self.autoscaling.minReplicas && has(oldSelf.value().podDisruptionBudget.minAvailable) && "
            "oldSelf.value().podDisruptionBudget.minAvailable == self.podDisruptionBudget.minAvailable)",
            "podDisruptionBudget.minAvailable must be below replicas (with autoscaling: below minReplicas), or no node "
            "could ever be drained; lower it, add replicas, or set maxUnavailable: 0 where that is wanted",
            optional_old_self=True,
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
        Rule(
            "!has(self.accelerator) || self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data == "
            "self.parallelism.nodes * self.accelerator.count",
            "parallelism.tensor x pipeline x data must be parallelism.nodes x accelerator.count: each rank has a GPU; "
            "change one of them",
        ),
        Rule(
            "has(self.accelerator) || self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data % "
            "self.parallelism.nodes == 0",
            "parallelism.tensor x pipeline x data must be divisible by parallelism.nodes: each node has as many ranks; "
            "change one of them",
        ),
        Rule(
            "self.parallelism.nodes == 1 || self.rollout.type != 'Recreate'",
            "rollout.type Recreate: groups of pods (parallelism.nodes above 1) are replaced one by one; use Auto or "
            "RollingUpdate",
        ),
        Rule(
            "self.parallelism.nodes == 1 || self.rollout.minReadySeconds == 0",
            "rollout.minReadySeconds: groups of pods (parallelism.nodes above 1) have none; set 0",
        ),
        Rule(
            "self.parallelism.nodes == 1 || !has(self.model.cache.pvc) || "
            "self.model.cache.pvc.accessModes.exists(m, m == 'ReadWriteMany')",
            "parallelism.nodes: the pods of a group mount the cache on several nodes, and one that is ReadWriteOnce "
            "serves one; use cache.pvc.accessModes [ReadWriteMany], cache.mode node or emptyDir",
        ),
        Rule(
            "self.parallelism.nodes > 1 || !has(self.scheduling.groupTopologyKey)",
            "scheduling.groupTopologyKey is about groups of pods; set parallelism.nodes above 1, or remove it",
        ),
        Rule(
            "has(self.adapters) || !(has(self.maxLoras) || has(self.maxRank) || has(self.adapterCredentialsSecretRef))",
            "maxLoras, maxRank and adapterCredentialsSecretRef are about adapters; set adapters, to [] if there are "
            "none yet",
        ),
        Rule(
            "!has(self.adapters) || !has(self.model.aliases) || !self.adapters.exists(a, a.name in self.model.aliases)",
            "adapters: a name is one of model.aliases; choose another",
        ),
        Rule(
            "!has(self.adapters) || (self.parallelism.pipeline == 1 && self.parallelism.nodes == 1)",
            "adapters need parallelism.pipeline 1 and parallelism.nodes 1; set them, or remove adapters",
        ),
        Rule(
            "!has(self.responses) || self.responses.store != 'Sqlite' || self.routing.strategy == 'prefix' || "
            "(self.replicas <= 1 && (!has(self.autoscaling) || self.autoscaling.maxReplicas <= 1))",
            "responses.store Sqlite: each replica keeps its own responses, and with several the Service sends requests "
            "to any of them; set routing.strategy prefix, responses.store Postgres, or one replica",
        ),
        Rule(
            "!has(self.responses) || !has(self.responses.existingClaim) || (self.replicas <= 1 && "
            "(!has(self.autoscaling) || self.autoscaling.maxReplicas <= 1) && self.parallelism.nodes == 1)",
            "responses.existingClaim is for one replica of one pod; remove it, set responses.store Postgres, or set "
            "replicas, autoscaling.maxReplicas and parallelism.nodes to 1",
        ),
        Rule(
            "!has(self.responses) || !has(self.responses.existingClaim) || self.rollout.type != 'RollingUpdate'",
            "rollout.type RollingUpdate needs a second pod beside the old one, and responses.existingClaim serves one; "
            "use rollout.type Auto or Recreate",
        ),
        Rule(
            "!has(self.responses) || !has(self.engine.env) || !self.engine.env.exists(e, e.name == "
            "'OCTAVO_RESPONSES_STORE')",
            "engine.env: OCTAVO_RESPONSES_STORE is set by responses; give one of the two",
        ),
        Rule(
            "!has(self.responses) || !has(self.volumeMounts) || !self.volumeMounts.exists(m, m.mountPath == "
            "'/responses')",
            "volumeMounts: /responses is mounted by the operator for responses; choose another mountPath",
        ),
        Rule(
            "!has(self.responses) || !has(self.volumes) || !self.volumes.exists(v, v.name == 'responses')",
            "volumes: the name responses is the operator's for responses; choose another name",
        ),
        Rule(
            "!has(self.engine.multimodal) || !has(self.engine.multimodal.allowedLocalMediaPath) || "
            "(has(self.volumeMounts) && self.volumeMounts.exists(m, self.engine.multimodal.allowedLocalMediaPath == "
            "m.mountPath || self.engine.multimodal.allowedLocalMediaPath.startsWith(m.mountPath + '/')))",
            "engine.multimodal.allowedLocalMediaPath is in no volume that volumeMounts has; mount one there",
        ),
    )
    model: Model = spec_field("Model to serve.")
    engine: Engine = spec_field("Engine settings.", default=Engine)
    adapters: tuple[Adapter, ...] | None = spec_field(
        (
            "LoRA adapters, which requests name as models. Changing the list replaces no pods; setting it "
            "for the first time, even to [], enables LoRA and replaces them once."
        ),
        default=None,
        maxItems=MAX_ADAPTERS,
        **BY_NAME,
    )
    max_loras: int | None = spec_field(
        "Number of adapters that requests of one step may name; others wait. Default: 4.",
        default=None,
        minimum=1,
        maximum=256,
    )
    max_rank: int | None = spec_field("Highest rank of an adapter. Default: 16.", default=None, minimum=1, maximum=512)
    adapter_credentials_secret_ref: AdapterCredentials | None = spec_field(
        (
            "Secret with the credentials for fetching adapters, under the keys HF_TOKEN, OCTAVO_HTTP_TOKEN, "
            "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL."
        ),
        default=None,
    )
    accelerator: Accelerator | None = spec_field(
        "GPU of each replica. Unset: the model runs on CPUs, without access to GPUs.", default=None
    )
    parallelism: Parallelism = spec_field("Processes that compute one replica together.", default=Parallelism)
    resources: Resources = spec_field("CPU and memory of each replica.", default=Resources)
    shm: Shm = spec_field("Shared memory of each replica.", default=Shm)
    scheduling: Scheduling = spec_field("Scheduling of the pods.", default=Scheduling)
    replicas: int = spec_field(
        "Number of replicas. With autoscaling the autoscaler writes it through /scale.",
        default=1,
        minimum=0,
        maximum=1000,
    )
    autoscaling: Autoscaling | None = spec_field(
        "Scale by the number of waiting requests. Leave replicas out then.", default=None
    )
    rollout: Rollout = spec_field("Rollout strategy.", default=Rollout)
    lifecycle: Lifecycle = spec_field("Graceful termination.", default=Lifecycle)
    probes: Probes = spec_field("Probes of the engine.", default=Probes)
    routing: Routing = spec_field("Routing of requests to replicas.", default=Routing)
    service: Service = spec_field("Service in front of the pods.", default=Service)
    inference_pool: InferencePool | None = spec_field(
        "Create an InferencePool (inference.networking.k8s.io/v1) of the replicas, for the Gateway API.", default=None
    )
    auth: Auth | None = spec_field("API authentication. Unset: requests are not authenticated.", default=None)
    responses: Responses | None = spec_field(
        "Where stored responses and conversations are kept. Unset: in a file of each replica, until the pod ends.",
        default=None,
    )
    monitoring: Monitoring = spec_field("Collection of metrics.", default=Monitoring)
    network_policy: NetworkPolicy = spec_field("Network access to the pods.", default=NetworkPolicy)
    pod_disruption_budget: PodDisruptionBudget = spec_field(
        "Limit of voluntary disruptions.", default=PodDisruptionBudget
    )
    pod_patches: tuple[PodPatch, ...] = spec_field(
        "JSON patch (RFC 6902) of the pod template, applied last. The pods must stay within the restricted Pod "
        "Security Standard and keep their service account, unless the operator's chart allows more.",
        default=(),
        maxItems=32,
    )
    pod_labels: dict[str, str] = spec_field(
        "Additional labels of the pods.", default={}, rules=(POD_LABELS,), maxProperties=32
    )
    pod_annotations: dict[str, str] = spec_field("Additional annotations of the pods.", default={}, **MAP)
    volumes: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Additional volumes of the pods, as in a pod's spec. Only types of the restricted Pod Security Standard: no "
        "hostPath.",
        default=(),
        maxItems=16,
        items_schema=VOLUME,
        rules=(VOLUME_NAMES,),
        **BY_NAME,
    )
    volume_mounts: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Additional volume mounts of the engine, and of the container that fetches the model.",
        default=(),
        maxItems=16,
        items_schema=VOLUME_MOUNT,
        rules=(MOUNT_PATHS,),
        **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["mountPath"]},
    )
    env_from: tuple[dict, ...] = spec_field(  # type: ignore[type-arg]
        "Secrets and ConfigMaps whose keys become environment variables of the engine, and of the container that "
        "fetches the model, as in a container's envFrom.",
        default=(),
        maxItems=16,
        items_schema=ENV_FROM,
    )
    cluster_assigned_ids: bool | None = spec_field(
        "Leave uid, gid and fsGroup of the pods to the cluster, as OpenShift requires. Default: the operator's "
        "setting.",
        default=None,
    )
    foreign_fields: tuple[ForeignField, ...] = spec_field(
        "Fields that other controllers may add to objects of this LLMDeployment. The operator removes all others.",
        default=(),
        maxItems=32,
    )
    suspend: bool = spec_field("Run no pods, but keep all other objects.", default=False)
