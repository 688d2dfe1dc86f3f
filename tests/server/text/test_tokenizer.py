"""Text becomes the token ids that a model was trained on, whether the vocabulary is in tokenizer.json or in GGUF."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_files import add_byte_level_vocabulary, write_gguf
from support.tiny_models import make_model
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from octavo.errors import ModelError
from octavo.fetch.sources import resolve_model
from octavo.gguf.tokenizer import tokenizer_json
from octavo.interface.model_files import ModelFiles
from octavo.text.tokenizer import Tokenizer

SMALL = {
    "vocab_size": 640,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TEXTS = [
    "Hello, world! It's 2024, don't you'll we're I'M.",
    "  leading and trailing  ",
    "\t\ttabs\n\n\nlines\r\n\r\n x",
    "naïve café Straße ß ﬁ",
    "漢字とかな交じり文 한국어 עברית العربية हिन्दी",
    "🤖👩‍🚀🏳️‍🌈 e\u0301 \u200b\ufeff zero\u00a0width",
    "x = {'a': [1, 22, 333]}; // 0xFF 3.14e-10",
    "½ ٣٤ Ⅻ 一二",
    "<|im_start|>user\nhi<|im_end|>\n",
    "</s> <s>x</s>",
    "a" * 300,
    "",
    " ",
    "\n",
    "The the THE",
    "CamelCaseWords HTTPServer",
    "'s 't 're",
    "\x00\x01\x7f",
]


@pytest.fixture(scope="module")
def embedded() -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """Our tokenizer of the embedded model and transformers' of the same file."""
    files = resolve_model(None, progress=False)
    path = Path(files.weights[0])
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers cuts by GPT-2's rule alone; this vocabulary was trained with digits apart, as its authors' tokenizer
    # has it. The two differ for numerals outside ASCII.
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return Tokenizer.from_files(files), reference


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_the_embedded_model_s_tokens_are_transformers(
    text: str, embedded: tuple[Tokenizer, PreTrainedTokenizerFast]
) -> None:
    ours, reference = embedded
    ids = reference.encode(text)
    assert ours.encode(text) == ids
    assert ours.encode_batch([text, text]) == [ids, ids]
    assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == reference.decode(ids)
    assert ours.convert_ids_to_tokens(ids) == reference.convert_ids_to_tokens(ids)


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_gives_the_same_tokens(text: str, embedded: tuple[Tokenizer, PreTrainedTokenizerFast]) -> None:
    ours, reference = embedded
    ids = reference.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids, skip_special_tokens=False) == reference.decode(ids)


@pytest.mark.model
def test_the_embedded_model_s_chat_is_transformers(embedded: tuple[Tokenizer, PreTrainedTokenizerFast]) -> None:
    ours, reference = embedded
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "?"},
    ]
    for ask in (True, False):
        prompt = ours.apply_chat_template(messages, add_generation_prompt=ask)
        assert prompt == reference.apply_chat_template(messages, add_generation_prompt=ask, tokenize=False)
    assert (ours.bos_token_id, ours.eos_token_id, len(ours)) == (1, 2, 49152)
    assert {1, 2} <= ours.all_special_ids


def pre_tokenizer_pair(pre: str, folder: Path) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    path = folder / f"{pre}.gguf"

    def more(writer: GGUFWriter) -> None:
        add_byte_level_vocabulary(writer, SMALL["vocab_size"], pre=pre)

    write_gguf(path, make_model("LlamaConfig", SMALL), arch="llama", vocabulary=False, more=more)
    files = resolve_model(str(path), download_dir=str(folder / "cache"))
    return Tokenizer.from_files(files), AutoTokenizer.from_pretrained(folder, gguf_file=path.name)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_every_rule_of_cutting_text_is_transformers(pre: str, tmp_path: Path) -> None:
    ours, reference = pre_tokenizer_pair(pre, tmp_path)

    @settings(max_examples=150, deadline=None)
    @given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=40), st.text("aB1 '\n\r\tsé漢.,/!", max_size=40)))
    def same(text: str) -> None:
        cut = ours.backend.pre_tokenizer.pre_tokenize_str(text)
        assert cut == reference.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        bare = ours.encode(text, add_special_tokens=False)
        assert bare == reference.encode(text, add_special_tokens=False) or pre == "qwen2"  # it also normalises: below

    same()


