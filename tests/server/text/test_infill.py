"""Infilling: every family's marks in its order, nobody's text becomes a mark, and what does not fit is cut."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from support.reciting import small_tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from octavo.chat.infill import (
    MARKS,
    Around,
    InfillFile,
    InfillParts,
    encode_parts,
    encode_text,
    find_infill_tokens,
    fit,
    infill_prompt,
)
from octavo.text.tokenizer import Tokenizer

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
STARCODER = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<repo_name>", "<file_sep>"]
DEEPSEEK = ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"]
CODESTRAL = ["[PREFIX]", "[SUFFIX]"]
CODE_LLAMA = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]


def byte_level(*marks: str, config: dict | None = None, bos: str = "") -> Tokenizer:
    """Every byte a token, and the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in (*marks, *([bos] if bos else []))])
    if bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return Tokenizer(backend, (config or {}) | ({"bos_token": bos} if bos else {}))


def sentence_piece(*marks: str) -> Tokenizer:
    """Every letter a token, a space before every text."""
    letters = "▁abcdefghijklmnopqrstuvwxyz()\n☺"
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return Tokenizer(backend, {})


def spelled(tokenizer: Tokenizer, prefix: str, around: Around) -> str:
    """The prompt as text."""
    tokens = find_infill_tokens(tokenizer)
    assert tokens is not None
    return tokenizer.decode(infill_prompt(tokens, encode_parts(tokenizer, tokens, prefix, around)), False)


@pytest.mark.parametrize(
    ("marks", "prompt"),
    [
        (QWEN, "<|fim_prefix|>a = <|fim_suffix|>\nprint(a)<|fim_middle|>"),
        (STARCODER, "<fim_prefix>a = <fim_suffix>\nprint(a)<fim_middle>"),
        (DEEPSEEK, "<｜fim▁begin｜>a = <｜fim▁hole｜>\nprint(a)<｜fim▁end｜>"),
        (CODESTRAL, "[SUFFIX]\nprint(a)[PREFIX]a = "),
        (CODE_LLAMA, "▁<PRE>a = ▁<SUF>\nprint(a)▁<MID>"),
    ],
    ids=["qwen", "starcoder", "deepseek", "codestral", "codellama"],
)
def test_each_family_reads_its_own_marks(marks, prompt):
    assert spelled(byte_level(*marks), "a = ", Around("\nprint(a)")) == prompt


def test_a_vocabulary_without_marks_has_none():
    assert find_infill_tokens(byte_level("<|end|>", "<|fim_prefix|>")) is None


def test_roles_of_a_file_win_over_spellings():
    """GGUF files name the ids of marks whose spellings nobody knows."""
    names = {"fim_pre_token": "<one>", "fim_suf_token": "<two>", "fim_mid_token": "<three>", "fim_pad_token": "<four>"}
    tokenizer = byte_level(*names.values(), *STARCODER, config=names)
    assert spelled(tokenizer, "a", Around("b")) == "<one>a<two>b<three>"
    tokens = find_infill_tokens(tokenizer)
    assert tokens is not None and tokenizer.backend.token_to_id("<four>") in tokens.stops


def test_other_files_come_first_with_their_names():
    """As llama.cpp has them, token by token."""
    files = [InfillFile("old.py", "x = 1\n"), InfillFile("new.py", "y = 2\n")]
    assert spelled(byte_level(*QWEN), "a", Around("!", " = ", files)) == (
        "<|repo_name|>myproject\n<|file_sep|>old.py\nx = 1\n<|file_sep|>new.py\ny = 2\n<|file_sep|>filename\n"
        "<|fim_prefix|>a = <|fim_suffix|>!<|fim_middle|>"
    )
    assert spelled(byte_level(*DEEPSEEK), "a", Around("!", " = ", files)) == (
        "\n\n--- snippet ---\n\nx = 1\n\n\n--- snippet ---\n\ny = 2\n<｜fim▁begin｜>a = <｜fim▁hole｜>!<｜fim▁end｜>"
    )
    assert spelled(byte_level(*QWEN), "a", Around("!", files=[])).startswith("<|repo_name|>myproject\n<|file_sep|>file")


