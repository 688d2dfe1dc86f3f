"""A demanded call is the one that the model says by itself, with the line breaks of its own template."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.reciting import Recital, small_tokenizer, write_reciting_model

from octavo import LLM, SamplingParams

HEAD = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
THINKS = "{% if m.role == 'assistant' %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
EACH = "{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function %}{{ '\n\n' }}"
HERMES = '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}'
XML = (
    "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
SAID = {
    HERMES: '\n\n<tool_call>\n{"name": "find", "arguments": {"text": "a b"}}\n</tool_call>',
    XML: "\n\n<tool_call>\n<function=find>\n<parameter=text>\na b\n</parameter>\n</function>\n</tool_call>",
}
CUE = "please search the whole tree"
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
FIND = {"type": "function", "function": {"name": "find", "description": "", "parameters": TEXT}}


def reciting(folder: Path, said: str, template: str, more: str = "") -> LLM:
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer = small_tokenizer([said, CUE, more], ("<|im_start|>", "<|im_end|>"), marks)
    write_reciting_model(folder, tokenizer, Recital({CUE: said}, template, "<|im_end|>"))
    return LLM(str(folder), kv_cache_memory_bytes=64 << 20)


@pytest.mark.parametrize(("calls", "thinks"), [(HERMES, True), (XML, True), (HERMES, False)])
def test_two_line_breaks_in_front_of_a_demanded_call_are_the_models_own(
    tmp_path: Path, calls: str, thinks: bool
) -> None:
    template = HEAD + THINKS * thinks + EACH + calls + TAIL + "<think>\n" * thinks + "{% endif %}"
    said = "Hm.\n</think>\n\n" * thinks + SAID[calls]
    llm = reciting(tmp_path, said, template)
    params = SamplingParams(temperature=0, max_tokens=200, skip_special_tokens=False)
    for choice in ("auto", "required", {"type": "function", "function": {"name": "find"}}):
        asked = [{"role": "user", "content": CUE}]
        (output,) = llm.chat(asked, params, use_tqdm=False, tools=[FIND], tool_choice=choice)
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == (said, "stop")


@pytest.mark.parametrize("calls", [HERMES, XML])
def test_a_strict_tool_holds_its_calls_and_nothing_else(tmp_path: Path, calls: str) -> None:
    template = HEAD + THINKS + EACH + calls + TAIL + "<think>\n{% endif %}"
    said = "Is a < b? <function\n</think>\n\nI look." + SAID[calls]
    llm = reciting(tmp_path, said, template, "c d")
    params = SamplingParams(temperature=0, max_tokens=200, skip_special_tokens=False)
    for texts, found in ((["a b", "x"], "a b"), (["c d"], "c d")):
        parameters = {**TEXT, "properties": {"text": {"enum": texts}}}
        function = {"name": "find", "description": "", "parameters": parameters, "strict": True}
        asked, tools = [{"role": "user", "content": CUE}], [{"type": "function", "function": function}]
        (output,) = llm.chat(asked, params, use_tqdm=False, tools=tools)
        text, wanted = output.outputs[0].text, said.replace("a b", found)[: said.index("</tool_call>")]
        assert text.startswith(wanted) or found != "a b"  # behind another text it breaks lines as it likes
        assert "".join(text.split()).startswith("".join(wanted.split()))