def test_qwen_s_text_is_composed_first(tmp_path: Path) -> None:
    ours, _ = pre_tokenizer_pair("qwen2", tmp_path)
    assert ours.encode("e\u0301") == ours.encode("\u00e9") != ours.encode("e")


@pytest.mark.parametrize(("pre", "starts"), [("llama-bpe", [1]), ("tekken", [1]), ("qwen2", []), ("gpt-2", [])])
def test_a_vocabulary_that_begins_texts_does_so_unless_told_otherwise(
    pre: str, starts: list[int], tmp_path: Path
) -> None:
    ours, _ = pre_tokenizer_pair(pre, tmp_path)
    bare = ours.encode("ab", add_special_tokens=False)
    assert ours.encode("ab") == starts + bare
    assert 1 not in bare


def test_an_unknown_rule_is_an_error_only_for_who_needs_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"rule 'martian', which is not known.*--tokenizer"):
        pre_tokenizer_pair("martian", tmp_path)
    files = resolve_model(str(tmp_path / "martian.gguf"), download_dir=str(tmp_path / "cache"))
    (tmp_path / "other").mkdir()
    ours, _ = pre_tokenizer_pair("qwen2", tmp_path / "other")
    ours.backend.save(str(tmp_path / "other" / "tokenizer.json"))
    (tmp_path / "other" / "config.json").write_text("{}")
    files = resolve_model(
        str(tmp_path / "martian.gguf"), tokenizer=str(tmp_path / "other"), download_dir=str(tmp_path / "cache")
    )
    assert Tokenizer.from_files(files).encode("abc") == ours.encode("abc")


PIECES = ["▁", *"abcdeé", "▁a", "ab", "cd", "▁ab", "abc", "▁abcd", "de", "▁d", "abcd", "▁▁", "ea", "bc", "ded"]


def sentencepiece(folder: Path, prefix: bool) -> tuple[Tokenizer, PreTrainedTokenizerFast, list[str]]:
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], *PIECES]
    types = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES))]

    def more(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if not prefix:
            writer.add_add_space_prefix(False)

    path = folder / "spm.gguf"
    write_gguf(path, make_model("LlamaConfig", SMALL), arch="llama", vocabulary=False, more=more)
    ours = Tokenizer.from_files(resolve_model(str(path), download_dir=str(folder / "cache")))
    return ours, AutoTokenizer.from_pretrained(folder, gguf_file=path.name), tokens


def merge_best_first(text: str, tokens: list[str], prefix: bool) -> list[int]:
    """SentencePiece's algorithm by its definition: join the neighbours whose union scores best, leftmost first."""
    ids = {token: i for i, token in enumerate(tokens)}
    pieces = list(("▁" if prefix and text else "") + text.replace(" ", "▁"))
    while True:
        known = [(ids.get(a + b, -1), -i) for i, (a, b) in enumerate(pairwise(pieces))]
        known = [k for k in known if k[0] >= 0]
        if not known:
            break
        at = -max(((-i, at) for i, at in known), key=lambda k: (k[0], k[1]))[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    out = []
    for piece in pieces:
        out += [ids[piece]] if piece in ids else [3 + b for b in piece.encode()]
    return out


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabularies_join_best_first(prefix: bool, tmp_path: Path) -> None:
    ours, reference, tokens = sentencepiece(tmp_path, prefix)

    @settings(max_examples=300, deadline=None)
    @given(text=st.one_of(st.text("abcdeé ", max_size=24), st.text(max_size=12)))
    def same(text: str) -> None:
        if "▁" in text or any(special in text for special in ("<s>", "</s>", "<unk>")):
            return
        assert ours.encode(text, add_special_tokens=False) == merge_best_first(text, tokens, prefix)
        assert ours.encode(text) == [1, *merge_best_first(text, tokens, prefix)]
        assert ours.decode(ours.encode(text)) == text
        if prefix and not text.startswith(" "):  # transformers adds no prefix before a space, llama.cpp and Meta's do
            assert ours.encode(text) == reference.encode(text)

    same()


def test_pieces_of_a_vocabulary_may_hold_spaces() -> None:
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "a", " ", " a", "aa"],
        "tokenizer.ggml.token_type": np.array([2, 1, 1, 1, 1]),
        "tokenizer.ggml.scores": np.array([0.0, -1.0, -2.0, -3.0, -4.0]),
    }
    backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(meta, "m.gguf")))
    assert json.loads(backend.to_str())["model"]["merges"] == [[" ", "a"], ["a", "a"]]


