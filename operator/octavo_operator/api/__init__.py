"""LLMDeployment v1alpha1: one file a group of fields, from which the CRD (crd/) is generated and which render/ reads.

schema.py declares fields and converts them to OpenAPI schemas and JSON; kubernetes_schemas.py has the schemas of parts
of Kubernetes' own API. Pure data, no Kubernetes client.
"""

from __future__ import annotations

from octavo_operator.api.common import API_VERSION, FIELD_MANAGER, GROUP, KIND, OWNER_LABEL, PLURAL, VERSION, Key, Owner
from octavo_operator.api.deployment import InvalidLLMDeployment, LLMDeployment
from octavo_operator.api.schema import SpecError, stable_json, to_json
from octavo_operator.api.spec import LLMDeploymentSpec
