"""A chat template that writes agents' conversations as Qwen3.5's does, and a tokenizer that knows its marks."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from octavo.text.tokenizer import Tokenizer

# A user's message ends the thoughts of all earlier rounds, unless they are asked to stay; calls are XML, their results
# a user's message, and instructions and tools one of the system. An answer begins inside of its thoughts.
TEMPLATE = r"""
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == "user" -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if last.user < 0 -%}{{ raise_exception("there is no question") }}{%- endif -%}
{{ "<|im_start|>system\n" }}
{%- for tool in tools or [] -%}{{ tool | tojson + "\n" }}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == "system" -%}
{%- if not loop.first -%}{{ raise_exception("instructions come first") }}{%- endif -%}{{ m.content + "<|im_end|>\n" }}
{%- elif m.role == "user" -%}{{ "<|im_start|>user\n" + m.content | trim + "<|im_end|>\n" }}
{%- elif m.role == "assistant" -%}
{{ "<|im_start|>assistant\n" }}
{%- if preserve_thinking or loop.index0 > last.user -%}
{{ "<think>\n" + (m.reasoning_content or "") | trim + "\n</think>\n\n" }}
{%- endif -%}
{{ (m.content or "") | trim }}
{%- for call in m.tool_calls or [] -%}
{{ "\n\n<tool_call>\n<function=" + call.function.name + ">\n" }}
{%- for name, value in call.function.arguments | items -%}
{{ "<parameter=" + name + ">\n" + value + "\n</parameter>\n" }}
{%- endfor -%}
{{ "</function>\n</tool_call>" }}
{%- endfor -%}
{{ "<|im_end|>\n" }}
{%- elif m.role == "tool" -%}
{{ "<|im_start|>user\n<tool_response>\n" + m.content + "\n</tool_response><|im_end|>\n" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ "<|im_start|>assistant\n<think>\n" + ("\n</think>\n\n" if enable_thinking is false else "") }}
{%- endif -%}
"""
# The same with values of any type, and calls that follow thoughts at once where there is no text.
_BEFORE = r'(("\n\n" if (m.content or "") | trim else "") if loop.first else "\n")'
FULL_TEMPLATE = TEMPLATE.replace("+ value +", "+ (value if value is string else value | tojson) +").replace(
    r'"\n\n<tool_call>', _BEFORE + ' + "<tool_call>'
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
WORDS = ["a", "file", "of", "the", "test", "was", "found", "in", "src", "and", "its", "line", "says", "return", "value"]


@cache
def tokenizer() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return Tokenizer(backend, {}, {"default": TEMPLATE})
