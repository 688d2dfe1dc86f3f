"""LLMDeployment v1alpha1: what a user may say, one file a field group.

Everything else is made from it: the CRD (crd.py), its documentation in `kubectl explain`, and what the renderers read.
Pure data, no Kubernetes client.
"""

from __future__ import annotations

from octavo_operator.api.common import API_VERSION, GROUP, KIND, PLURAL, VERSION
from octavo_operator.api.deployment import LLMDeployment, Unreadable
from octavo_operator.api.spec import LLMDeploymentSpec
from octavo_operator.schema import SpecError, stable_json, to_json

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
