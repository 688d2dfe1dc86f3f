# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""The whole spec, and rules over several of its groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo_operator.api.autoscaling import Autoscaling
from octavo_operator.api.engine import Engine
from octavo_operator.api.lifecycle import Lifecycle, Probes
from octavo_operator.api.model import Model
from octavo_operator.api.monitoring import Monitoring
from octavo_operator.api.network import Auth, NetworkPolicy, Routing, Service
from octavo_operator.api.patches import PodPatch
from octavo_operator.api.resources import Accelerator, Resources, Scheduling, Shm
from octavo_operator.api.rollout import PodDisruptionBudget, Rollout
from octavo_operator.schema import Rule, spec_field


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
            "!has(self.autoscaling) || self.autoscaling.maxReplicas <= 1 || !has(self.model.cache.pvc) || "
            "self.model.cache.pvc.accessModes.exists(m, m == 'ReadWriteMany')",
            "autoscaling.maxReplicas: a cache that is ReadWriteOnce serves one replica; use cache.pvc.accessModes "
            "[ReadWriteMany] or cache.mode emptyDir",
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
    autoscaling: Autoscaling | None = spec_field(
        "Let the number of replicas follow the requests that wait; leave replicas out then, whoever scales writes it.",
        default=None,
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
