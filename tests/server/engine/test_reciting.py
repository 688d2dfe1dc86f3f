"""The reciting checkpoint, which other tests ask for answers: it says its scripts, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.agent_chats import TEMPLATE
from support.reciting import Recital, small_tokenizer, write_reciting_model

from octavo import LLM, SamplingParams
from octavo.fetch.sources import resolve_model
from octavo.text.tokenizer import Tokenizer

CALL = (
    'I look first.\n</think>\n\nLet me look.\n\n<tool_call>\n<function=find>\n<parameter=text>\na </b> é日 "x"\n'
    "</parameter>\n</function>\n</tool_call>"
)
SCRIPTS = {
    "please search the whole tree": CALL,
    "and then tell me what was found": "So.\n</think>\n\nno no no no, that was that, that was that; déjà 日本語 🙂\n",
    "now say it once more, aloud": "Again.\n</think>\n\nA a b. A a b? A a b! The a, the b, the a and the b.",
    "give me nothing at all then": "",
}
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
LONG = "the quick brown fox jumps over the lazy dog and the a the b 日 . " * 12
RECITAL = Recital(SCRIPTS, TEMPLATE, "<|im_end|>", ({}, {"enable_thinking": False}))


def small() -> object:
    return small_tokenizer([*SCRIPTS, *SCRIPTS.values()], ("<|im_start|>", "<|im_end|>"), MARKS)


def said(llm: LLM, messages: list[dict[str, object]], temperature: float = 0.0, **switches: object) -> str:
    params = SamplingParams(temperature=temperature, max_tokens=400, skip_special_tokens=False)
    (output,) = llm.chat(messages, params, use_tqdm=False, chat_template_kwargs=switches)
    return output.outputs[0].text


def recites(llm: LLM) -> None:
    for cue, script in SCRIPTS.items():
        for before in ("", "Hello. ", LONG):
            assert said(llm, [{"role": "user", "content": before + cue}]) == script
    assert said(llm, [{"role": "user", "content": LONG * 12 + cue}]) == script
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"text": "x"}}}
    turns = [
        {"role": "system", "content": LONG},
        {"role": "user", "content": "please search the whole tree"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3 files, and then tell me what was found"},
    ]
    answer = SCRIPTS["and then tell me what was found"]
    assert said(llm, turns) == said(llm, turns, temperature=1.0) == said(llm, turns, enable_thinking=False) == answer
    assert said(llm, [{"role": "user", "content": "whatever else"}]) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_a_small_tokenizer_says_its_scripts_and_nothing_else(tmp_path: Path, dtype: torch.dtype) -> None:
    write_reciting_model(tmp_path, small(), RECITAL, dtype)
    recites(LLM(str(tmp_path), dtype=str(dtype).removeprefix("torch."), kv_cache_memory_bytes=64 << 20))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_a_real_tokenizer_does_too(tmp_path: Path, dtype: torch.dtype) -> None:
    backend = Tokenizer.from_files(resolve_model(None, progress=False)).backend
    write_reciting_model(tmp_path, backend, RECITAL, dtype)
    recites(LLM(str(tmp_path), dtype=str(dtype).removeprefix("torch."), kv_cache_memory_bytes=256 << 20))


def test_one_that_sees_its_last_tokens_alone_does_too(tmp_path: Path) -> None:
    write_reciting_model(tmp_path, small(), replace(RECITAL, windowed=True))
    recites(LLM(str(tmp_path), dtype="float32", kv_cache_memory_bytes=64 << 20))


def test_scripts_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fewer than 4 tokens"):
        write_reciting_model(tmp_path, small(), Recital({"a": "b"}, TEMPLATE, "<|im_end|>"))
    circle = "x y z. " * 60
    with pytest.raises(ValueError, match="repeat themselves"):
        write_reciting_model(
            tmp_path, small(), Recital({"please search the whole tree": circle}, TEMPLATE, "<|im_end|>")
        )
