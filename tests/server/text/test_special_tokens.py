"""Special tokens and templates are found wherever a model's files have them, as transformers finds them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from octavo.errors import ModelError
from octavo.text.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["<s>", "</s>", "<|end|>", "<img>", "<pad>", "Ab", "<x>"]
ROLES = ["bos_token", "eos_token", "unk_token", "pad_token"]
OWN_ROLES = ["image_token", "eoi_token"]
# Text with every token in it, beside blanks and letters, which flags of tokens take or refuse.
TEXTS = ["".join(f"a {word} {word}b" for word in WORDS), "ab A B " + " ".join(WORDS), "x</s></s> <IMG>"]
CHAT = [{"role": "user", "content": "a"}]


def template(number: int) -> str:
    names = [*ROLES, *OWN_ROLES, "img"]
    return f"{number}" + "".join("{{ " + name + " }}|" for name in names) + "{{ messages[0].content }}"


words = st.sampled_from(WORDS)
flags = st.fixed_dictionaries(
    {name: st.booleans() for name in ("special", "lstrip", "rstrip", "single_word", "normalized")}
)
entries = st.builds(lambda word, how: {"content": word, **how}, words, flags)
typed = entries.map(lambda entry: {"__type": "AddedToken", **entry})
unlike = {"unique_by": lambda entry: entry["content"]}
lists = st.lists(st.one_of(words, typed), max_size=2)
bare = entries.map(lambda entry: {key: value for key, value in entry.items() if key != "special"})
roles = st.dictionaries(st.sampled_from([*OWN_ROLES, "img"]), words, max_size=2)
extras = st.one_of(lists, roles)
named = st.one_of(st.none(), words, typed)
configs = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(ROLES, named),
        **dict.fromkeys(OWN_ROLES, words),
        "extra_special_tokens": extras,
        "additional_special_tokens": lists,
        "split_special_tokens": st.booleans(),
    },
)
maps = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys([*ROLES, *OWN_ROLES], st.one_of(words, entries)),
        "extra_special_tokens": st.one_of(st.lists(st.one_of(words, bare), max_size=2), roles),
        "additional_special_tokens": st.lists(words, max_size=2),
    },
)
templates = st.one_of(
    st.just(template(1)),
    st.just([{"name": "default", "template": template(2)}, {"name": "tool_use", "template": template(3)}]),
    st.just({"default": template(4), "rag": template(5)}),
    st.just({"rag": template(6)}),
)


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """File name -> content of a model's folder."""
    vocabulary = [*ALPHABET, *draw(st.lists(words, unique=True, max_size=3))]
    added = draw(st.lists(entries, max_size=3, **unlike))
    numbers = {word: number for number, word in enumerate(vocabulary)}
    free = iter(range(len(vocabulary), 400))
    own = [{"id": numbers[e["content"]] if e["content"] in numbers else next(free), **e} for e in added]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    files: dict[str, Any] = {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": sorted(own, key=lambda e: e["id"]),
            "normalizer": draw(st.sampled_from([None, {"type": "Lowercase"}])),
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {"type": "BPE", "vocab": numbers, "merges": [], "byte_fallback": False},
        },
        "config.json": {"model_type": "llama"},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **draw(configs)},
    }
    config = files["tokenizer_config.json"]
    if draw(st.booleans()):
        listed = draw(st.lists(entries, max_size=4, **unlike))
        config["added_tokens_decoder"] = {str(len(vocabulary) + i): entry for i, entry in enumerate(listed)}
    if draw(st.booleans()):
        files["special_tokens_map.json"] = draw(maps)
    if draw(st.booleans()):
        listed = draw(st.lists(words, unique=True, max_size=4))
        files["added_tokens.json"] = {word: len(vocabulary) + i for i, word in enumerate(listed)}
    if draw(st.booleans()):
        config["chat_template"] = draw(templates)
    for number, name in enumerate(["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]):
        if draw(st.booleans()):
            files[name] = template(7 + number)
    return files


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def outcome(make: Any) -> Any:
    """What it gives; an error, whichever, is None."""
    try:
        return make()
    except Exception:
        return None


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(files=layouts())
def test_tokens_and_templates_are_those_of_transformers(files: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), files)
        theirs = AutoTokenizer.from_pretrained(folder)
        ours = Tokenizer.from_directory(folder)
    assert ours.special_tokens == theirs.special_tokens_map
    assert {i: repr(t) for i, t in ours.backend.get_added_tokens_decoder().items()} == {
        i: repr(t) for i, t in theirs.added_tokens_decoder.items()
    }
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for name in (None, "tool_use", "rag"):
        asked = {"chat_template": name, "add_generation_prompt": False}
        shown = outcome(lambda asked=asked: theirs.apply_chat_template(CHAT, tokenize=False, **asked))
        assert outcome(lambda asked=asked: ours.apply_chat_template(CHAT, **asked)) == shown


@pytest.mark.parametrize("decoder", [[], {"a": {"content": "x"}}, "x"])
def test_declarations_that_cannot_be_read_are_named(decoder: Any, tmp_path: Path) -> None:
    vocabulary = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    write(tmp_path, {"tokenizer.json": {"version": "1.0", "added_tokens": [], "model": vocabulary}})
    write(tmp_path, {"tokenizer_config.json": {"added_tokens_decoder": decoder}})
    with pytest.raises(ModelError, match="added_tokens_decoder must be an object of tokens by id"):
        Tokenizer.from_directory(tmp_path)
