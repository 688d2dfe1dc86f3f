"""Tool calls through OpenAI's client and LangChain: streamed and whole, chosen freely, demanded or forbidden."""

from __future__ import annotations

import json

import pytest
from pydantic_core import from_json
from support.weather_tools import CALLS, NOW, WEATHER, added_up, hermes

from octavo.chat.messages import check_messages
from octavo.fetch.sources import DEFAULT_MODEL

USER = [{"role": "user", "content": "What is the weather in Paris?"}]
NESTED: dict = {"type": "object"}
for _ in range(80):
    NESTED = {"type": "object", "properties": {"a": NESTED}}
TEMPLATE = (
    "{% if tools %}{{ tools | length }} tools{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
)


@pytest.fixture(scope="module")
def server(start):
    flags = ["--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--served-model-name", "tiny"]
    flags += ["--chat-template", TEMPLATE]
    return start("--kv-cache-memory-bytes", str(64 << 20), *flags)


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def chat(client, *, says: str | None = None, **options):
    """``says``: what the model, whose weights are made up, is brought to write by a grammar."""
    extra = {"structured_outputs": {"choice": [says]}} if says is not None else {}
    fields = {"tools": [WEATHER, NOW], "max_tokens": 300, "temperature": 0, "seed": 1, **options}
    return client.chat.completions.create(model="tiny", messages=USER, extra_body=extra, **fields)


