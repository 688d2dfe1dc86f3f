"""The model's vocabulary for llguidance, in which text is spelled by tokens of text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from octavo.text.special_tokens import add_declared_tokens


class _Speller:
    """Spells texts for llguidance, in the form from which it takes its vocabulary.

    llguidance's own reading of tokenizer.json takes the text of a special token for the token, so that a literal with
    that text would end the answer, or could not be written at all.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, read: LLTokenizer, backend: Tokenizer, eos_token_id: int) -> None:
        backend.encode_special_tokens = True
        self.eos_token_id = eos_token_id
        # A number that is no token is one of the special ones, whose text is never asked for.
        self.tokens = [read.decode_bytes([token_id]) for token_id in range(read.vocab_size)]
        self.special_token_ids = [number for number in range(read.vocab_size) if read.is_special_token(number)]
        self._special = frozenset(self.special_token_ids)
        self._backend, self._read = backend, read

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        # A vocabulary may have the text of a special token as a piece of text too, or write another text.
        if self._special.isdisjoint(ids) and self._read.decode_bytes(ids) == text.encode():
            return ids
        return self._read.greedy_tokenize(text)


def load_tokenizer(folder: Path, vocab_size: int) -> LLTokenizer:
    """Raises ValueError. Reads the files itself: `octavo.text.tokenizer` would take as long again."""
    contents = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
    backend = Tokenizer.from_str(json.dumps(_without_leading_space(contents)))
    end = add_declared_tokens(backend, config, folder).get("eos_token")
    token_id = None if end is None else backend.token_to_id(end)
    if token_id is None:
        raise ValueError("structured outputs need a tokenizer with an end-of-sequence token, and the model's has none")
    declared = sorted(backend.get_added_tokens_decoder().items())
    added = [{"id": number, **token.__getstate__()} for number, token in declared if number < vocab_size]
    text = json.dumps({**contents, "added_tokens": added, "truncation": None, "padding": None})
    read = LLTokenizer(text, n_vocab=vocab_size, eos_token=[token_id])
    speller = _Speller(read, backend, token_id)
    made = LLTokenizer(speller)  # type: ignore[arg-type]
    speller.tokens = []
    return made


def _without_leading_space(contents: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json without the space that it writes before a text: a grammar's literals have none."""
    changed = {**contents, "truncation": None, "padding": None}
    changed["normalizer"] = _unprefixed(contents.get("normalizer"))
    changed["pre_tokenizer"] = _unprefixed(contents.get("pre_tokenizer"))
    return changed


def _unprefixed(part: dict[str, Any] | None) -> dict[str, Any] | None:
    if part is None:
        return None
    match part.get("type"):
        case "Prepend":
            return None
        case "ByteLevel":
            return {**part, "add_prefix_space": False}
        case "Metaspace":
            return {key: value for key, value in part.items() if key != "add_prefix_space"} | {
                "prepend_scheme": "never"
            }
        case "Sequence":
            inner = "normalizers" if "normalizers" in part else "pretokenizers"
            return {**part, inner: [kept for one in part[inner] if (kept := _unprefixed(one)) is not None]}
    return part
