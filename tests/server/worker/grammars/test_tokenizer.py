"""What a grammar demands is spelled by tokens of text, whatever texts the model's special tokens have."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from octavo.chat.structured import with_tokens
from octavo.chat.tools.formats.table import TOOL_FORMATS
from octavo.chat.tools.grammars import call_grammar
from octavo.interface.structured_output import StructuredOutputsParams, to_grammar
from octavo.worker.grammars.tokenizer import load_tokenizer

SPECIAL = ["<|im_end|>", "<s>", "</s>", "[INST]", "ab", '{"', "\n", "é<|x|>", "<tool_call>", "▁a", "name", "true"]
WORDS = ["ab", "name", "<|", "|>", "im", '":', ' "', '{"', "tool", "_call", "</s>", "rue", "▁a"]
LAYOUTS = ("bytes", "metaspace", "prepend")


def write_tokenizer(folder: Path, layout: str, special: list[str]) -> LLTokenizer:
    """A vocabulary of all bytes and some words, in one of the forms in which models have them."""
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    of_byte = {b: chr(b) for b in shown} | {
        b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in shown)
    }
    fallback = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if layout == "bytes":
        pieces = [*of_byte.values()]
        words = ["".join(of_byte[byte] for byte in word.encode()) for word in WORDS]
        how: dict[str, Any] = {"normalizer": None, "pre_tokenizer": level, "decoder": level}
    else:
        pieces = [f"<0x{byte:02X}>" for byte in range(256)] + [chr(letter) for letter in range(33, 127)] + ["▁"]
        words = WORDS
        space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
        prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
        by_layout = {"metaspace": (None, space), "prepend": (prepend, None)}
        how = dict(zip(("normalizer", "pre_tokenizer"), by_layout[layout], strict=True)) | {"decoder": fallback}
    vocabulary, merges = {piece: number for number, piece in enumerate(dict.fromkeys([*pieces, "<end>"]))}, []
    for word in words:
        for length in range(2, len(word) + 1):
            left, right = word[: length - 1], word[length - 1]
            if left in vocabulary and right in vocabulary:
                vocabulary.setdefault(left + right, len(vocabulary))
                merges.append(f"{left} {right}")
    ids, added = dict(vocabulary), []
    for text in ["<end>", *special]:
        number = ids.setdefault(text, len(ids))
        added.append(
            {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        )
    model = {"type": "BPE", "vocab": vocabulary, "merges": [*dict.fromkeys(merges)], "byte_fallback": layout != "bytes"}
    contents = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": None,
        "model": model,
        **how,
    }
    (folder / "tokenizer.json").write_text(json.dumps(contents))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return load_tokenizer(folder, len(ids) + 3)  # a model's last rows often have no token


def walk(tokenizer: LLTokenizer, grammar: str, draw: random.Random, may_use: frozenset[int] = frozenset()) -> str:
    """A text that the grammar lets through, by tokens drawn among those that it allows. The end of a text may be told
    by the end token; no other special token but those of ``may_use`` may be among them."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    written: list[int] = []
    while not matcher.is_stopped():
        assert not matcher.is_error(), matcher.get_error()
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(tokenizer.vocab_size) if mask[token >> 3] >> (token & 7) & 1]
        assert allowed, tokenizer.decode_str(written)
        token = draw.choice(allowed)
        assert matcher.consume_token(token), matcher.get_error()
        if token != tokenizer.eos_token:
            assert tokenizer.decode_bytes([token]), f"{token} is no token"
            assert token in may_use or not tokenizer.is_special_token(token), tokenizer.decode_str([*written, token])
            written.append(token)
    assert not matcher.is_error(), matcher.get_error()
    return b"".join(b"" if token in may_use else tokenizer.decode_bytes([token]) for token in written).decode()


def grammar_of(**kind: Any) -> str:
    return to_grammar(StructuredOutputsParams(**kind))


def reads_as(text: str) -> dict[str, tuple[str, Any]]:
    """By how a text gets into a grammar: the grammar, and what the answer must be (its JSON, or its text)."""
    name = {"type": "object", "properties": {text: {"const": 1}}, "required": [text]}
    pattern = re.sub(r"[\\^$.|?*+()\[\]{}/]", lambda found: "\\" + found[0], text).replace("\n", "\\n")
    return {
        "const": (grammar_of(json={"const": text}), text),
        "enum": (grammar_of(json={"enum": [[text]]}), [text]),
        "property": (grammar_of(json=name), {text: 1}),
        "pattern": (grammar_of(json={"type": "string", "pattern": f"^{pattern}$"}), text),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_of_special_tokens_are_written_as_text(tmp_path_factory, layout):
    @settings(max_examples=25, deadline=None)
    @given(
        special=st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=4, unique=True),
        before=st.sampled_from(["", "x", " ", "ab", "<"]),
        after=st.sampled_from(["", "y", " z", "|>"]),
        data=st.data(),
    )
    def check(special, before, after, data):
        tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), layout, special)
        text = before + data.draw(st.sampled_from(special)) + after
        draw = random.Random(data.draw(st.integers(0, 1000)))
        for grammar, wanted in reads_as(text).values():
            assert json.loads(walk(tokenizer, grammar, draw)) == wanted
        pattern = "".join(f"\\x{{{ord(letter):x}}}" for letter in text)
        for grammar in (
            grammar_of(choice=[text]),
            grammar_of(grammar=f"start: {json.dumps(text)}"),
            grammar_of(regex=pattern),
            grammar_of(grammar=f"start: X\nX: {json.dumps(text)}"),
        ):
            assert walk(tokenizer, grammar, draw) == text

    check()


@pytest.mark.parametrize("format_, key", [("hermes", "arguments"), ("openai", ""), ("mistral", "")])
@pytest.mark.parametrize("name", ["<|call|>", "f{<|call|>}", "{[ARGS]}x", "a{[TOOL_CALLS]}"])
def test_names_of_tools_are_text_between_the_tokens_of_a_call(tmp_path, format_, key, name):
    special = ["<|call|>", "[ARGS]", "[TOOL_CALLS]", "<|channel|>", "<|constrain|>", "<|message|>"]
    tokenizer = write_tokenizer(tmp_path, "bytes", special)
    contents = json.loads((tmp_path / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in contents["added_tokens"]}
    function = {"name": name, "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    calls = call_grammar(TOOL_FORMATS[format_], [function], 1, ids.get)
    lead = {"lark_grammar": f"start: {with_tokens(calls.rule, ids.get)}\n{calls.rules}"}
    parts = [{**json.loads(part)["grammars"][0], "name": called} for called, part in calls.parts.items()]
    text = walk(tokenizer, json.dumps({"grammars": [lead, *parts]}), random.Random(0), may_use=frozenset(ids.values()))
    assert (json.dumps(name) if key else name) in text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_without_a_token_are_never_allowed(tmp_path, layout):
    tokenizer = write_tokenizer(tmp_path, layout, ["<|x|>"])
    matcher = LLMatcher(tokenizer, grammar_of(regex="(.|\\n)*"), log_level=0)
    mask = matcher.compute_bitmask()
    allowed = {token for token in range(tokenizer.vocab_size) if mask[token >> 3] >> (token & 7) & 1}
    special = {token for token in range(tokenizer.vocab_size) if tokenizer.is_special_token(token)}
    assert {*range(tokenizer.vocab_size - 3, tokenizer.vocab_size)} <= special
    assert allowed & special <= {tokenizer.eos_token}