def test_the_model_calls_tools_of_its_own_accord(client):
    choice = chat(client, says=hermes(before="Let me look.\n")).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls] == CALLS
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_the_streamed_calls_are_the_same(client):
    role, content, calls, finish = added_up(chat(client, says=hermes(before="Let me look.\n"), stream=True))
    assert (role, content, finish) == ("assistant", "Let me look.", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLS


def test_arguments_are_streamed_while_they_are_written(client):
    says = hermes([("get_weather", {"city": "a long name of a city " * 5})])
    chunks = [c for c in chat(client, says=says, stream=True) if c.choices and c.choices[0].delta.tool_calls]
    assert len(chunks) > 5, "of a hundred tokens, of which several may come in one"


def test_content_is_null_when_there_are_only_calls(client):
    assert chat(client, says=hermes()).choices[0].message.content is None


def test_a_broken_call_is_content(client):
    broken = '<tool_call>{"name": now}</tool_call>'
    choice = chat(client, says=broken).choices[0]
    assert choice.message.content == broken and not choice.message.tool_calls and choice.finish_reason == "stop"
    assert added_up(chat(client, says=broken, stream=True))[1:3] == (broken, [])


def test_parallel_calls_can_be_turned_off(client):
    choice = chat(client, says=hermes(), parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    assert len(added_up(chat(client, says=hermes(), parallel_tool_calls=False, stream=True))[2]) == 1


def test_none_leaves_the_text_alone(client):
    choice = chat(client, says=hermes(), tool_choice="none").choices[0]
    assert choice.message.content == hermes() and not choice.message.tool_calls and choice.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_required_always_brings_calls_that_keep_to_the_schema(client, stream):
    """Whatever the model would have said: it is random."""
    for seed in range(3):
        answer = chat(
            client, tool_choice="required", temperature=1, seed=seed, stream=stream, parallel_tool_calls=False
        )
        if stream:
            _, content, calls, finish = added_up(answer)
            found = [(call["name"], call["arguments"]) for call in calls]
        else:
            choice = answer.choices[0]
            content, finish = choice.message.content or "", choice.finish_reason
            found = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
        assert finish == "tool_calls" and content == "" and len(found) == 1
        name, arguments = found[0][0], json.loads(found[0][1])
        if name == "now":
            assert arguments == {}
        else:
            assert name == "get_weather" and arguments.keys() == {"city", "unit", "near"}
            assert arguments["unit"] in ("celsius", "fahrenheit")
            assert all(place.keys() == {"x"} for place in arguments["near"])


def test_a_named_tool_is_called(client):
    named = {"type": "function", "function": {"name": "now"}}
    choice = chat(client, tool_choice=named).choices[0]
    assert [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls] == [("now", {})]
    assert choice.message.content is None and choice.finish_reason == "tool_calls"
    _, content, calls, finish = added_up(chat(client, tool_choice=named, stream=True))
    assert (content, calls[0]["name"], json.loads(calls[0]["arguments"]), finish) == ("", "now", {}, "tool_calls")


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_calls_that_max_tokens_cuts_off(client, choice):
    """Whole and streamed alike: the beginning of the call, no markup as content, finish_reason "length"; and the call
    can be sent back."""
    says = {"says": hermes()} if choice == "auto" else {}
    for max_tokens in (1, 3, 6, 10, 15, 21, 28, 36, 45):
        options = {"tool_choice": choice, "max_tokens": max_tokens, "parallel_tool_calls": False, **says}
        if choice == "required":
            options["tools"] = [WEATHER]  # the call's name is known from its first token on
        answer = chat(client, **options).choices[0]
        message, calls = answer.message, answer.message.tool_calls or []
        shown = f"{max_tokens} tokens: {message}"
        assert answer.finish_reason == "length" and not message.content, shown
        assert calls or (choice == "auto" and max_tokens < 28), shown
        _, content, streamed, finish = added_up(chat(client, stream=True, **options))
        assert (content, finish) == ("", "length"), shown
        assert [(c["name"], c["arguments"]) for c in streamed] == [
            (c.function.name, c.function.arguments) for c in calls
        ], shown
        for call in calls:
            assert choice != NAMED or call.function.name == "get_weather", shown
            assert isinstance(from_json(call.function.arguments or "{", allow_partial=True), dict), shown
        history = [*USER, message.model_dump(exclude_none=True), *USER]
        client.chat.completions.create(model="tiny", messages=history, max_tokens=1)


def test_a_stop_string_inside_a_call_leaves_it_unfinished(client):
    """What was stopped by the client's own string is no call to be made."""
    for stream in (False, True):
        answer = chat(client, says=hermes(), stop=["wea"], stream=stream)
        if stream:
            _, content, [call], finish = added_up(answer)
            name = call["name"]
        else:
            (choice,) = answer.choices
            content, finish, name = (
                choice.message.content or "",
                choice.finish_reason,
                choice.message.tool_calls[0].function.name,
            )
        assert (content, finish, name) == ("", "stop", "get_weather")


def test_every_sample_has_its_own_calls(client):
    named = {"type": "function", "function": {"name": "now"}}
    answer = chat(client, tool_choice=named, n=3)
    ids = [choice.message.tool_calls[0].id for choice in answer.choices]
    assert len(set(ids)) == 3


def test_calls_and_results_in_the_history_reach_the_template(unusual):
    messages = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    body = {"messages": messages, "tools": [WEATHER, NOW], "tool_choice": "none"}
    ids = unusual.post("/tokenize", body).json()["tokens"]
    text = unusual.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text == (
        "[get_weather][now]user:What is the weather in Paris?;assistant:(c1 get_weather Paris);tool:sunnyc1;"
    )
    answer = unusual.client().chat.completions.create(model="tiny", max_tokens=2, **body)
    assert answer.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize(
    ("arguments", "city"),
    [
        ("", ""),
        ("{", ""),
        ('{"ci', ""),
        ('{"city": "Par', "Par"),
        ('{"city": "Paris", "days": 1', "Paris"),
        ('{"city": "Paris", "near": [{"x": tr', "Paris"),
        ('{"city": "Pa\\u00', "Pa"),
    ],
)
def test_calls_that_were_cut_off_can_be_sent_back(arguments, city):
    """What there is of the arguments reaches the template as an object."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    (message,) = check_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    found = message["tool_calls"][0]["function"]["arguments"]
    assert isinstance(found, dict) and found.get("city", "") == city


def function(**fields) -> dict:
    return {"tools": [{"type": "function", "function": fields}]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tools": [{"type": "retrieval"}]}, ["tools.0.type", "retrieval"]),
        ({"tools": [{"type": "function"}]}, ["tools.0.function"]),
        (function(), ["tools.0.function.name"]),
        (function(name=""), ["tools.0.function.name"]),
        (function(name=7), ["tools.0.function.name", "7"]),
        (function(name="x" * 300), ["tools.0.function.name", "256"]),
        (function(name="f", description=1), ["tools.0.function.description"]),
        (function(name="f", parameters=[]), ["tools.0.function.parameters"]),
        (function(name="f", strict="yes"), ["tools.0.function.strict"]),
        ({"tools": [NOW, NOW]}, ["tools", "now", "twice"]),
        ({"tools": [NOW], "tool_choice": "always"}, ["tool_choice", "always"]),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, ["tool_choice"]),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "then"}}},
            ["tool_choice.function.name", "then", "now"],
        ),
        ({"tool_choice": "required"}, ["tool_choice needs tools"]),
        ({"tool_choice": {}}, ["tool_choice needs tools"]),
        ({"tools": [], "tool_choice": "required"}, ["tool_choice needs tools"]),
        ({**function(name="f", parameters={"type": "nonsense"}), "tool_choice": "required"}, ["tools", "nonsense"]),
        (
            {
                **function(name="f", parameters={"type": "object", "properties": {"a": {"pattern": "("}}}),
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            ["tools.0.function.parameters"],
        ),
        (
            {
                **function(name="f", parameters={"type": "object", "properties": {}, "required": 5}),
                "tool_choice": "required",
            },
            ["tools", "required"],
        ),
        (
            {**function(name="f", parameters=NESTED), "tool_choice": {"type": "function", "function": {"name": "f"}}},
            ["tools.0.function.parameters"],
        ),
        (
            {"tools": [NOW], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            ["structured_outputs.regex", "tool_choice"],
        ),
    ],
)
def test_bad_tools_are_refused_by_name(server, fields, says):
    answer = server.post("/v1/chat/completions", {"messages": USER, **fields})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert all(word in message for word in says), message


def test_a_template_without_tools_gets_them_told(shared_server):
    """Every model is told of its tools, of earlier calls and of their results."""
    messages = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    ids = shared_server.post("/tokenize", {"messages": messages, "tools": [WEATHER, NOW]}).json()["tokens"]
    text = shared_server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text.startswith("<|system|>Be brief.") and '"get_weather"' in text and '"now"' in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in text
    assert "<|user|><tool_response>\nsunny\n</tool_response>" in text
    choice = chat(shared_server.client(), tools=[NOW], says=hermes([("now", {})]), max_tokens=100).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]


@pytest.mark.slow
def test_the_embedded_model_fills_in_arguments(start):
    flags = ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20), "--served-model-name", "tiny"]
    client = start(*flags, model=DEFAULT_MODEL).client()
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"type": "function", "function": {"name": "get_weather", "parameters": city}}
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = chat(client, tools=[weather], tool_choice=choice, max_tokens=60).choices[0]
        assert json.loads(answer.message.tool_calls[0].function.arguments).keys() == {"city"}
        assert "Paris" in answer.message.tool_calls[0].function.arguments
    assert chat(client, tools=[weather], max_tokens=60).choices[0].finish_reason in ("stop", "tool_calls", "length")


def test_auto_can_be_turned_off(unusual):
    answer = unusual.post("/v1/chat/completions", {"messages": USER, "tools": [NOW]})
    assert answer.status_code == 400 and "--no-enable-auto-tool-choice" in answer.json()["error"]["message"]


@pytest.mark.parametrize("parallel", [True, False])
def test_the_answers_form_leaves_room_for_calls(client, parallel):
    """With tools and response_format the model answers in the form or calls; the random one comes to do both."""
    form = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": form}}
    kinds = set()
    for seed in range(16):
        options = {"temperature": 1.5, "seed": seed, "max_tokens": 100, "response_format": response_format}
        choice = chat(client, tools=[NOW], parallel_tool_calls=parallel, **options).choices[0]
        if choice.finish_reason == "tool_calls":
            kinds.add("calls")
            assert {(c.function.name, c.function.arguments.strip("{}\n\t ")) for c in choice.message.tool_calls} == {
                ("now", "")
            }
            assert not choice.message.content
        elif choice.finish_reason == "stop":
            kinds.add("answer")
            assert json.loads(choice.message.content).keys() == {"a"}
    assert kinds == {"calls", "answer"}


FORM = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
PLAIN = {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}
RESPONSES = {
    "input": "x",
    "max_output_tokens": 60,
    "tools": [{"type": "function", **PLAIN}],
    "text": {"format": {"type": "json_schema", "name": "a", "schema": FORM, "strict": True}},
}
MESSAGES = {
    "messages": USER,
    "max_tokens": 60,
    "output_config": {"format": {"type": "json_schema", "schema": FORM}},
    "tools": [{"name": "now", "input_schema": PLAIN["parameters"]}],
}
CHATS = {"messages": USER, "max_tokens": 60, "tools": [NOW]}
NAMED = {"type": "function", "function": {"name": "now"}}
OF_A_TEXT = {"type": "json_schema", "json_schema": {"name": "a", "schema": FORM, "strict": True}}


@pytest.mark.parametrize(
    ("path", "body", "at"),
    [
        ("chat/completions", {**CHATS, "tool_choice": "required", "response_format": OF_A_TEXT}, "tool_calls"),
        ("chat/completions", {**CHATS, "tool_choice": NAMED, "response_format": {"type": "json_object"}}, "tool_calls"),
        ("responses", {**RESPONSES, "tool_choice": "required"}, "function_call"),
        ("responses", {**RESPONSES, "tool_choice": {"type": "function", "name": "now"}}, "function_call"),
        ("messages", {**MESSAGES, "tool_choice": {"type": "any"}}, "tool_use"),
        ("messages", {**MESSAGES, "tool_choice": {"type": "tool", "name": "now"}}, "tool_use"),
    ],
)
def test_a_demanded_call_wins_over_the_form_of_a_text(server, path, body, at):
    answer = server.post(f"/v1/{path}", {"model": "tiny", "temperature": 1, "seed": 3, **body})
    assert answer.status_code == 200, answer.text
    assert f'"{at}"' in answer.text and '\\"a\\"' not in answer.text


EMAIL = r"^(?!\.)[A-Za-z0-9_+.-]*@[a-z]+\.[a-z]{2,}$"  # what Zod writes, nearly
ODD = {
    "type": "object",
    "required": ["to"],
    "properties": {
        "to": {"$ref": "#to"},
        "reply": {"type": "string", "pattern": EMAIL},
        "twice": {"pattern": r"^(a)$"},
        "tags": {"type": "array", "uniqueItems": True},
        "when": {"format": "a-format-of-mine"},
    },
    "if": {"required": ["tags"]},
    "then": {"required": ["when"]},
    "dependentRequired": {"reply": ["when"]},
    "$defs": {"x": {"$anchor": "to", "const": "you"}},
}
MAIL = {"name": "mail", "parameters": ODD}
CHOICES = [
    "auto",
    "required",
    {"type": "function", "function": {"name": "mail"}},
    {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "mail"}}]},
    },
]


@pytest.mark.parametrize("choice", CHOICES)
def test_schemas_beyond_grammars_refuse_no_tool(server, choice):
    body = {"messages": USER, "tools": [{"type": "function", "function": MAIL}], "tool_choice": choice, "seed": 1}
    answer = server.post("/v1/chat/completions", {**body, "max_tokens": 60})
    assert answer.status_code == 200, answer.text
    if choice != "auto":
        assert '"mail"' in answer.text, answer.text


@pytest.mark.parametrize("choice", CHOICES[1:])
def test_schemas_beyond_grammars_are_refused_by_name_where_a_demanded_tool_is_strict(server, choice):
    tools = [NOW, {"type": "function", "function": {**MAIL, "strict": True}}]
    answer = server.post("/v1/chat/completions", {"messages": USER, "tools": tools, "tool_choice": choice})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "tools.1.function.parameters"
    assert "properties.reply.pattern has look-ahead" in error["message"], error
    for harmless in ("auto", NAMED):
        offered = {"messages": USER, "tools": tools, "tool_choice": harmless, "max_tokens": 2}
        assert server.post("/v1/chat/completions", offered).status_code == 200


@pytest.mark.parametrize("a", [{"$ref": "#none"}, {"pattern": "("}, {"type": "text"}, {"required": "b"}], ids=str)
def test_a_tool_that_is_merely_offered_refuses_no_form_of_an_answer(server, a):
    """Whatever its parameters are."""
    broken = {"type": "object", "properties": {"a": a}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": broken}}]
    body = {"messages": USER, "tools": tools, "response_format": OF_A_TEXT, "max_tokens": 2}
    assert server.post("/v1/chat/completions", body).status_code == 200
    refused = server.post("/v1/chat/completions", {**body, "tool_choice": "required"})
    assert refused.status_code == 400 and "tools.0.function.parameters" in refused.json()["error"]["message"]


# LangChain


@pytest.fixture(scope="module")
def langchain(server):
    langchain_openai = pytest.importorskip("langchain_openai")

    def make(says: str | None = None, **options):
        extra = {"structured_outputs": {"choice": [says]}} if says is not None else {}
        return langchain_openai.ChatOpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            model="tiny",
            temperature=0,
            max_retries=0,
            extra_body=extra,
            **{"max_tokens": 300, **options},
        )

    return make


def test_langchain_binds_tools(langchain):
    llm = langchain(hermes()).bind_tools([WEATHER, NOW])
    answer = llm.invoke("What is the weather?")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == CALLS
    assert answer.response_metadata["finish_reason"] == "tool_calls" and not answer.invalid_tool_calls


def test_langchain_streams_tool_calls(langchain):
    total = None
    for chunk in langchain(hermes(before="Wait.")).bind_tools([WEATHER, NOW]).stream("What is the weather?"):
        total = chunk if total is None else total + chunk
    assert [(call["name"], call["args"]) for call in total.tool_calls] == CALLS
    assert total.content == "Wait."


def test_langchain_agent_loop(langchain):
    """Tool results go back with the history that LangChain makes of the answer."""
    from langchain_core.messages import HumanMessage, ToolMessage

    first = langchain(hermes([("now", {})])).bind_tools([NOW]).invoke("What time is it?")
    history = [HumanMessage("What time is it?"), first, ToolMessage("noon", tool_call_id=first.tool_calls[0]["id"])]
    assert langchain("It is noon.").bind_tools([NOW]).invoke(history).content == "It is noon."


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(langchain, method):
    from pydantic import BaseModel, Field

    class Answer(BaseModel):
        sunny: bool
        degrees: int = Field(ge=0, le=9)

    answer = langchain().with_structured_output(Answer, method=method).invoke("What is the weather?")
    assert isinstance(answer, Answer)
