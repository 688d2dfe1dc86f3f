"""The kinds that the operator reads and writes, and their paths on the API server."""

from __future__ import annotations

from dataclasses import dataclass

from octavo_operator.api import API_VERSION, KIND, PLURAL


@dataclass(frozen=True)
class Resource:
    """Where the API server has the objects of a kind."""

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
    "ServiceAccount": Resource("v1", "serviceaccounts"),
    "PersistentVolumeClaim": Resource("v1", "persistentvolumeclaims"),
    "NetworkPolicy": Resource("networking.k8s.io/v1", "networkpolicies"),
    "Service": Resource("v1", "services"),
    "Deployment": Resource("apps/v1", "deployments"),
    "PodDisruptionBudget": Resource("policy/v1", "poddisruptionbudgets"),
    "PodMonitor": Resource("monitoring.coreos.com/v1", "podmonitors"),
    "ServiceMonitor": Resource("monitoring.coreos.com/v1", "servicemonitors"),
    "HorizontalPodAutoscaler": Resource("autoscaling/v2", "horizontalpodautoscalers"),
    "ScaledObject": Resource("keda.sh/v1alpha1", "scaledobjects"),
    "EndpointSlice": Resource("discovery.k8s.io/v1", "endpointslices"),
    "Pod": Resource("v1", "pods"),
    "Event": Resource("v1", "events"),
    "Lease": Resource("coordination.k8s.io/v1", "leases"),
}

CHILD_KINDS = (
    "ServiceAccount", "PersistentVolumeClaim", "NetworkPolicy", "Service", "Deployment", "PodDisruptionBudget",
    "HorizontalPodAutoscaler", "PodMonitor", "ServiceMonitor", "ScaledObject",
)  # fmt: skip
OPTIONAL_KINDS = ("PodMonitor", "ServiceMonitor", "ScaledObject")  # not every cluster has their CRDs
WATCHED_KINDS = (KIND, *CHILD_KINDS, "Pod")
