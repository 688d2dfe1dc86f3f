"""tokenizer.json of the vocabularies of encoders in GGUF files: WordPiece (kind ``bert``) and Unigram (kind ``t5``)."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.errors import ModelError

_NORMAL, _UNKNOWN, _UNUSED = 1, 2, 5
_START = "▁"
# GGUF's names of a WordPiece vocabulary's special tokens, newer files' first, and the ids of BERT's own vocabulary.
_SPECIAL = {
    "cls": (("bos", "cls"), 101),
    "sep": (("seperator", "separator"), 102),
    "unk": (("unknown",), 100),
    "pad": (("padding",), 0),
    "mask": (("mask",), 103),
}
_MAX_WORD = 100  # characters of a word; longer ones are unknown


def special_ids(meta: Mapping[str, Any], size: int) -> dict[str, int]:
    """Ids below ``size`` of a WordPiece vocabulary's special tokens: cls, sep, unk, pad and mask."""
    found = {}
    for name, (keys, usual) in _SPECIAL.items():
        stated = (meta.get(f"tokenizer.ggml.{key}_token_id") for key in keys)
        found[name] = int(next((i for i in stated if i is not None), usual))
    return {name: i for name, i in found.items() if 0 <= i < size}


def word_pieces(meta: Mapping[str, Any], tokens: list[str], types: list[int], path: object) -> dict[str, Any]:
    """Parts of tokenizer.json. Words begin with "▁" in the file, where tokenizer.json marks those that go on. Raises
    ModelError where no token stands for unknown words."""
    special = special_ids(meta, len(tokens))
    if "unk" not in special:
        raise ModelError(f"{path}: its WordPiece vocabulary has no token for unknown words; fetch the file again")
    pieces = {}
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _NORMAL and i not in special.values():
            token = token[1:] if token.startswith(_START) else f"##{token}"
        pieces[token] = i
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": bool(meta.get("tokenizer.ggml.normalizer.strip_accents", True)),
        "lowercase": bool(meta.get("tokenizer.ggml.normalizer.lowercase", True)),
    }
    model = {
        "type": "WordPiece",
        "unk_token": tokens[special["unk"]],
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": _MAX_WORD,
        "vocab": pieces,
    }
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": model,
    }


def unigram(meta: Mapping[str, Any], tokens: list[str], types: list[int], path: object) -> dict[str, Any]:
    """Parts of tokenizer.json. Raises ModelError for a vocabulary without scores, or without an unknown token."""
    scores = meta.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"{path}: its Unigram vocabulary (kind t5) has no scores; fetch the file again")
    unknown = meta.get("tokenizer.ggml.unknown_token_id", types.index(_UNKNOWN) if _UNKNOWN in types else None)
    if unknown is None or not 0 <= unknown < len(tokens):
        raise ModelError(
            f"{path}: its Unigram vocabulary (kind t5) has no token for unknown text; fetch the file again"
        )
    vocab = [
        [f"{token} " if kind == _UNUSED else token, float(score)]  # no word has a blank: such a row never matches
        for token, score, kind in zip(tokens, scores.tolist(), types, strict=True)
    ]
    prepends = "always" if meta.get("tokenizer.ggml.add_space_prefix", True) else "never"
    spaces = {"type": "Metaspace", "replacement": _START, "prepend_scheme": prepends, "split": True}
    return {
        "normalizer": _charsmap(meta),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, spaces]},
        "decoder": spaces,
        "model": {"type": "Unigram", "unk_id": int(unknown), "vocab": vocab, "byte_fallback": False},
    }


def _charsmap(meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """SentencePiece's own table of what a text's characters become, and one blank for several."""
    steps: list[dict[str, Any]] = []
    table = meta.get("tokenizer.ggml.precompiled_charsmap")
    if table is not None and len(table):
        stored = np.asarray(table).astype(np.int16).astype(np.uint8).tobytes()
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(stored).decode()})
    if meta.get("tokenizer.ggml.remove_extra_whitespaces", False):
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    return {"type": "Sequence", "normalizers": steps} if steps else None
