"""Loops of calls over HTTP in the shapes of four families: each prompt's beginning is what was computed, though clients
leave thoughts out and write arguments anew, and answers end with a token that begins what follows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from support.reciting import Recital, small_tokenizer, write_reciting_model

NAMES = ("north", "south", "east", "west", "inner", "outer")
CUES = [f"the file is read to its last line {name}" for name in ("first", *NAMES)]
BLOCK = 16
EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
LAST = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
)
TYPED = (
    '{% macro typed(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{{ "{" }}'
    "{% for k, i in v | dictsort %}{{ k }}:{{ typed(i) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)


@dataclass(frozen=True)
class Family:
    """A shorter template of a family's structure, what its model says, and the token that ends a turn of calls."""

    template: str
    says: str  # "NAME" stands for another word in each answer
    end: str
    special: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


FAMILIES = {
    "glm 4.7": Family(
        "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}" + LAST + "{% for m in messages %}"
        "{% if m.role == 'assistant' %}<|assistant|>{% if loop.index0 > last.user and m.reasoning_content %}"
        "<think>{{ m.reasoning_content.strip() }}</think>{% else %}</think>{% endif %}{{ (m.content or '').strip() }}"
        + EACH + "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
        "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}"
        "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>"
        "{% endif %}<tool_response>{{ m.content }}</tool_response>{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ '</think>' if enable_thinking is false else "
        "'<think>' }}{% endif %}",
        "Next is NAME.</think><tool_call>Read<arg_key>path</arg_key><arg_value>NAME.py</arg_value><arg_key>a</arg_key>"
        "<arg_value>3</arg_value></tool_call>",
        "<|observation|>",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
         "<tool_response>", "</tool_response>"),
    ),
    "gpt-oss": Family(
        "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}{{ tools | tojson if tools }}<|end|>"
        + LAST + "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}{% if m.thinking %}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "{% set f = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json"
        "<|message|>{{ f.arguments | tojson }}<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>"
        "{{ m.content }}<|end|>{% endif %}{% elif m.role == 'tool' %}<|start|>functions.Read to=assistant<|channel|>"
        "commentary<|message|>{{ m.content }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|channel|>analysis<|message|>Next is NAME.<|end|><|start|>assistant<|channel|>commentary to=functions.Read "
        '<|constrain|>json<|message|>{"path": "NAME.py", "a": 3}<|call|>',
        "<|call|>",
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|return|>", "<|end|>"),
    ),
    "gemma 4": Family(
        TYPED + "<bos>{% if tools %}<|turn>system\n<|think|>{{ tools | tojson }}<turn|>\n{% endif %}" + LAST
        + "{% set open = namespace(turn=false) %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if not open.turn %}<|turn>model\n{% endif %}{% if m.reasoning and m.tool_calls and loop.index0 > last.user "
        "%}<|channel>thought\n{{ m.reasoning }}\n<channel|>{% endif %}{{ (m.content or '') | trim }}" + EACH
        + "<|tool_call>call:{{ f.name }}{{ typed(f.arguments) }}<tool_call|>{% endfor %}"
        "{% set open.turn = m.tool_calls | length > 0 %}{% if not open.turn %}<turn|>\n{% endif %}"
        "{% elif m.role == 'tool' %}<|tool_response>response:Read{value:<|\"|>{{ m.content }}<|\"|>}<tool_response|>"
        "{% else %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% set open.turn = false %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and not open.turn %}<|turn>model\n{% endif %}",
        "<|channel>thought\nNext is NAME.\n<channel|><|tool_call>call:Read{path:<|\"|>NAME.py<|\"|>,a:3}<tool_call|>",
        "<|tool_response>",
        ("<bos>", "<|turn>", "<turn|>", "<|think|>", "<|tool_response>", "<tool_response|>"),
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "mistral": Family(
        "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
        "{{ m.content or '' }}" + EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}</s>"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}[INST]{{ m.content }}[/INST]"
        "{% endif %}{% endfor %}",
        '[THINK]Next is NAME.[/THINK][TOOL_CALLS]Read[ARGS]{"path": "NAME.py", "a": 3}',
        "</s>",
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[THINK]", "[/THINK]"),
    ),
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "Read", "parameters": SCHEMA}}]


@pytest.fixture(scope="module", params=FAMILIES)
def server(request, start, tmp_path_factory):
    family = FAMILIES[request.param]
    scripts = {cue: family.says.replace("NAME", name) for cue, name in zip(CUES, NAMES, strict=False)}
    says = {cue: text.removesuffix(family.end) for cue, text in scripts.items()}
    backend = small_tokenizer([*scripts, *scripts.values()], family.special, family.marks)
    folder = tmp_path_factory.mktemp("family") / "model"
    write_reciting_model(folder, backend, Recital(says, family.template, family.end))
    return start("--served-model-name", "spoken", "--kv-cache-memory-bytes", "96MiB", model=folder)


@pytest.mark.slow
@pytest.mark.parametrize("sends_thoughts", [False, True], ids=["without thoughts", "with thoughts"])
def test_five_turns_are_found_in_the_cache(server, sends_thoughts):
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Thoughts {sends_thoughts}: {CUES[0]}"}]
    found = []
    for name, cue in zip(NAMES[:5], CUES[1:], strict=False):
        body = {"model": "spoken", "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
        answer = server.post("/v1/chat/completions", body).json()
        message, used = answer["choices"][0]["message"], answer["usage"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"path": f"{name}.py", "a": 3}
        assert message["reasoning_content"].strip() == f"Next is {name}." and not message["content"]
        found.append((used["prompt_tokens_details"]["cached_tokens"], used["total_tokens"]))
        again = json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True, separators=(",", ":"))
        thoughts = {"reasoning_content": message["reasoning_content"]} if sends_thoughts else {}
        function = {"name": "Read", "arguments": again}
        messages.append(
            {"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}], **thoughts}
        )
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": cue})
    for (_, known), (cached, _) in pairwise(found):
        assert cached >= known - BLOCK, "all of the last turn, but for a block that was not full"
    metrics = server.get("/metrics").text
    assert not re.search(r"^octavo:replay_misses_total\{.*?\} [1-9]", metrics, re.MULTILINE)
