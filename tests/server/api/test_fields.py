"""Every field of every body, one at a time: what /openapi.json allows is accepted, what it forbids refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema_rs
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.examples import examples_of

from octavo.entrypoints.app import WORK_OPERATIONS
from octavo.entrypoints.openapi import integers_below

USER = {"role": "user", "content": "x"}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
NOW_PARAM = {"name": "now", "input_schema": {"type": "object", "properties": {}}}  # Anthropic's
NOW_FLAT = {"type": "function", "name": "now"}  # of Responses
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"messages": [USER], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/embeddings": {"input": "x"},
    "/v2/embed": {"texts": ["x"]},
    "/v1/decisions": {"input": "x", "questions": [{"type": "predicate", "instructions": "x"}]},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v1/score": {"text_1": "x", "text_2": "y"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/infill": {"input_prefix": "x", "input_suffix": "y", "n_predict": 1},
}
# What a field needs beside it, where the body has it; None: left out.
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "truncation_side": {"truncate_prompt_tokens": 3},
    "continue_final_message": {"add_generation_prompt": False, "messages": [USER]},
    "tool_choice": {"tools": [NOW], "max_tokens": 30},
    "min_tokens": {"max_tokens": 10},
    "max_tokens": {"echo": True},
    "max_completion_tokens": {"max_tokens": None},
}
TEXT_ONLY = {"model", "prompt", "add_special_tokens", "return_token_strs"}  # of /tokenize
OF_CHATS = {"messages", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"}

# Where a schema cannot say all: how many tokens a text has, what a template does with a conversation, and what is a
# regular expression, a grammar or a JSON schema that can be kept. Then the refusal says it.
BEYOND = re.compile(
    r"is not valid|\d+ tokens|tokens are more than|no tokens|chat template|different names|one of the tools|"
    r"must name tools|model (\S+ )?takes|must be the only constraint|longer than|must be a JSON object|"
    r"takes at most \d+|send one in text_1|send the texts under one of|is not found|does not run tools|"
    r"must have unique names|is of no call before it|is that of choice|must not be empty: ask|input must not be empty"
)
# Other names of routes, and what the server of these tests has no model for (see test_scoring).
ELSEWHERE = {"/rerank", "/v2/rerank", "/score", "/classify"}
ELSEWHERE |= {op.path for op in WORK_OPERATIONS if op.path.startswith("/v1/conversations")}  # test_stored_state
ELSEWHERE |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}  # test_adapters
ELSEWHERE |= {
    op.path for op in WORK_OPERATIONS if op.path.startswith(("/api/", "/v1/batches"))
}  # test_ollama, _batches
MODELS = {op.path: op.body for op in WORK_OPERATIONS if op.body is not None and op.path not in ELSEWHERE}
FIELDS = [(path, name) for path, model in MODELS.items() for name in model.model_json_schema()["properties"]]
BOUNDED = settings(max_examples=examples_of(3), deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(scope="module")
def post(shared_server, infilling):
    with httpx.Client(timeout=60) as client:
        yield lambda path, body: client.post((infilling if path == "/infill" else shared_server).url + path, json=body)


@pytest.fixture(scope="module")
def schema_of(shared_server):
    """The schema of one field, all that it refers to resolved by the document around it."""
    components = shared_server.get("/openapi.json").json()["components"]["schemas"]

    def schema_of(path: str, name: str) -> dict[str, Any]:
        body = components[MODELS[path].__name__]
        if name in body["properties"]:
            found = body["properties"][name]
        else:
            found = next(s for pattern, s in body["patternProperties"].items() if re.search(pattern, name))
        whole = found | {"$defs": components}
        return json.loads(json.dumps(whole).replace("#/components/schemas/", "#/$defs/"))

    return schema_of


def values_of(schema: dict[str, Any] | bool) -> st.SearchStrategy[Any]:  # noqa: C901 (a branch for each keyword)
    """Values that fit a schema, of the keywords that ours use."""
    if isinstance(schema, bool):
        return values_of({}) if schema else st.nothing()
    if "not" in schema:
        others = values_of({key: value for key, value in schema.items() if key != "not"})
        return others.filter(lambda value: not jsonschema_rs.is_valid(schema["not"], value))
    if "$ref" in schema:
        return values_of(schema["$defs"][schema["$ref"].rpartition("/")[2]] | {"$defs": schema["$defs"]})
    if options := schema.get("anyOf", schema.get("oneOf")):
        return st.one_of(values_of(option | {"$defs": schema.get("$defs")}) for option in options)
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if isinstance(schema.get("type"), list):
        return st.one_of(values_of({**schema, "type": kind}) for kind in schema["type"])
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(low, high) | st.integers(low, high).filter(lambda n: abs(n) < 2**53).map(float)
        case "number":
            return st.floats(low, high, allow_nan=False, allow_infinity=False, exclude_min="exclusiveMinimum" in schema)
        case "string" if "pattern" in schema:
            return st.from_regex(schema["pattern"]).map(lambda text: text[:100].removesuffix("\n"))
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=8)
        case "array":
            items = schema["items"] | {"$defs": schema.get("$defs")}
            return st.lists(values_of(items), min_size=schema.get("minItems", 0), max_size=3)
        case "object":
            return _objects(schema)
    return st.none() | st.integers(0, 9) | st.text(max_size=5)


def _objects(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    required = set(schema.get("required", ()))
    shared = {"$defs": schema.get("$defs")}
    known = {name: values_of(kind | shared) for name, kind in schema.get("properties", {}).items()}
    fixed = st.fixed_dictionaries(
        {name: kind for name, kind in known.items() if name in required},
        optional={name: kind for name, kind in known.items() if name not in required},
    )
    for pattern, kind in schema.get("patternProperties", {}).items():
        keys = st.from_regex(pattern).map(lambda text: text.removesuffix("\n"))
        return st.dictionaries(keys, values_of(kind), max_size=3)
    more = st.dictionaries(st.sampled_from(["more", "index"]), values_of(schema.get("additionalProperties", {})))
    return st.builds(lambda known, others: {**others, **known}, fixed, more)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 1100),
    st.floats(-1e6, 1e6),
    st.sampled_from([0.5, 1.5, -0.5, 1e300]),
    st.text(max_size=5),
    st.sampled_from(["", "1", "auto", "bogus"]),
)
ANYTHING = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.lists(st.lists(SCALARS, max_size=2), min_size=1, max_size=2),
    st.dictionaries(
        st.sampled_from(["type", "a", "5", "400", "-1", "json", "function", "messages"]), SCALARS, max_size=2
    ),
    st.lists(
        st.dictionaries(st.sampled_from(["role", "content", "type", "function"]), SCALARS), min_size=1, max_size=2
    ),
)


def _body(path: str, name: str, value: Any) -> dict[str, Any]:
    beside = {k: v for k, v in BESIDE.get(name, {}).items() if k in MODELS[path].model_fields}
    if name == "logprob_token_ids":
        beside = {"logprobs": True if "chat" in path else 0}
    if "tools" in beside and path.startswith("/v1/messages"):
        beside["tools"] = [NOW_PARAM]
    if path.startswith("/v1/responses"):
        beside = {"tools": [NOW_FLAT]} if "tools" in beside else {}
    body = {**BODIES[path], **beside, name: value}
    if path == "/tokenize" and name not in TEXT_ONLY:
        body = {"messages": [USER], **body, "prompt": None}
    if path == "/v1/embeddings" and name in OF_CHATS:
        body = {"messages": [USER], **body, "input": None}
    return {k: v for k, v in body.items() if v is not None or k == name}


def _sendable(value: Any) -> bool:
    try:
        json.dumps(value).encode()
    except UnicodeEncodeError:
        return False
    return "\\ud" not in json.dumps(value)  # what UTF-8 cannot hold is no JSON


@pytest.mark.sampled(share=3)
@pytest.mark.slow
@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_bodies_that_the_schema_allows_are_accepted(post, schema_of, path, name):
    schema = schema_of(path, name)

    @given(value=values_of(schema))
    @BOUNDED
    def run(value):
        assert jsonschema_rs.is_valid(schema, value)
        assume(_sendable(value))
        assume(value is not None or name not in ("prompt", "messages", "input"))  # one of them is needed
        if name in ("max_tokens", "max_completion_tokens", "min_tokens") and value:
            value = value % 10 or 1  # the prompt takes tokens too, which a schema cannot say
        answer = post(path, _body(path, name, value))
        if answer.status_code == 200:
            assert '"error": {' not in answer.text and 'data: {"error"' not in answer.text
            return
        assert answer.status_code in (400, 404) and BEYOND.search(answer.json()["error"]["message"]), answer.text

    run()


@pytest.mark.sampled(share=3)
@pytest.mark.slow
@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_fields_that_the_schema_forbids_are_refused_by_name(post, schema_of, path, name):
    validator = jsonschema_rs.validator_for(schema_of(path, name))

    @given(value=ANYTHING)
    @BOUNDED
    def run(value):
        assume(_sendable(value) and not validator.is_valid(value))
        answer = post(path, _body(path, name, value))
        assert 400 <= answer.status_code < 500, (value, answer.text[:200])
        error = answer.json()["error"]
        assert name in error["message"] or error.get("param") == name

    run()


def test_fields_of_other_servers_are_refused_by_name_unless_they_change_nothing(post, shared_server):
    """For every route, each field of the tables in /openapi.json."""
    schemas = shared_server.get("/openapi.json").json()["components"]["schemas"]
    for path, model in MODELS.items():
        harmless = dict(BODIES[path])
        for pattern, described in schemas[model.__name__]["patternProperties"].items():
            for name in pattern.removeprefix("^(").removesuffix(")$").split("|"):
                other = next(v for v in (True, False) if not any(v is known for known in described["enum"]))
                for value in ("bogus", other)[: 1 if path == "/v1/completions" else 2]:
                    answer = post(path, {**BODIES[path], name: value})
                    assert answer.status_code == 400, (path, name, value)
                    assert answer.json()["error"].get("param", name) == name
                    assert answer.json()["error"]["message"].startswith(f"{name} is not supported")
                harmless[name] = described["enum"][-1]
        assert len(harmless) > len(BODIES[path])
        answer = post(path, harmless)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", BODIES)
def test_integers_may_be_written_as_floats(post, schema_of, path):
    """JSON has one kind of number: 2.0 is the integer 2 wherever one is meant, and 2.5 never is."""
    seen = 0
    for name in MODELS[path].model_fields:
        kinds = schema_of(path, name).get("anyOf", [schema_of(path, name)])
        for kind in kinds:
            if kind.get("type") == "integer":
                whole, part = float(kind.get("enum", [2])[0]), 2.5
            elif kind.get("type") == "array" and kind["items"].get("type") == "integer":
                whole, part = [2.0, 3], [2.5]
            else:
                continue
            seen += 1
            answer = post(path, _body(path, name, whole))
            of_thoughts = "budget" in name and "needs a chat template that writes thoughts" in answer.text
            assert answer.status_code == 200 or of_thoughts, (name, answer.text)
            answer = post(path, _body(path, name, part))
            assert answer.status_code == 400 and name in answer.json()["error"]["message"]
    without = ("/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/decisions")
    assert seen >= (0 if path in without else 1)


def test_a_tool_call_id_is_a_text(post):
    for value, status in (("call_1", 200), (None, 200), (5, 400), (["x"], 400), (True, 400)):
        for role in ("tool", "user"):
            message = {"role": role, "content": "x", "tool_call_id": value}
            answer = post("/v1/chat/completions", {"messages": [USER, message], "max_tokens": 1})
            assert answer.status_code == status
            if status == 400:
                assert answer.json()["error"]["param"] == "messages.1.tool_call_id"


@pytest.mark.parametrize("limit", [1, 2, 9, 10, 11, 40, 399, 400, 1000, 49152, 128256])
def test_the_pattern_of_token_ids(limit):
    pattern = re.compile(f"^{integers_below(limit)}$")
    near = {limit + step for step in range(-12, 13)} | {0, 5, 9, 10, 19, 99, 100, limit // 2, limit * 10}
    for number in near:
        if number >= 0:
            assert bool(pattern.match(str(number))) == (number < limit), number
    assert not pattern.match("07") and not pattern.match("") and not pattern.match("-1")


NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object", "schema": NUMBER}},
        {"json_schema": NUMBER},
        {"json_schema": json.dumps(NUMBER)},
        {"regex": r'\{"a": [1-9]{1,5}\}'},
    ],
    ids=["llama.cpp", "llama.cpp's second way", "SGLang", "SGLang's regex"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_constraints_in_other_dialects_are_kept(post, path, asked):
    answer = post(path, {**BODIES[path], **asked, "max_tokens": 60, "seed": 1}).json()["choices"][0]
    text = answer["message"]["content"] if "message" in answer else answer["text"]
    assert re.match(r'\s*\{\s*"a"\s*:\s*-?\d+', text), text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "asked",
    [
        {"grammar": 'root ::= "yes" | "no"'},
        {"ebnf": 'root ::= "yes"'},
        {"truncation_side": "middle", "truncate_prompt_tokens": 3},
        {"truncation_side": "left"},
        {"best_of": 4},
        {"stream_options": {"include_usage": True}},
        {"response_format": {"type": "json_object", "schema": 5}},
        {"json_schema": 5},
        {"regex": 5},
        {"mirostat": 2},
        {"n_predict": 5},
        {"stop_sequences": ["x"]},
        {"options": {"temperature": 0}},
        {"modalities": ["text", "audio"]},
    ],
    ids=str,
)
def test_fields_that_would_change_the_text_are_never_ignored(post, path, asked):
    answer = post(path, {**BODIES[path], **asked})
    assert answer.status_code == 400 and next(iter(asked)) in answer.json()["error"]["message"]


def test_reasoning_efforts_and_modalities(post):
    path = "/v1/chat/completions"
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max", None):
        assert post(path, {**BODIES[path], "reasoning_effort": effort}).status_code == 200
    for effort in ("bogus", "", 5, "High"):
        answer = post(path, {**BODIES[path], "reasoning_effort": effort})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "reasoning_effort"
    assert post(path, {**BODIES[path], "modalities": ["text"]}).status_code == 200


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
def test_prompts_are_cut_on_the_side_that_is_asked_for(post, path, field):
    ids = [5, 6, 7, 8, 9]
    more = {"max_tokens": 1, "temperature": 0, "return_token_ids": True} if field == "prompt" else {}
    for side, kept in (("left", ids[-3:]), ("right", ids[:3]), (None, ids[-3:])):
        body = {field: ids, "truncate_prompt_tokens": 3, "truncation_side": side, **more}
        cut, whole = post(path, body).json(), post(path, {field: kept, **more}).json()
        if field == "prompt":
            assert cut["choices"][0]["prompt_token_ids"] == kept
            assert cut["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
        else:
            assert cut["data"] == whole["data"]
