"""Answers that keep to a form, under every name that OpenAI's and vLLM's clients have for it; and thoughts."""

from __future__ import annotations

import json
import re
import shutil

import openai
import pytest
import tokenizers
from support.run_queue import OwnTime

USER = [{"role": "user", "content": "Describe a person"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(shared_server):
    return shared_server.client()


def chat(client, seed: int = 1, **options) -> str:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, **{"max_tokens": 200, "temperature": 1, "seed": seed, **options}
    )
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content


def check_person(text: str) -> None:
    person = json.loads(text)
    assert person.keys() == {"name", "age"} and 0 <= person["age"] <= 99


@pytest.mark.parametrize("strict", [True, False, None])
def test_json_schema(client, strict):
    schema = {"name": "person", "schema": PERSON} | ({} if strict is None else {"strict": strict})
    for seed in range(3):
        check_person(chat(client, seed, response_format={"type": "json_schema", "json_schema": schema}))


def test_pydantic_classes_through_openais_parse(client):
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=5)
        age: int = Field(ge=0, le=9)

    answer = client.chat.completions.parse(
        model="tiny", messages=USER, max_tokens=200, temperature=1, seed=1, response_format=Person
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_json_object(client):
    """A random model need not come to an end, but what it writes begins an object and never leaves it."""
    answer = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=50, temperature=1, seed=3, response_format={"type": "json_object"}
    )
    text = answer.choices[0].message.content
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


FORMS = {
    "json": (PERSON, check_person),
    "regex": (r"[ab]{3}-\d{2}", lambda text: re.fullmatch(r"[ab]{3}-\d{2}", text)),
    "choice": (["Paris", "日本"], lambda text: text in ("Paris", "日本")),
    "grammar": ('start: "yes" | "no"', lambda text: text in ("yes", "no")),
}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("spelling", ["structured_outputs", "guided"])
def test_vllms_names_in_chats_and_completions(client, kind, spelling):
    value, check = FORMS[kind]
    body = {"structured_outputs": {kind: value}} if spelling == "structured_outputs" else {f"guided_{kind}": value}
    assert check(chat(client, extra_body=body)) is not False
    plain = client.completions.create(
        model="tiny", prompt=["x", "y"], max_tokens=200, seed=2, temperature=1, extra_body=body
    )
    for choice in plain.choices:
        assert choice.finish_reason == "stop" and check(choice.text) is not False


def test_schemas_may_be_text_and_streams_keep_to_them(client):
    body = {"guided_json": json.dumps(PERSON)}
    stream = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=200, temperature=1, seed=4, stream=True, extra_body=body
    )
    check_person("".join(c.choices[0].delta.content or "" for c in stream if c.choices))


def test_type_text_is_no_constraint(client):
    free = client.chat.completions.create(model="tiny", messages=USER, max_tokens=5, temperature=0)
    same = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=5, temperature=0, response_format={"type": "text"}
    )
    assert free.choices[0].message.content == same.choices[0].message.content


def test_keywords_that_no_grammar_holds_are_refused_only_when_strict(client):
    schema = {"type": "object", "properties": {}, "additionalProperties": False, "not": {"required": ["a"]}}
    lax = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert json.loads(chat(client, response_format=lax)) == {}
    lax["json_schema"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match=r"response_format.json_schema.schema is not valid.*not"):
        chat(client, response_format=lax)


