"""Calls in the formats of other families come as calls, whole and streamed, and templates whose calls nobody reads get
the generic prompt."""

from __future__ import annotations

import json

import pytest

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}<|end|>"
    "{% endfor %}<|assistant|>"
)
TOLD = "{% if tools %}{{ tools | tojson }}{% endif %}"
ITEMS = "{% for k, v in c.function.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
XML = (
    "<tool_call>\n<function={{ c.function.name }}>\n" + ITEMS + "<parameter={{ k }}>\n" + VALUE + "\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>"
)
GLM = (
    "<tool_call>{{ c.function.name }}\n" + ITEMS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + VALUE + "</arg_value>\n"
    "{% endfor %}</tool_call>"
)
COMMAND = (
    '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}]<|END_ACTION|>"
)
DEEPSEEK = (
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}"
)
UNKNOWN = "<tool_call>({{ c.function.name }} {{ c.function.arguments | tojson }})</tool_call>"
ARGUMENTS = {"text": 'it\'s "7"\n<b>é</b>', "count": 7, "exact": True}
SAYS = {
    "xml": (
        XML,
        "<tool_call>\n<function=note>\n<parameter=text>\n" + ARGUMENTS["text"] + "\n</parameter>\n"
        "<parameter=count>\n7\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (
        GLM,
        "<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>" + ARGUMENTS["text"] + "</arg_value>\n"
        "<arg_key>count</arg_key>\n<arg_value>7</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n"
        "</tool_call>",
    ),
    "command": (
        COMMAND,
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "note", "parameters": '
        + json.dumps(ARGUMENTS, ensure_ascii=False)
        + "}]<|END_ACTION|>",
    ),
    "deepseek": (DEEPSEEK, "<｜tool▁call▁begin｜>note<｜tool▁sep｜>" + json.dumps(ARGUMENTS) + "<｜tool▁call▁end｜>"),
    "unknown": (UNKNOWN, '<tool_call>\n{"name": "note", "arguments": ' + json.dumps(ARGUMENTS) + "}\n</tool_call>"),
}
NOTE = {
    "name": "note",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "exact": {"type": "boolean"}},
    },
}


@pytest.fixture(scope="module")
def server(start):
    return start(
        "--kv-cache-memory-bytes", str(64 << 20), "--served-model-name", "tiny", "--trust-request-chat-template"
    )


def body(family: str, **fields: object) -> dict:
    calls, says = SAYS[family]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Note it."}],
        "max_tokens": 400,
        "temperature": 0,
        "chat_template": TOLD + TURNS.replace("CALL", calls),
        "tools": [{"type": "function", "function": NOTE}],
        "structured_outputs": {"choice": ["Well.\n" + says]},
        **fields,
    }


