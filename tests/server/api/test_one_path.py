"""One conversation has one prompt: in every dialect, over /tokenize, in batches and in `LLM.chat`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.chat.messages import Conversation, check_messages
from octavo.chat.options import ChatOptions
from octavo.chat.render import render
from octavo.chat.tools.formats.table import TOOL_FORMATS
from octavo.chat.tools.parsers import CallPiece, reader_of
from octavo.entrypoints.anthropic import prepare as anthropic
from octavo.entrypoints.anthropic.protocol import MessagesRequest
from octavo.entrypoints.app import WORK_OPERATIONS
from octavo.entrypoints.dialect import respond
from octavo.entrypoints.ollama.prepare import chat_conversation
from octavo.entrypoints.ollama.protocol import ChatRequest
from octavo.entrypoints.openai.protocol import ChatCompletionRequest
from octavo.entrypoints.responses import prepare as responses
from octavo.entrypoints.responses.protocol import ResponsesRequest
from octavo.entrypoints.responses.tools import toolbox_of
from octavo.entrypoints.sealing import Seal
from octavo.text.tokenizer import Tokenizer

TURN = (
    "<|{{ m.role }}|>{{ m.reasoning_content }}|{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}<|end|>"
)
HEAD = "{{ reasoning_effort }}{% if tools %}{{ tools | tojson }}{% endif %}"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
HERMES = (
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
)
FIRST = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}"
)
HARMONY = (
    "Reasoning: {{ reasoning_effort or 'medium' }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.thinking }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TEMPLATES = {
    "knows tools": HEAD + LOOP.replace("CALL", HERMES),
    "knows no tools": LOOP.replace("CALL", ""),
    "takes instructions first": HEAD + LOOP.replace("CALL", HERMES).replace("{% for m in messages %}", FIRST),
    "takes turns": LOOP.replace("CALL", "").replace("{% for m in messages %}", ALTERNATE),
    "parts": LOOP.replace("CALL", "").replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}",
    ),
    "harmony": HARMONY,
}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
words = st.sampled_from(["a", "é b", "\n c ", "<b>", "d\n\ne", "</think>"])
names = st.sampled_from(["note", "now"])
arguments = st.sampled_from([{}, {"text": "7"}, {"text": "é", "tags": [1, None]}])
steps = st.tuples(st.none() | words, st.none() | words, st.lists(st.tuples(names, arguments), max_size=2), words)
exchanges = st.tuples(
    words, st.booleans(), steps
)  # what is asked, with an image or without; thoughts, text, calls, result
TOOLS = [
    {
        "name": "note",
        "description": "Write it down",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "tags": {"type": "array"}}},
    },
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
]


@st.composite
def conversations(draw: st.DrawFn) -> dict[str, Any]:
    """What every dialect can say."""
    return {
        "system": draw(st.none() | words.filter(lambda text: text.strip() == text)),
        "exchanges": draw(st.lists(exchanges, max_size=3)),
        "asked": draw(words),
        "image": draw(st.booleans()),
        "tools": draw(st.sampled_from([None, TOOLS[:1], TOOLS])),
        "effort": draw(st.sampled_from([None, "low", "high", "max"])),
    }


def without_images(said: dict[str, Any]) -> dict[str, Any]:
    return {**said, "image": False, "exchanges": [(text, False, step) for text, _, step in said["exchanges"]]}


def openai_body(said: dict[str, Any]) -> dict[str, Any]:
    def asked(text: str, image: bool) -> dict[str, Any]:
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        return {"role": "user", "content": [picture, {"type": "text", "text": text}] if image else text}

    messages: list[dict[str, Any]] = [{"role": "system", "content": said["system"]}] if said["system"] else []
    for at, (text, image, (thoughts, answer, calls, result)) in enumerate(said["exchanges"]):
        messages.append(asked(text, image))
        told: dict[str, Any] = {"role": "assistant", "content": answer or ("" if calls else "x")}
        if thoughts:
            told["reasoning_content"] = thoughts
        if calls:
            told["tool_calls"] = [
                {"id": f"c{at}{i}", "type": "function", "function": {"name": n, "arguments": json.dumps(given)}}
                for i, (n, given) in enumerate(calls)
            ]
        messages.append(told)
        messages += [{"role": "tool", "tool_call_id": f"c{at}{i}", "content": result} for i in range(len(calls))]
    messages.append(asked(said["asked"], said["image"]))
    body: dict[str, Any] = {"messages": messages}
    if said["tools"]:
        body["tools"] = [{"type": "function", "function": tool} for tool in said["tools"]]
    if said["effort"]:
        body["reasoning_effort"] = said["effort"]
    return body


def anthropic_body(said: dict[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for message in openai_body(said)["messages"]:
        content = message["content"]
        if message["role"] == "user":
            if not isinstance(content, str):
                source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
                content = [{"type": "image", "source": source}, content[1]]
            messages.append({"role": "user", "content": content})
        elif message["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
            messages.append({"role": "user", "content": [result]})
        elif message["role"] == "assistant":
            thoughts = message.get("reasoning_content")
            blocks: list[dict[str, Any]] = [{"type": "thinking", "thinking": thoughts}] if thoughts else []
            blocks += [{"type": "text", "text": content}] if content else []
            for call in message.get("tool_calls", ()):
                function, given = call["function"], json.loads(call["function"]["arguments"])
                blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
            messages.append({"role": "assistant", "content": blocks})
    body: dict[str, Any] = {"messages": messages, "max_tokens": 1}
    if said["system"]:
        body["system"] = said["system"]
    if said["tools"]:
        body["tools"] = [{"input_schema" if k == "parameters" else k: v for k, v in t.items()} for t in said["tools"]]
    if said["effort"]:
        body["output_config"] = {"effort": said["effort"]}
    return body


def responses_body(said: dict[str, Any]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for message in openai_body(said)["messages"]:
        content = message["content"]
        if message["role"] == "user":
            if not isinstance(content, str):
                picture = {"type": "input_image", "image_url": content[0]["image_url"]["url"]}
                content = [picture, {"type": "input_text", "text": content[1]["text"]}]
            items.append({"role": "user", "content": content})
        elif message["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": content})
        elif message["role"] == "assistant":
            if thoughts := message.get("reasoning_content"):
                items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": thoughts}]})
            items += [{"role": "assistant", "content": content}] if content else []
            for call in message.get("tool_calls", ()):
                items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    body: dict[str, Any] = {"input": items}
    if said["system"]:
        body["instructions"] = said["system"]
    if said["tools"]:
        body["tools"] = [{"type": "function", **tool} for tool in said["tools"]]
    if said["effort"]:
        body["reasoning"] = {"effort": said["effort"]}
    return body


def ollama_body(said: dict[str, Any]) -> dict[str, Any]:
    messages = []
    for message in openai_body(said)["messages"]:
        kept = {key: value for key, value in message.items() if key not in ("reasoning_content", "tool_calls")}
        if not isinstance(message["content"], str):
            kept |= {"content": message["content"][1]["text"], "images": [PIXEL]}
        if thoughts := message.get("reasoning_content"):
            kept["thinking"] = thoughts
        if calls := message.get("tool_calls"):
            kept["tool_calls"] = [
                {
                    "id": call["id"],
                    "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])},
                }
                for call in calls
            ]
        messages.append(kept)
    body: dict[str, Any] = {"messages": messages}
    if said["tools"]:
        body["tools"] = [{"type": "function", "function": tool} for tool in said["tools"]]
    if said["effort"]:
        body["think"] = said["effort"]
    return body


def in_every_dialect(said: dict[str, Any]) -> dict[str, Conversation]:
    """The conversation that each dialect makes of its own body."""
    chat = ChatCompletionRequest.model_validate(openai_body(said))
    found = {"openai": chat.conversation(check_messages(chat.messages))}
    found["anthropic"] = anthropic.conversation_of(MessagesRequest.model_validate(anthropic_body(said)), Seal(b"s"))
    body = ResponsesRequest.model_validate(responses_body(said))
    tools = toolbox_of(body.tools, body.input)
    found["responses"] = responses.conversation_of(body, body.input, tools)
    for conversation in (found["anthropic"], found["responses"]):
        conversation.messages = check_messages(conversation.messages)
    found["ollama"] = chat_conversation(ChatRequest.model_validate(ollama_body(said)))
    return found


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer.from_directory(tiny_model)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=conversations(), template=st.sampled_from(sorted(TEMPLATES)), parser=st.sampled_from([None, "qwen3"]))
def test_every_dialect_s_body_has_the_same_prompt(
    tokenizer: Tokenizer, said: dict[str, Any], template: str, parser: str | None
) -> None:
    options = ChatOptions(TEMPLATES[template], reasoning_parser=parser)
    prompts, images = {}, set()
    for dialect, conversation in in_every_dialect(said).items():
        try:
            rendered = render(conversation, options, tokenizer, tokenizer.encode, lambda: "<image>")
        except ValueError as error:  # the template's own
            prompts[dialect] = str(error)
            continue
        prompts[dialect] = rendered.text
        images.add(len(rendered.images))
        assert rendered.ids == tokenizer.encode(rendered.text or "")
    assert len(set(prompts.values())) == 1, prompts
    assert images <= {sum(image for _, image, _ in said["exchanges"]) + said["image"]}


def test_every_route_that_streams_is_answered_by_respond() -> None:
    """Those of POST: a GET streams what another request has made."""
    streams = [operation for operation in WORK_OPERATIONS if operation.streams and operation.method == "POST"]
    handlers = [operation.handler for operation in streams]
    assert len(handlers) >= 6
    assert {getattr(handler, "func", handler) for handler in handlers} == {respond}


@pytest.fixture(scope="module")
def both(start, tiny_model):
    """A server, and an `LLM` of the same model."""
    flags = ("--load-format", "dummy", "--served-model-name", "tiny", "--trust-request-chat-template")
    server = start(*flags, "--kv-cache-memory-bytes", str(64 << 20))
    return server, LLM(str(tiny_model), load_format="dummy", kv_cache_memory_bytes=64 << 20)


CHOICES = st.sampled_from(
    [
        None,
        "none",
        "auto",
        "required",
        {"type": "function", "function": {"name": "note"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "now"}}]}},
    ]
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=conversations(), template=st.sampled_from([None, *sorted(TEMPLATES)]), choice=CHOICES)
def test_a_chat_offline_has_the_server_s_prompt_or_error(
    both: Any, said: dict[str, Any], template: str | None, choice: Any
) -> None:
    server, llm = both
    said = without_images(said)
    options = {key: value for key, value in openai_body(said).items() if key != "messages"}
    options |= {"chat_template": TEMPLATES[template]} if template is not None else {}
    options |= {"tool_choice": choice} if choice is not None else {}
    messages = openai_body(said)["messages"]
    counted = server.post("/tokenize", {"messages": messages, **options}).json()
    more = {"max_tokens": 1, "return_token_ids": True, "ignore_eos": True}
    answered = server.post("/v1/chat/completions", {"messages": messages, **options, **more}).json()
    try:
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        (output,) = llm.chat(messages, params, use_tqdm=False, **options)
    except ValueError as error:
        refused = answered["error"]["message"]
        if "max_model_len" not in refused:  # whose words differ by what is too long, and which /tokenize does not check
            assert refused == counted["error"]["message"] == str(error)
    else:
        assert answered["prompt_token_ids"] == counted["tokens"] == output.prompt_token_ids


def test_tools_are_in_the_prompt_offline(both: Any) -> None:
    _, llm = both
    tools = [{"type": "function", "function": tool} for tool in TOOLS[:1]]
    (output,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1), use_tqdm=False, tools=tools)
    assert "Write it down" in output.prompt


def test_a_demanded_call_is_made_offline(both: Any) -> None:
    _, llm = both
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    params = SamplingParams(max_tokens=60, temperature=0)
    (output,) = llm.chat(
        [{"role": "user", "content": "hi"}],
        params,
        use_tqdm=False,
        tools=tools[1:],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    reader = reader_of(TOOL_FORMATS["hermes"], ["now"])
    (call,) = [*reader.feed(output.outputs[0].text), *reader.finish()]
    assert isinstance(call, CallPiece) and (call.name, json.loads(call.arguments)) == ("now", {})
    message = output.outputs[0].message
    assert message["content"] is None and message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


SAYS = {
    None: "Well, it is <tool_call>",
    "knows tools": 'So.\n<tool_call>\n{"name": "note", "arguments": {"text": "é", "tags": [1]}}\n</tool_call>',
    "knows no tools": "<think>\nI wonder.\n</think>\n\nIt is so.",
}


@pytest.mark.parametrize("template", SAYS)
def test_a_message_offline_is_the_server_s(both: Any, template: str | None) -> None:
    server, llm = both
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    fields: dict[str, Any] = {"tools": tools, "chat_template_kwargs": {"a": 1}}
    if template is not None:
        fields["chat_template"] = TEMPLATES[template] + "{# <think> </think> #}"
    says = {"structured_outputs": {"choice": [SAYS[template]]}, "max_tokens": 300, "temperature": 0}
    answer = server.post("/v1/chat/completions", {"messages": messages, **fields, **says}).json()["choices"][0]
    params = SamplingParams(
        max_tokens=300, temperature=0, structured_outputs=StructuredOutputsParams(choice=[SAYS[template]])
    )
    (output,) = llm.chat(messages, params, use_tqdm=False, **fields)
    assert "</think>" in SAYS[template] or output.outputs[0].text == SAYS[template]
    told, made = answer["message"], output.outputs[0].message
    assert (made["content"], made.get("reasoning")) == (told["content"], told.get("reasoning"))
    given = [call["function"] for call in told.get("tool_calls") or ()]
    assert [call["function"] for call in made.get("tool_calls", ())] == given


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=conversations())
def test_counted_tokens_are_those_of_the_prompt(both: Any, said: dict[str, Any]) -> None:
    server, _ = both
    said = without_images(said)
    told = server.post("/tokenize", openai_body(said)).json()
    body = {key: value for key, value in anthropic_body(said).items() if key != "max_tokens"}
    counted = server.post("/v1/messages/count_tokens", body).json()
    if "error" in told:
        assert counted["error"]["message"] == told["error"]["message"]
    else:
        assert counted["input_tokens"] == len(told["tokens"])


@pytest.mark.slow
def test_a_batch_has_the_server_s_prompts_and_errors(both: Any, tiny_model: Path, tmp_path: Path) -> None:
    server, _ = both
    bodies: list[dict[str, Any]] = []

    @settings(max_examples=200, deadline=None, database=None)
    @given(said=conversations(), template=st.sampled_from([None, *sorted(TEMPLATES)]))
    def draw(said: dict[str, Any], template: str | None) -> None:
        more = {"chat_template": TEMPLATES[template]} if template is not None else {}
        bodies.append(openai_body(without_images(said)) | more)

    draw()
    more = {"max_tokens": 1, "return_token_ids": True, "ignore_eos": True}
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/chat/completions", "body": body | more}
        for at, body in enumerate(bodies)
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--load-format", "dummy", "--kv-cache-memory-bytes", str(32 << 20), "--trust-request-chat-template"]
    asked = ["run-batch", "-i", str(source), "-o", str(target), "--model", str(tiny_model), *flags]
    subprocess.run([sys.executable, "-m", "octavo.cli.main", *asked], check=True, timeout=100)
    answers = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, target.read_text().splitlines())}
    for at, body in enumerate(bodies):
        told, answer = server.post("/tokenize", body).json(), answers[str(at)]
        if "error" in told:
            assert answer["error"]["message"] == told["error"]["message"]
        elif "error" in answer:
            assert "max_model_len" in answer["error"]["message"]  # which /tokenize does not check
        else:
            assert answer["prompt_token_ids"] == told["tokens"]
