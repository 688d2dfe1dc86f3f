"""Values with which the chart is tested."""

from __future__ import annotations

MATRIX: dict[str, list[str]] = {
    "defaults": [],
    "namespaced": ["watchNamespaces={a,b}"],
    "no-crd": ["crd.install=false"],
    "crd-goes": ["crd.keep=false"],
    "own-account": ["serviceAccount.create=false", "serviceAccount.name=mine"],
    "no-rbac": ["rbac.create=false"],
    "digest": ["image.digest=sha256:" + "a" * 64, "engine.image.digest=sha256:" + "b" * 64],
    "spread": ["replicas=3", "priorityClassName=high", "nodeSelector.a=b"],
    "unmonitored": [f"monitoring.{part}.enabled=false" for part in ("podMonitor", "rules", "dashboards")],
    "no-metrics-api": ["metricsApi.enabled=false"],
    "selector": ["selector=tier=canary"],
    "logs": ["log.level=debug", "log.format=json", "extraEnv[0].name=A", "extraEnv[0].value=b"],
    "names": ["fullnameOverride=mine", "commonLabels.team=x", "podLabels.a=b", "podAnnotations.c=d"],
    "closed": ["networkPolicy.restrictEgress=true", "replicas=2"],
    "open": ["networkPolicy.enabled=false", "podDisruptionBudget.enabled=false"],
    "trusting": ["allowPrivilegedPods=true", "allowSnippetAnnotations=true"],
    "following": ["engine.imagePolicy=Follow", "engine.imageRollouts=3"],
    "openshift": ["clusterAssignedIds=true"],
    "secrets": ["imagePullSecrets={x}", "engine.imagePullSecrets={y,z}"],
}
