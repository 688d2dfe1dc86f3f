"""The CRD: generated from api, current, small, documented."""

from __future__ import annotations

import dataclasses
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import engine_flags
from support.llmd import parsed

from octavo_operator import api
from octavo_operator.api.schema import SpecError, from_json, to_json
from octavo_operator.crd import gateway
from octavo_operator.crd import generate as crd
from octavo_operator.render.engine import arguments

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / "crds", ROOT / "charts/octavo/files"]


def spec_schema() -> dict[str, Any]:
    return crd.manifest()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}.{name}", inner
        yield from fields(inner, f"{path}.{name}")
    if "items" in schema:
        yield from fields(schema["items"], f"{path}[]")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_the_copies_are_current(folder: Path) -> None:
    made = {"octavo.dev_llmdeployments.yaml": crd.text(), "octavo.dev_llmgateways.yaml": gateway.text()}
    found = {path.name: path.read_text() for path in folder.glob("octavo.dev_*.yaml")}
    assert found == made, "run `make crd`"


def test_the_operators_list_of_the_engines_flags_is_current() -> None:
    """The operator's image has no engine in it that could be asked."""
    generated = ROOT / "operator/octavo_operator/render/engine_flags.py"
    assert generated.read_text() == engine_flags.text(), "run `make crd`"


def test_it_is_small_enough_for_client_side_apply() -> None:
    assert len(crd.text().encode()) < 180_000


def test_every_field_is_described() -> None:
    everything = [*fields(spec_schema(), "spec"), *fields(crd.STATUS, "status")]
    assert [path for path, schema in everything if not schema.get("description")] == []


def test_every_list_and_map_is_bounded() -> None:
    """Rules over unbounded lists are refused by the API server, and unbounded objects fill etcd."""
    unbounded = [
        path
        for path, schema in fields(spec_schema(), "spec")
        if (schema.get("type") == "array" and "maxItems" not in schema)
        or ("additionalProperties" in schema and "maxProperties" not in schema)
    ]
    assert not unbounded


def test_defaults_of_the_crd_are_those_of_the_dataclasses() -> None:
    def filled(schema: dict[str, Any]) -> dict[str, Any]:
        out = {}
        for name, inner in schema.get("properties", {}).items():
            if "default" in inner:
                default = inner["default"]
                out[name] = {**default, **filled(inner)} if isinstance(default, dict) else default
        return out

    model = {"uri": "smollm2-135m-instruct", "cache": {"mode": "emptyDir"}}
    by_server = from_json(api.LLMDeploymentSpec, {**filled(spec_schema()), "model": model})
    by_us = from_json(api.LLMDeploymentSpec, {"model": {"uri": "smollm2-135m-instruct"}})
    assert by_server == by_us


def test_json_leaves_defaults_out_and_comes_back() -> None:
    spec = from_json(
        api.LLMDeploymentSpec,
        {
            "model": {"uri": "hf://a/b", "aliases": ["x"]},
            "replicas": 3,
            "podPatches": [{"op": "move", "from": "/spec/a", "path": "/spec/b"}],
        },
    )
    assert to_json(spec) == {
        "model": {"uri": "hf://a/b", "aliases": ["x"]},
        "replicas": 3,
        "podPatches": [{"op": "move", "from": "/spec/a", "path": "/spec/b"}],
    }
    assert from_json(api.LLMDeploymentSpec, to_json(spec)) == spec
    assert dataclasses.replace(spec, replicas=1) != spec


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({}, "spec.model"),
        ({"model": {}}, "spec.model.uri"),
        ({"model": {"uri": 3}}, "spec.model.uri"),
        ({"model": {"uri": "x"}, "replicas": "2"}, "spec.replicas"),
        ({"model": {"uri": "x"}, "replicas": True}, "spec.replicas"),
        ({"model": {"uri": "x"}, "engine": {"args": "--seed"}}, "spec.engine.args"),
        ({"model": {"uri": "x"}, "engine": {"args": [1]}}, "spec.engine.args[0]"),
        ({"model": {"uri": "x"}, "engine": []}, "spec.engine"),
    ],
)
def test_errors_of_types_name_the_field(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as raised:
        from_json(api.LLMDeploymentSpec, spec, "spec")
    assert raised.value.path == field


def test_flags_that_the_operator_sets_are_refused_in_both_spellings() -> None:
    """The engine takes --management_port for --management-port, and the last one counts."""
    rule, _ = spec_schema()["properties"]["engine"]["properties"]["args"]["x-kubernetes-validations"]
    (pattern,) = re.findall(r"a\.matches\('(.*)'\)", rule["rule"])
    ours = [flag for flag in arguments(parsed()) if flag.startswith("--")]
    assert {"--management-port", "--served-model-name"} <= set(ours)
    for flag in [*ours, "--api-key", "--management-host", "--uds"]:
        for spelling in (flag, flag.replace("-", "_").replace("__", "--", 1)):
            for argument in (spelling, f"{spelling}=x", f"{spelling}=x\ny"):
                assert re.search(pattern, argument), argument
    for argument in ("--portable", "--max_model_len=64", "x--port", "9001", "--management_portable=1"):
        assert not re.search(pattern, argument), argument


def rules(schema: dict[str, Any]) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        yield rule["message"]
    additional = schema.get("additionalProperties")
    inner_schemas = [schema.get("items"), additional if isinstance(additional, dict) else None]
    for inner in [*schema.get("properties", {}).values(), *filter(None, inner_schemas)]:
        yield from rules(inner)


def test_every_rule_has_a_case_on_a_cluster() -> None:
    cases = runpy.run_path(str(Path(__file__).with_name("test_cel_on_cluster.py")))
    known = [case[0] for case in (*cases["CASES"], *cases["UPDATES"], *cases["CHANGES"])] + ["metadata.name"]
    schema = crd.manifest()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    untested = [message for message in rules(schema) if not any(part in message for part in known)]
    assert not untested
