"""The kinds that the operator reads and writes, and their paths on the API server."""

from __future__ import annotations

from dataclasses import dataclass

from octavo_operator.api import API_VERSION, KIND, PLURAL, gateway


@dataclass(frozen=True)
class Resource:
    """The path of a kind's objects in the API."""

    api_version: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """URL path of one object, or of all in `namespace` (None: in all namespaces)."""
        prefix = "api" if "/" not in self.api_version else "apis"
        where = f"/namespaces/{namespace}" if namespace else ""
        parts = f"/{prefix}/{self.api_version}{where}/{self.plural}"
        return parts + (f"/{name}" if name else "") + (f"/{subresource}" if subresource else "")


RESOURCES = {
    KIND: Resource(API_VERSION, PLURAL),
    gateway.KIND: Resource(API_VERSION, gateway.PLURAL),
    "ServiceAccount": Resource("v1", "serviceaccounts"),
    "ConfigMap": Resource("v1", "configmaps"),
    "PersistentVolumeClaim": Resource("v1", "persistentvolumeclaims"),
    "NetworkPolicy": Resource("networking.k8s.io/v1", "networkpolicies"),
    "Service": Resource("v1", "services"),
    "Deployment": Resource("apps/v1", "deployments"),
    "LeaderWorkerSet": Resource("leaderworkerset.x-k8s.io/v1", "leaderworkersets"),
    "Secret": Resource("v1", "secrets"),
    "Job": Resource("batch/v1", "jobs"),
    "PodDisruptionBudget": Resource("policy/v1", "poddisruptionbudgets"),
    "PodMonitor": Resource("monitoring.coreos.com/v1", "podmonitors"),
    "ServiceMonitor": Resource("monitoring.coreos.com/v1", "servicemonitors"),
    "HorizontalPodAutoscaler": Resource("autoscaling/v2", "horizontalpodautoscalers"),
    "ScaledObject": Resource("keda.sh/v1alpha1", "scaledobjects"),
    "InferencePool": Resource("inference.networking.k8s.io/v1", "inferencepools"),
    "Ingress": Resource("networking.k8s.io/v1", "ingresses"),
    "HTTPRoute": Resource("gateway.networking.k8s.io/v1", "httproutes"),
    "EndpointSlice": Resource("discovery.k8s.io/v1", "endpointslices"),
    "Pod": Resource("v1", "pods"),
    "Node": Resource("v1", "nodes"),
    "Event": Resource("v1", "events"),
    "Lease": Resource("coordination.k8s.io/v1", "leases"),
}

CHILD_KINDS = (
    "ServiceAccount",
    "PersistentVolumeClaim",
    "ConfigMap",
    "NetworkPolicy",
    "Service",
    "Job",
    "Deployment",
    "LeaderWorkerSet",
    "PodDisruptionBudget",
    "HorizontalPodAutoscaler",
    "PodMonitor",
    "ServiceMonitor",
    "ScaledObject",
    "InferencePool",
    "Ingress",
    "HTTPRoute",
)
OPTIONAL_KINDS = (  # CRDs, not everywhere
    gateway.KIND,
    "LeaderWorkerSet",
    "PodMonitor",
    "ServiceMonitor",
    "ScaledObject",
    "InferencePool",
    "HTTPRoute",
)
IMAGE_VOLUMES, IMAGE_VOLUMES_VERSION = "ImageVolume", (1, 35)  # a feature of the API server, and since when it is on
WATCHED_KINDS = (KIND, gateway.KIND, *CHILD_KINDS, "Pod")
