# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""The administrator's defaults for LLMDeployments whose spec leaves a field empty. Pure.

They go into pod templates that are rendered, never into the API's objects: those that run keep the template that was
made for their spec (plan.py), so a change of defaults replaces no pods.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from octavo_operator.api import LLMDeployment
from octavo_operator.api.resources import Accelerator, Resources, Scheduling
from octavo_operator.api.schema import from_json, spec_field
from octavo_operator.diff import quantity

CPU = "cpu"  # stands for no accelerator


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """`defaults` of the chart. Accelerators are named by their extended resource, such as nvidia.com/gpu, or cpu."""

    images: dict[str, str] = spec_field("Image of the engine by accelerator.", default={})
    scheduling: Scheduling = spec_field("Scheduling of the pods, field by field.", default=Scheduling)
    resources_by_accelerator: dict[str, Resources] = spec_field("CPU and memory by accelerator.", default={})

    @classmethod
    def parse(cls, text: str) -> Defaults:
        """Parse JSON. Raises ValueError, which names the field."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"is not JSON: {error}") from None
        defaults = from_json(cls, fields)
        for name, resources in defaults.resources_by_accelerator.items():
            _check(f"resourcesByAccelerator.{name}", resources)
        return defaults

    def image(self, accelerator: Accelerator | None) -> str | None:
        """Image of the engine; None: the operator's engine image."""
        return self.images.get(_resource(accelerator))

    def fill(self, deployment: LLMDeployment) -> LLMDeployment:
        """The LLMDeployment with defaults for what its spec leaves empty. `resources` count as a whole: a request of
        the spec's and a limit of ours need not fit each other."""
        spec = deployment.spec
        scheduling = dataclasses.replace(
            self.scheduling,
            **{
                field.name: value
                for field in dataclasses.fields(Scheduling)
                if (value := getattr(spec.scheduling, field.name))
            },
        )
        resources = spec.resources
        if not (resources.requests or resources.limits):
            resources = self.resources_by_accelerator.get(_resource(spec.accelerator), resources)
        return dataclasses.replace(
            deployment, spec=dataclasses.replace(spec, scheduling=scheduling, resources=resources)
        )


def _resource(accelerator: Accelerator | None) -> str:
    return accelerator.resource if accelerator else CPU


def _check(path: str, resources: Resources) -> None:
    """Raises ValueError for what the API server would refuse in every Deployment."""
    for part, amounts in (("requests", resources.requests), ("limits", resources.limits)):
        for name, amount in amounts.items():
            try:
                quantity(amount)
            except ValueError as error:
                raise ValueError(f"{path}.{part}.{name}: {error}") from None
    for name, amount in resources.requests.items():
        if name in resources.limits and quantity(amount) > quantity(resources.limits[name]):
            raise ValueError(f"{path}: the request of {name} is above its limit; lower one or raise the other")
