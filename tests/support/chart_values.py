"""The chart as it is published, and values with which it is tested."""

from __future__ import annotations

import importlib.util
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def release_chart() -> ModuleType:
    """The program of `make chart`."""
    spec = importlib.util.spec_from_file_location("release_chart", ROOT / "release/chart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="octavo-chart-")


@cache
def published() -> Path:
    """The folder of the chart that `make chart` packs: unlike the tree's it takes its default images."""
    made: Path = release_chart().stage(Path(_folder().name))
    return made


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
    "secrets-as-kubernetes-has-them": [
        "imagePullSecrets[0].name=x",
        "engine.imagePullSecrets[0].name=y",
        "engine.imagePullSecrets[1]=z",
    ],
    "registry": ["global.imageRegistry=registry.example.com:5000/mirror", "global.imagePullSecrets[0].name=g"],
}
