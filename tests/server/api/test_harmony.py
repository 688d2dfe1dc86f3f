"""A server whose model speaks harmony: thoughts, answers and calls through OpenAI's client."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import tokenizers

TEMPLATE = (
    "Reasoning: {{ reasoning_effort or 'medium' }}{% if tools %} {{ tools|length }} tools{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{% if m.tool_calls %}{{ m.thinking }} {{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}"
    "{% if not (loop.last and m.role == 'assistant') %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TOKENS = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|return|>"]
USER = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


@pytest.fixture(scope="module")
def chat(start, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("harmony") / "model"
    shutil.copytree(tiny_model, folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(TOKENS)
    backend.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"eos_token": "<|return|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = backend.token_to_id("<|return|>")
    (folder / "config.json").write_text(json.dumps(config))
    server = start("--load-format", "dummy", "--served-model-name", "tiny", model=folder)

    def chat(messages=USER, **options):
        """Thoughts come to an end soon, if there are any."""
        more = {"seed": 5, "temperature": 1, "max_tokens": 400, **options}
        bias = {str(backend.token_to_id("<|end|>")): 3.5}
        return server.client().chat.completions.create(model="tiny", messages=messages, logit_bias=bias, **more)

    chat.backend, chat.post, chat.server = backend, server.post, server  # type: ignore[attr-defined]
    return chat


def test_the_log_and_the_list_of_models_say_so(chat):
    assert "answers, thoughts and calls are harmony" in chat.server.log
    assert chat.server.get("/v1/models").json()["data"][0]["tool_format"] == "openai"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_demanded_call_is_made_in_the_format(chat, choice):
    for seed in range(4):
        answer = chat(tools=[WEATHER, NOW], tool_choice=choice, seed=seed).choices[0]
        assert answer.finish_reason == "tool_calls" and not answer.message.content
        (call,) = answer.message.tool_calls
        if call.function.name == "get_weather":
            assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        else:
            assert choice == "required" and json.loads(call.function.arguments) == {}


def test_a_form_is_asked_of_the_final_message_streamed_or_not(chat):
    seen = set()
    for seed in range(4):
        whole = chat(response_format=FORM, seed=seed).choices[0]
        thoughts = whole.message.reasoning_content or ""
        assert whole.finish_reason == "stop" and json.loads(whole.message.content)["city"] in ("Paris", "Rome")
        assert "<|" not in thoughts + whole.message.content
        seen.add(bool(thoughts))
        streamed = {"reasoning_content": "", "content": ""}
        for chunk in chat(response_format=FORM, seed=seed, stream=True):
            for name in streamed:
                streamed[name] += getattr(chunk.choices[0].delta, name, None) or ""
        assert streamed == {"reasoning_content": thoughts, "content": whole.message.content}
    assert True in seen, "some answers begin with thoughts"
    hidden = chat(response_format=FORM, extra_body={"include_reasoning": False}).choices[0].message
    assert hidden.reasoning_content is None and hidden.content


def test_a_form_or_a_call(chat):
    made = [chat(response_format=FORM, tools=[WEATHER], seed=seed).choices[0] for seed in range(8)]
    for answer in made:
        if answer.finish_reason == "tool_calls":
            assert [call.function.name for call in answer.message.tool_calls] == ["get_weather"]
        else:
            assert json.loads(answer.message.content)["city"]
    assert {answer.finish_reason for answer in made} == {"stop", "tool_calls"}


def test_free_answers_end_at_a_call_or_the_end(chat):
    """Of a random model: what comes is anything, but no markup, and it ends where harmony ends."""
    for token in ("<|call|>", "<|return|>"):
        bias = {str(chat.backend.token_to_id(token)): 100}
        body = {"model": "tiny", "messages": USER, "tools": [NOW], "max_tokens": 5, "logit_bias": bias}
        choice = chat.post("/v1/chat/completions", body).json()["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["message"]["content"] == ""
    message = chat(max_tokens=60, seed=1, temperature=2).choices[0].message
    assert "<|message|>" not in (message.content or "") + (message.reasoning_content or "")


def test_the_template_gets_the_effort_and_earlier_thoughts(chat):
    def prompt(messages: list[dict], **more: object) -> str:
        body = {"model": "tiny", "messages": messages, "max_tokens": 1, "return_token_ids": True, **more}
        ids = chat.post("/v1/chat/completions", body).json()["prompt_token_ids"]
        return chat.backend.decode(ids, skip_special_tokens=False)

    for effort, shown in (("low", "low"), ("minimal", "low"), ("high", "high"), ("max", "high")):
        assert prompt(USER, reasoning_effort=effort).startswith(f"Reasoning: {shown}")
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    history = [
        *USER,
        {"role": "assistant", "reasoning_content": "I ask.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    assert "I ask. now<|end|>" in prompt(history)
    assert prompt(history).endswith("12:00<|end|><|start|>assistant")


def test_a_continued_answer_is_content(chat):
    messages = [*USER, {"role": "assistant", "content": "It is"}]
    body = {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "structured_outputs": {"choice": [" sunny"]},
    }
    assert chat(messages, extra_body=body).choices[0].message.content == " sunny"
    del body["structured_outputs"]
    body |= {"model": "tiny", "messages": messages, "tools": [NOW], "tool_choice": "required"}
    refused = chat.post("/v1/chat/completions", body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize("instructs", [True, False])
def test_a_conversation_without_a_word_of_the_user_is_answered(chat, instructs):
    """Agents begin with instructions alone, and go on after calls that nobody asked for."""
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    called = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1"}]
    called[1]["content"] = "12:00"
    told = [{"role": "developer", "content": "Say how late it is."}] if instructs else []
    for messages in [told, [*told, *called]] if instructs else [called]:
        form = chat(messages, response_format=FORM, seed=2).choices[0]
        assert json.loads(form.message.content)["city"] in ("Paris", "Rome")
        made = (
            chat(messages, tools=[WEATHER, NOW], tool_choice="required", seed=2, max_tokens=300)
            .choices[0]
            .message.tool_calls
        )
        assert made[0].function.name in ("get_weather", "now")
    items = [{"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}]
    items.append({"type": "function_call_output", "call_id": "c1", "output": "12:00"})
    body = {
        "model": "tiny",
        "max_output_tokens": 20,
        "input": items,
        "tools": [{"type": "function", **NOW["function"]}],
    }
    body |= {"instructions": "Say how late it is."} if instructs else {}
    answer = chat.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