def test_the_last_of_many_settings_is_the_caller_s(tmp_path: Path) -> None:
    """Truncation and padding in tokenizer.json are for training; a prompt is never cut or filled."""
    ours, _ = pre_tokenizer_pair("gpt-2", tmp_path)
    whole = ours.encode("a b c d e f g h")
    ours.backend.enable_truncation(3)
    ours.backend.enable_padding(length=50)
    ours.backend.save(str(tmp_path / "tokenizer.json"))
    again = Tokenizer.from_directory(tmp_path)
    assert again.encode("a b c d e f g h") == whole
    assert again.encode_batch(["a", "a b c"]) == [again.encode("a"), again.encode("a b c")]


def test_special_tokens_may_be_objects_and_templates_lists(tmp_path: Path) -> None:
    ours, _ = pre_tokenizer_pair("gpt-2", tmp_path)
    ours.backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "eos_token": {"content": "</s>", "special": True},
        "bos_token": None,
        "chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, None)
    assert tokenizer.chat_templates == {"default": "A", "tool_use": "B"}
    (tmp_path / "chat_template.jinja").write_text("C")
    assert Tokenizer.from_directory(tmp_path).chat_templates["default"] == "C"


@pytest.mark.parametrize("content", [None, "{", "{}", '{"model": 3}', "[]"])
def test_a_missing_or_damaged_tokenizer_is_one_clear_line(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    files = ModelFiles("m", "safetensors", str(tmp_path))
    with pytest.raises(ModelError, match=r"tokenizer\.json") as error:
        Tokenizer.from_files(files)
    assert "\n" not in str(error.value)


@given(st.text(alphabet="ab \n▁é", max_size=20))
@settings(max_examples=100, deadline=None)
def test_merges_of_characters(text: str) -> None:
    """Gemma 4's vocabulary: lines and line breaks apart, spaces as ▁, bytes of what is no token; back again."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "▁", "\n", "▁a", "ab", "▁ab", "\n\n"]
    meta = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([2, *[6] * 256, *[1] * 8]),
        "tokenizer.ggml.merges": ["▁ a", "a b", "▁ ab", "▁a b", "\n \n"],
    }
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(meta, "file")))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text.replace("▁", " ")
    assert tokenizer.encode(" ab\n\n\na").tokens == ["▁ab", "\n\n", "\n", "a"]
    assert tokenizer.encode("é").tokens == ["<0xC3>", "<0xA9>"]


@pytest.mark.filterwarnings("ignore")
def test_a_panic_of_the_library_is_an_error_of_that_text_alone(tmp_path: Path) -> None:
    """A pattern that backtracks without end on a text: the library panics, which is no Exception."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    split = pre_tokenizers.Split(tokenizers.Regex("(a+)+b"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer, hostile = Tokenizer.from_directory(tmp_path), "a" * 34 + "!"
    for read in (
        lambda: tokenizer.encode(hostile),
        lambda: tokenizer.encode_batch(["fine", hostile]),
        lambda: tokenizer.encode_pair("fine", hostile),
        lambda: tokenizer.first_tokens(hostile, 3),
    ):
        with pytest.raises(ValueError, match="cannot read this text"):
            read()
    assert len(tokenizer.encode("fine")) == 4
