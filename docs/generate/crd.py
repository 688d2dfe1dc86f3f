"""Every field of an LLMDeployment, and of an LLMGateway, from the CustomResourceDefinitions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from generate import markdown
from generate.source import ROOT

Schema = dict[str, Any]


def page() -> str:
    return _page(
        "llmdeployments", "What several fields do together: [LLMDeployments in practice](../llmdeployments.md)."
    )


def gateway_page() -> str:
    return _page("llmgateways", "What they do together: [gateways](../gateways.md).")


def definition(plural: str) -> Schema:
    """The CustomResourceDefinition, as it is checked in."""
    return dict(yaml.load((ROOT / f"crds/octavo.dev_{plural}.yaml").read_text(), yaml.CSafeLoader))


def _page(plural: str, guide: str) -> str:
    manifest = definition(plural)
    spec = manifest["spec"]
    version = spec["versions"][0]
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    head = (
        f"`apiVersion: {spec['group']}/{version['name']}`, `kind: {spec['names']['kind']}`, short name "
        f"`{spec['names']['shortNames'][0]}`. `kubectl explain {spec['names']['shortNames'][0]}.spec --recursive` says "
        f"the same of the version that is installed. {guide}"
    )
    parts = [head]
    for name, inner in properties["spec"]["properties"].items():
        parts += [f"## spec.{name}", _section(f"spec.{name}", inner, name in properties["spec"].get("required", []))]
    parts += ["## status", _table(_rows("status", properties["status"], False))]
    columns = [(f"`{one['name']}`", f"`{one['jsonPath']}`") for one in version["additionalPrinterColumns"]]
    parts += ["## Columns of kubectl get", markdown.table(("column", "path"), columns)]
    return markdown.page(spec["names"]["kind"], *parts)


def _section(path: str, schema: Schema, required: bool) -> str:
    rules = [f"- {markdown.prose(rule['message'])}" for rule in schema.get("x-kubernetes-validations", [])]
    return "\n\n".join(part for part in (_table(_rows(path, schema, required)), "\n".join(rules)) if part)


def _table(rows: Iterator[tuple[str, ...]]) -> str:
    return markdown.table(("field", "type", "default", "meaning"), rows)


def _rows(path: str, schema: Schema, required: bool) -> Iterator[tuple[str, ...]]:
    default = "required" if required else markdown.code(_json(schema["default"])) if _has_default(schema) else ""
    yield f"`{path}`", _type(schema), default, markdown.prose(schema.get("description", ""))
    inner, path = (schema["items"], f"{path}[]") if "items" in schema else (schema, path)
    for name, one in inner.get("properties", {}).items():
        yield from _rows(f"{path}.{name}", one, name in inner.get("required", []))


def _has_default(schema: Schema) -> bool:
    """Of an object the defaults of its fields say more."""
    return "default" in schema and not isinstance(schema["default"], dict)


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    kind = schema.get("type", "any")
    if kind == "array":
        kind = f"list of {_type(schema['items'])}"
    elif kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        kind = f"map of {_type(schema['additionalProperties'])}"
    limits = [schema.get("minimum"), schema.get("maximum")]
    if any(limit is not None for limit in limits):
        low, high = ("" if limit is None else f"{limit:,}" for limit in limits)
        kind += f", {low} to {high}" if low and high else f", at least {low}" if low else f", at most {high}"
    return kind
