"""The API server's own OpenAPI documents as JSON schemas for kubeconform: what is judged by is the cluster at hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def write_schemas(documents: list[Json], folder: Path) -> str:
    """One strict schema a kind; returns kubeconform's schema location. `documents`: those of /openapi/v3/apis/..."""
    for document in documents:
        schemas = document.get("components", {}).get("schemas", {})
        definitions = {name: _strict(schema) for name, schema in schemas.items()}
        for name, schema in schemas.items():
            for kind in schema.get("x-kubernetes-group-version-kind", []):
                needed = {one: definitions[one] for one in _reached(name, definitions)}
                whole = {"$ref": f"#/definitions/{name}", "definitions": needed}
                (folder / file_name(kind["group"], kind["version"], kind["kind"])).write_text(json.dumps(whole))
    return f"{folder}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"


def file_name(group: str, version: str, kind: str) -> str:
    """As kubeconform looks for it: of a group only the first word counts."""
    return "-".join(part for part in (kind.lower(), group.partition(".")[0], version) if part) + ".json"


def _reached(name: str, definitions: Json) -> set[str]:
    found: set[str] = set()
    new = [name]
    while new:
        found.add(one := new.pop())
        text = json.dumps(definitions[one])
        new += [other for other in re.findall(r'"#/definitions/([^"]+)"', text) if other not in found]
    return found


def _strict(schema: Any) -> Any:
    """Fields that are not known are errors, and references point into the same file."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        return {"$ref": reference.replace("#/components/schemas/", "#/definitions/")}
    out = {name: _strict(value) for name, value in schema.items() if name not in ("properties", "default")}
    if properties := schema.get("properties"):
        out["properties"] = {name: _strict(value) for name, value in properties.items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            out.setdefault("additionalProperties", False)
    return out
