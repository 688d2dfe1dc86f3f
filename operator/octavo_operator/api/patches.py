# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""podPatches: changes that no other field makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_operator.schema import Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class PodPatch:
    # Rules cannot see a value of any type, so this one is plain OpenAPI.
    EXTRA_SCHEMA: ClassVar = {
        "anyOf": [{"properties": {"op": {"enum": ["remove", "move", "copy"]}}}, {"required": ["value"]}],
    }
    RULES: ClassVar = (Rule("!(self.op in ['move', 'copy']) || has(self.from)", "podPatches: move and copy need from"),)
    op: str = spec_field("What to do.", enum=["add", "remove", "replace", "move", "copy", "test"])
    path: str = spec_field(
        "Where, in the pod template, such as /spec/containers/0/env/-.", maxLength=512, pattern="^/(spec|metadata)/.+"
    )
    from_: str | None = spec_field(
        "Where from, for move and copy.", default=None, maxLength=512, pattern="^/(spec|metadata)/.+"
    )
    value: Any = spec_field("The value.", default=None, override={"x-kubernetes-preserve-unknown-fields": True})
