"""Small tokenizers of every kind that the detokenizer tells apart, made on the spot."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog, again and again.",
    "def add(a, b):\n    return a + b\n\n\nclass Thing:\n    pass\n",
    "日本語のテキスト。你好,世界!Привет, мир! naïve café — “quotes” … 🙂🙃👩‍🚀",
] * 3


@pytest.fixture(autouse=True)
def logging_stays() -> Iterator[None]:
    """A command that a test calls sets up logging for its process: undone, or the lines of all later tests go to what
    was stderr in that one, a closed file."""
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@dataclass
class PlainTokenizer:
    """What input and output processors need of octavo.text.tokenizer.Tokenizer, around any tokenizers.Tokenizer."""

    backend: tokenizers.Tokenizer = field(repr=False)
    eos_token_id: int | None = None
    all_special_ids: frozenset[int] = field(default_factory=frozenset)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)


def _finish(backend: tokenizers.Tokenizer) -> PlainTokenizer:
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|pad|>", special=True)])
    backend.add_tokens([AddedToken("<tool call>", special=False), AddedToken("日本", special=False)])
    end = backend.token_to_id("<|end|>")
    return PlainTokenizer(backend, end, frozenset({end, backend.token_to_id("<|pad|>")}))


@pytest.fixture(scope="session")
def byte_level() -> PlainTokenizer:
    """GPT-2's kind; its tokens often end in the middle of a character."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _finish(backend)


def _byte_fallback(strip: bool) -> PlainTokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    normalizer = [normalizers.Prepend("▁")] if strip else []
    backend.normalizer = normalizers.Sequence([*normalizer, normalizers.Replace(" ", "▁")])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], limit_alphabet=60, show_progress=False
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
    backend.train_from_iterator(CORPUS, trainer)
    vocab, merges = backend.get_vocab(with_added_tokens=False), _merges(backend)
    plain = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    plain.normalizer = backend.normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    plain.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    plain.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return _finish(plain)


def _merges(backend: tokenizers.Tokenizer) -> list[tuple[str, str]]:
    return [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]


@pytest.fixture(scope="session")
def byte_fallback() -> PlainTokenizer:
    """SentencePiece's kind as Llama 2 has it: "▁", byte tokens, and the text's first space dropped."""
    return _byte_fallback(strip=True)


@pytest.fixture(scope="session")
def byte_fallback_no_strip() -> PlainTokenizer:
    """SentencePiece's kind as Gemma has it."""
    return _byte_fallback(strip=False)


@pytest.fixture(scope="session")
def word_piece() -> PlainTokenizer:
    """A kind whose decoder looks at neighbours."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return _finish(backend)