CODE = st.text("ab =\n\t(é", max_size=8)
BYTE_PAIRS = {
    name: small_tokenizer(["a = b(a)\n\n  b = a\n\tab", "myproject\n", "filename\n"], marks)
    for name, marks in (("qwen", QWEN), ("starcoder", STARCODER), ("deepseek", DEEPSEEK))
}


@pytest.mark.parametrize(("name", "marks"), [("qwen", QWEN), ("starcoder", STARCODER), ("deepseek", DEEPSEEK)])
@given(files=st.none() | st.lists(st.tuples(CODE, CODE), max_size=3), prefix=CODE, line=CODE, suffix=CODE)
def test_ids_are_those_of_the_pieces_that_llama_cpp_documents(name, marks, files, prefix, line, suffix):
    """No token joins two pieces: names and texts of files, prefix and line, and what marks part."""
    backend = BYTE_PAIRS[name]
    pieces: list[str] = []
    if files is not None and len(marks) == 6:
        pieces += [marks[4], "myproject\n"]
        for file, text in [*files, ("filename", "")]:
            pieces += [marks[5], f"{file}\n", text]
    elif files is not None:
        for _, text in files:
            pieces += ["\n\n--- snippet ---\n\n", text]
    pieces += [marks[0], prefix, line, marks[1], suffix, marks[2]]
    expected = [number for piece in pieces for number in backend.encode(piece).ids]
    tokenizer = Tokenizer(backend, {})
    tokens = find_infill_tokens(tokenizer)
    assert tokens is not None
    around = Around(suffix, line, None if files is None else [InfillFile(*file) for file in files])
    assert infill_prompt(tokens, encode_parts(tokenizer, tokens, prefix, around)) == expected


def test_the_first_token_of_a_text_comes_first():
    tokenizer = byte_level(*CODESTRAL, bos="<s>")
    assert spelled(tokenizer, "a", Around("b")) == "<s>[SUFFIX]b[PREFIX]a"


def test_a_suffix_goes_on_in_its_line():
    """SentencePiece would put a space before it, which nobody typed."""
    tokenizer = sentence_piece(*CODE_LLAMA)
    tokens = find_infill_tokens(tokenizer)
    assert tokens is not None
    parts = encode_parts(tokenizer, tokens, "def", Around("ine()"))
    assert tokenizer.convert_ids_to_tokens(parts.suffix) == list("ine()")
    assert tokenizer.convert_ids_to_tokens(parts.prefix) == list("▁def")


def test_generation_ends_at_pads_and_at_the_next_file():
    tokenizer = byte_level(*QWEN, "<|endoftext|>")
    tokens = find_infill_tokens(tokenizer)
    assert tokens is not None
    assert set(tokenizer.convert_ids_to_tokens(tokens.stops)) == {
        "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>"
    }  # fmt: skip


@given(st.lists(st.one_of(st.text(max_size=4), st.sampled_from([*QWEN, "<|fim_", "prefix|>"])), max_size=6))
def test_nobodys_text_becomes_a_mark(pieces):
    tokenizer, text = byte_level(*QWEN), "".join(pieces)
    ids = encode_text(tokenizer, text)
    marks = {tokenizer.backend.token_to_id(mark) for mark in QWEN}
    assert not marks & set(ids)
    assert tokenizer.decode(ids, False) == text


LENGTHS = st.integers(0, 40)


@given(LENGTHS, LENGTHS, LENGTHS, st.integers(0, 1), st.integers(10, 100))
def test_what_does_not_fit_is_cut_where_it_matters_least(files, prefix, suffix, bos, room):
    numbers = iter(range(1000))
    parts = InfillParts(*([next(numbers) for _ in range(n)] for n in (bos, files, prefix, suffix)))
    cut = fit(parts, room)
    total = sum(map(len, (cut.bos, cut.files, cut.prefix, cut.suffix)))
    assert total == min(bos + files + prefix + suffix, room - MARKS), "no room is left unused"
    assert cut.files == parts.files[files - len(cut.files) :] and cut.suffix == parts.suffix[: len(cut.suffix)]
    assert cut.prefix == parts.prefix[prefix - len(cut.prefix) :]
    if len(cut.prefix) < prefix or len(cut.suffix) < suffix:
        assert not cut.files, "other files go first"
    if len(cut.prefix) < prefix and len(cut.suffix) < suffix:
        assert len(cut.prefix) >= len(cut.suffix)
