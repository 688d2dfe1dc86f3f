"""LLMDeployment v1alpha1: what a user may say, one file a field group.

Everything else is made from it: the CRD (crd/), its documentation in `kubectl explain`, and what the renderers read.
Pure data, no Kubernetes client.
"""

from __future__ import annotations

from octavo_operator.api.common import API_VERSION, GROUP, KIND, PLURAL, VERSION
from octavo_operator.api.deployment import LLMDeployment, Unreadable
from octavo_operator.api.schema import SpecError, stable_json, to_json
from octavo_operator.api.spec import LLMDeploymentSpec

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "PLURAL",
    "VERSION",
    "LLMDeployment",
    "LLMDeploymentSpec",
    "SpecError",
    "Unreadable",
    "stable_json",
    "to_json",
]