@pytest.mark.parametrize("family", SAYS)
def test_calls_come_whole_and_streamed(server, family):
    answer = server.post("/v1/chat/completions", body(family)).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] == "Well."
    (call,) = answer["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("note", ARGUMENTS)

    streamed = server.client().chat.completions.create(
        **{k: v for k, v in body(family).items() if k not in ("chat_template", "structured_outputs")},
        extra_body={k: body(family)[k] for k in ("chat_template", "structured_outputs")},
        stream=True,
    )
    content = name = arguments = ""
    for chunk in streamed:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for piece in delta.tool_calls or ():
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
    assert (content, name, json.loads(arguments)) == ("Well.", "note", ARGUMENTS)


@pytest.mark.parametrize("family", SAYS)
def test_an_answers_form_leaves_room_for_calls(server, family):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {}}}}
    fields = body(family, response_format=form, max_tokens=150)
    del fields["structured_outputs"]
    answer = server.post("/v1/chat/completions", fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("family", SAYS)
def test_a_demanded_call_is_made_in_any_format(server, family):
    fields = body(family, tool_choice="required", max_tokens=400, seed=1)
    del fields["structured_outputs"]
    answer = server.post("/v1/chat/completions", fields).json()["choices"][0]["message"]
    assert answer["tool_calls"][0]["function"]["name"] == "note"


@pytest.mark.parametrize(("flags", "told"), [((), "glm45"), (("--tool-call-parser", "none"), None)], ids=["", "none"])
def test_the_list_of_models_and_the_metrics_name_the_format(start, flags, told):
    template = TOLD + TURNS.replace("CALL", GLM)
    server = start("--kv-cache-memory-bytes", "32MiB", "--chat-template", template, *flags)
    (card,) = server.get("/v1/models").json()["data"]
    assert card["tool_format"] == told
    assert server.get(f"/v1/models/{card['id']}").json()["tool_format"] == told
    assert ('tool_format="glm45"} 1.0' in server.get("/metrics").text) is (told is not None)
    assert ("calls are glm45 (read back)" in server.log) is (told is not None)


def test_a_template_that_tells_of_no_tools_is_generic(server):
    """The model of the tests has one; a log says so at the start."""
    assert server.get("/v1/models").json()["data"][0]["tool_format"] == "generic"
    assert 'tool_format="generic"} 1.0' in server.get("/metrics").text
    assert "told of them in a generic prompt" in server.log


def test_earlier_calls_stand_as_the_template_writes_them(server):
    """Of a template that takes arguments as text alone, too; of an unknown one as the generic prompt has them."""
    for family, expected in (
        ("xml", "<parameter=count>\n7\n</parameter>"),
        ("deepseek", 'note<｜tool▁sep｜>{"count": 7}<｜tool▁call▁end｜>'),
        ("unknown", '<tool_call>\n{"name": "note", "arguments": {"count": 7}}\n</tool_call>'),
    ):
        call = {"id": "c", "type": "function", "function": {"name": "note", "arguments": '{"count": 7}'}}
        messages = [
            {"role": "user", "content": "Note it."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "noted"},
        ]
        fields = body(family, messages=messages)
        asked = {key: fields[key] for key in ("model", "messages", "tools", "chat_template")}
        ids = server.post("/tokenize", asked).json()["tokens"]
        text = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
        assert expected in text and "noted" in text
        assert ("You can call functions" in text) is (family == "unknown")


@pytest.mark.parametrize("family", ["command", "deepseek", "unknown"])
def test_a_call_inside_an_argument_is_a_text(server, family):
    """Whole and streamed: one call comes, whose argument has the other one to the letter."""
    inner = {**ARGUMENTS, "text": SAYS[family][1]}
    says = SAYS[family][1].replace(json.dumps(ARGUMENTS, ensure_ascii=family != "command"), json.dumps(inner))
    assert says != SAYS[family][1]
    fields = body(family, structured_outputs={"choice": [says]}, max_tokens=500)
    answer = server.post("/v1/chat/completions", fields)
    assert answer.status_code == 200, answer.text
    answer = answer.json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls" and json.loads(call["function"]["arguments"]) == inner
    lines = server.post("/v1/chat/completions", {**fields, "stream": True}).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    pieces = [piece["function"] for delta in deltas for piece in delta.get("tool_calls", ())]
    assert [piece["name"] for piece in pieces if "name" in piece] == ["note"]
    assert json.loads("".join(piece["arguments"] for piece in pieces)) == inner


UNWRITABLE = {"xml": "a>b", "glm": "a</arg_key>b"}


@pytest.mark.parametrize("family", UNWRITABLE)
def test_a_parameter_that_cannot_be_written_is_no_obstacle_to_a_demanded_call(server, family):
    """It is made as JSON. Where the model is free to call, and the tool is strict, an error says what to rename."""
    name = UNWRITABLE[family]
    schema = {
        "type": "object",
        "properties": {name: {"enum": ["yes"]}},
        "required": [name],
        "additionalProperties": False,
    }

    def ask(strict, **more):
        tools = [{"type": "function", "function": {"name": "note", "parameters": schema, "strict": strict}}]
        fields = body(family, tools=tools, **more)
        del fields["structured_outputs"]
        return server.post("/v1/chat/completions", fields)

    for strict in (False, True):
        answer = ask(strict, tool_choice="required", parallel_tool_calls=False)
        assert answer.status_code == 200, answer.text
        calls = answer.json()["choices"][0]["message"]["tool_calls"]
        assert {call["function"]["name"] for call in calls} == {"note"}
        assert all(json.loads(call["function"]["arguments"]) == {name: "yes"} for call in calls)
    assert ask(False, max_tokens=5).status_code == 200
    answer = ask(True, max_tokens=5)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "tools" and repr(name) in error["message"] and error["message"].endswith("rename it")
