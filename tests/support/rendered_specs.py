"""Specs by name, each of which golden manifests are kept."""

from __future__ import annotations

from typing import Any

from support.llmd import FULL

CASES: dict[str, dict[str, Any]] = {
    "minimal": {},
    "full": FULL,
    "model-on-a-claim": {
        "model": {"uri": "pvc://models/a/b"},
        "rollout": {"type": "Recreate"},
        "networkPolicy": {"egress": []},
    },
    "model-in-an-image": {"model": {"uri": f"oci://registry.example.com:5000/toy:1@sha256:{'0' * 64}//models/toy"}},
    "autoscaled": {
        "autoscaling": {
            "minReplicas": 2,
            "maxReplicas": 5,
            "queueDepth": {"targetPerReplica": 3},
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 60}},
        },
    },
    "prefix": {"replicas": 2, "routing": {"strategy": "prefix"}},
    "prefix-full": {
        "routing": {
            "strategy": "prefix",
            "prefix": {
                "replicas": 1,
                "sessionHeaders": ["X-Conversation", "x-session-id"],
                "loadFactor": 150,
                "keyBytes": 512,
                "resources": {"limits": {"cpu": "1500m"}},
            },
        },
        "monitoring": {"kind": "ServiceMonitor"},
        "networkPolicy": {
            "egress": [],
            "ingressFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}],
            "managementFrom": [{"podSelector": {"matchLabels": {"c": "d"}}}],
        },
    },
    "pooled": {"routing": {"strategy": "prefix"}, "inferencePool": {"endpointPickerRef": {"name": "epp"}}},
    "to-zero": {
        "routing": {"strategy": "prefix", "prefix": {"hold": {"maxRequests": 9, "maxSeconds": 120}}},
        "autoscaling": {"minReplicas": 0, "maxReplicas": 2, "provider": "keda"},
        "replicas": 0,
    },
    "node-cache": {
        "model": {
            "uri": "org/name",
            "cache": {"mode": "node", "node": {"path": "/var/lib/octavo", "maxSize": "500Gi"}},
        },
    },
    "ranks": {"parallelism": {"tensor": 3, "data": 2}, "resources": {"requests": {"cpu": 6}}},
    "group": {
        "parallelism": {"tensor": 2, "pipeline": 2, "nodes": 2},
        "scheduling": {"groupTopologyKey": "example.com/rack"},
        "replicas": 2,
        "auth": {"apiKeySecretRef": {"name": "keys"}},
        "networkPolicy": {"egress": []},
    },
    "responses-in-a-database": {
        "responses": {"store": "Postgres", "secretRef": {"name": "db"}, "ttl": 86400},
        "replicas": 2,
    },
    "responses-on-a-claim": {"responses": {"existingClaim": "kept"}},
    "one-writer": {
        "model": {"uri": "org/name", "cache": {"mode": "pvc", "pvc": {"size": "1Gi", "retain": True}}},
        "suspend": True,
    },
}