BROKEN = {
    "response_format.type": {"response_format": {"type": "xml"}},
    "response_format.json_schema": {"response_format": {"type": "json_schema"}},
    "response_format.json_schema.schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    "response_format.json_schema.schema is not valid": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    },
    "guided_json is not valid": {"guided_json": "{"},
    "guided_json must be a JSON schema": {"guided_json": 7},
    "guided_regex is not valid": {"guided_regex": "(a"},
    "guided_regex must be a string": {"guided_regex": ["a"]},
    "guided_choice": {"guided_choice": []},
    "guided_grammar is not valid": {"guided_grammar": "start: nothing"},
    "structured_outputs.regex is not valid": {"structured_outputs": {"regex": "("}},
    "structured_outputs.choice": {"structured_outputs": {"choice": "a"}},
    "structured_outputs must have exactly one": {"structured_outputs": {}},
    "json, regex": {"structured_outputs": {"json": {}, "regex": "a"}},
    "structural_tag": {"structured_outputs": {"structural_tag": "x"}},
    "the only constraint": {"guided_regex": "a", "response_format": {"type": "json_object"}},
    'guided_json is not valid: "x-guidance"': {"guided_json": {**PERSON, "x-guidance": {"lenient": True}}},
    'response_format.json_schema.schema is not valid: "x-guidance"': {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"x-guidance": {}}}}
    },
    'guided_grammar is not valid: "x-guidance"': {"guided_grammar": 'start: %json {"x-guidance": {"lenient": true}}'},
    'guided_grammar is not valid: "x-guidance" sets': {"guided_grammar": r'start: %json {"x\u002dguidance": {}}'},
    'guided_json is not valid: "x-guidance" sets': {"guided_json": {"items": {"x-guidance": {"lenient": True}}}},
    "guided_json takes more than": {"guided_json": {"type": "integer", "multipleOf": 1_999_993}},
    "guided_choice allows no token": {"guided_choice": ["zebra"], "allowed_token_ids": [1, 2]},
    "guided_regex allows no token": {"guided_regex": "z+", "bad_words": ["z"]},
    "guided_choice allows no": {"guided_choice": ["a"], "min_tokens": 5},
    "guided_json is not": {"guided_json": {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("says", ["guided_regex is not valid", "guided_choice allows no token"])
def test_errors_that_the_engine_finds_have_a_status_of_their_own(shared_server, says, stream):
    body = {"messages": USER, "max_tokens": 5, "stream": stream, **BROKEN[says]}
    answer = shared_server.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_tools_set_no_options_of_the_grammar_engine(shared_server):
    for parameters in ({"x-guidance": {}}, {"properties": {"a": {"x-guidance": {"lenient": True}}}}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        body = {"messages": USER, "tools": [tool], "tool_choice": "required"}
        answer = shared_server.post("/v1/chat/completions", body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools.0.function.parameters"
    tool["function"]["parameters"] = {"properties": {"x-guidance": {"type": "string"}}}  # a name, no keyword
    assert shared_server.post("/v1/chat/completions", {**body, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("says", BROKEN)
def test_broken_forms_are_refused_by_the_clients_name_within_a_second(shared_server, path, says):
    """Without what the server's threads waited for a processor that others had."""
    own = OwnTime(shared_server.pids)
    answer = shared_server.post(path, {"messages": USER, "prompt": "x", "max_tokens": 5, **BROKEN[says]})
    assert own.seconds < (6 if "more than" in says else 1)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert says in error["message"], error
    assert error["param"] and error["param"] in error["message"]


# Thoughts

NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def thinker(start, tiny_model, tmp_path_factory):
    """A model with a token that ends its thoughts, which the prompt begins."""
    folder = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(tiny_model, folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["<think>", "</think>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}<think>\n")
    flags = ["--reasoning-parser", "deepseek_r1", "--chat-template", str(folder / "template.jinja")]
    server = start(*flags, "--load-format", "dummy", "--served-model-name", "tiny", model=folder)
    end = backend.token_to_id("</think>")

    def think(**options):
        """The model comes to an end of its thoughts soon."""
        return server.client().chat.completions.create(
            model="tiny",
            messages=USER,
            temperature=1,
            seed=5,
            logit_bias={str(end): 3.5},
            **{"max_tokens": 400, **options},
        )

    return think


def test_a_form_is_asked_of_the_answer_and_not_of_the_thoughts(thinker):
    choice = thinker(extra_body={"guided_choice": ["Paris"]}).choices[0]
    assert choice.finish_reason == "stop" and choice.message.content == "Paris"
    assert choice.message.reasoning_content and "</think>" not in choice.message.reasoning_content
    assert choice.message.reasoning == choice.message.reasoning_content


def test_streamed_thoughts_and_answer_are_the_same(thinker):
    whole = thinker(extra_body={"guided_choice": ["Paris"]}).choices[0].message
    thoughts = content = ""
    for chunk in thinker(extra_body={"guided_choice": ["Paris"]}, stream=True):
        for choice in chunk.choices:
            thoughts += getattr(choice.delta, "reasoning_content", None) or ""
            assert getattr(choice.delta, "reasoning", None) == getattr(choice.delta, "reasoning_content", None)
            content += choice.delta.content or ""
    assert (thoughts, content) == (whole.reasoning_content, "Paris")


def test_thoughts_can_be_left_out(thinker):
    message = thinker(extra_body={"guided_choice": ["Paris"], "include_reasoning": False}).choices[0].message
    assert message.content == "Paris" and message.reasoning is message.reasoning_content is None


def test_thoughts_without_an_end_are_no_answer(thinker):
    message = thinker(max_tokens=2).choices[0].message
    assert message.content == "" and message.reasoning_content


def test_a_demanded_call_comes_behind_the_thoughts(thinker):
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        answer = thinker(tools=[NOW], tool_choice=choice).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.reasoning_content
        assert [call.function.name for call in answer.message.tool_calls or []][:1] == ["now"]
