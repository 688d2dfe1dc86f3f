"""tokenizer.json and tokenizer_config.json out of a GGUF header.

GGUF names a vocabulary's kind (``tokenizer.ggml.model``: gpt2 for byte-level BPE, llama for SentencePiece, gemma4 for
merges of characters, bert for WordPiece, t5 for Unigram) and, for gpt2, the rule by which text is cut before merging
(``tokenizer.ggml.pre``). The rules are llama.cpp's (llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.gguf.encoder_tokenizers import special_ids, unigram, word_pieces
from octavo.gguf.encoders import ENCODERS
from octavo.gguf.pre_tokenizers import DEFAULT, REFUSED, RULES

# Marks of infilling by their role (`octavo.chat.infill`): GGUF's names, and those of older files.
_INFILL = {
    "fim_pre_token": ("fim_pre", "prefix"),
    "fim_suf_token": ("fim_suf", "suffix"),
    "fim_mid_token": ("fim_mid", "middle"),
    "fim_pad_token": ("fim_pad",),
    "fim_rep_token": ("fim_rep",),
    "fim_sep_token": ("fim_sep",),
}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def tokenizer_json(meta: Mapping[str, Any], path: object) -> dict[str, Any]:
    """Raises ModelError when the file has no vocabulary or one of an unknown kind."""
    kind = meta.get("tokenizer.ggml.model")
    tokens: list[str] | None = meta.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{path} has no vocabulary (tokenizer.ggml.tokens)")
    types = meta.get("tokenizer.ggml.token_type")
    types = [_NORMAL] * len(tokens) if types is None else types.tolist()
    if len(types) != len(tokens):
        raise ModelError(
            f"{path}: tokenizer.ggml.token_type has {len(types)} entries, tokenizer.ggml.tokens {len(tokens)}; the "
            "file is damaged: fetch it again"
        )
    if kind == "gpt2":
        parts = _byte_level(meta, tokens, path)
    elif kind == "llama":
        parts = _sentencepiece(meta, tokens, types, path)
    elif kind == "gemma4":
        parts = _characters(meta, tokens)
    elif kind == "bert":
        parts = word_pieces(meta, tokens, types, path)
    elif kind == "t5":
        parts = unigram(meta, tokens, types, path)
    else:
        raise ModelError(f"{path}: a vocabulary of kind {kind!r} is not supported (gpt2, llama, gemma4, bert, t5 are)")
    added = [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[i] != _USER_DEFINED,
        }
        for i in range(len(tokens))
        if types[i] in (_CONTROL, _USER_DEFINED) or (types[i] == _UNKNOWN and kind != "gpt2")
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": _post_processor(meta, tokens),
        "decoder": parts["decoder"],
        "model": parts["model"],
    }


def tokenizer_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: special tokens and whether they are added to a text."""
    tokens = meta.get("tokenizer.ggml.tokens") or []
    if meta.get("tokenizer.ggml.model") == "bert":
        special = {f"{name}_token": tokens[i] for name, i in special_ids(meta, len(tokens)).items()}
        return {**special, "model_max_length": 10**30, "tokenizer_class": "PreTrainedTokenizerFast"}

    def token(key: str) -> str | None:
        i = meta.get(f"tokenizer.ggml.{key}_token_id")
        return tokens[i] if i is not None and i < len(tokens) else None

    return {
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "add_bos_token": _adds(meta, "bos"),
        "add_eos_token": _adds(meta, "eos"),
        "model_max_length": 10**30,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{role: mark for role, names in _INFILL.items() if (mark := next(filter(None, map(token, names)), None))},
    }


def chat_templates(meta: Mapping[str, Any]) -> dict[str, str]:
    """name -> template; the main one is "default"."""
    found = {"default": meta["tokenizer.chat_template"]} if meta.get("tokenizer.chat_template") else {}
    prefix = "tokenizer.chat_template."
    return found | {key.removeprefix(prefix): meta[key] for key in meta if key.startswith(prefix)}


def _adds(meta: Mapping[str, Any], which: str) -> bool:
    said = meta.get(f"tokenizer.ggml.add_{which}_token")
    if said is not None:
        return bool(said)
    if which == "eos":
        return _is_encoder(meta)
    if _is_encoder(meta):
        return True
    if meta.get("tokenizer.ggml.model") in ("llama", "gemma4"):
        return True
    return RULES.get(_rule_of(meta), RULES[DEFAULT]).starts


def _is_encoder(meta: Mapping[str, Any]) -> bool:
    return meta.get("general.architecture") in ENCODERS or meta.get("tokenizer.ggml.model") == "t5"


def _post_processor(meta: Mapping[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    """Tokens around a text and, for a pair, between both. WordPiece tells the texts apart by their types."""
    by_types = meta.get("tokenizer.ggml.model") == "bert"
    if by_types:
        ids = special_ids(meta, len(tokens))
        before, behind = (ids.get(name) for name in ("cls", "sep"))
    else:
        before, behind = (
            i if (i := meta.get(f"tokenizer.ggml.{which}_token_id")) is not None and _adds(meta, which) else None
            for which in ("bos", "eos")
        )
    between = None if by_types else behind if _is_encoder(meta) else before
    used = [int(i) for i in (before, behind) if i is not None and i < len(tokens)]
    if not used:
        return None

    def token(i: int | None, kind: int = 0) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": tokens[i], "type_id": kind}}] if i in used and i is not None else []

    second = int(by_types)
    single = [*token(before), {"Sequence": {"id": "A", "type_id": 0}}, *token(behind)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *token(between), {"Sequence": {"id": "B", "type_id": second}}, *token(behind, second)],
        "special_tokens": {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in used},
    }


def _bpe(vocab: dict[str, int], merges: list[str] | list[list[str]], **options: Any) -> dict[str, Any]:
    # Merges may be "a b" or ["a", "b"]: the first is read faster, the second allows spaces in pieces.
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocab,
        "merges": merges,
    }


def _byte_level(meta: Mapping[str, Any], tokens: list[str], path: object) -> dict[str, Any]:
    pre = _rule_of(meta)
    if pre not in RULES:
        why = f"is not supported: {REFUSED[pre]}" if pre in REFUSED else "is not known here"
        raise ModelError(f"{path}: its vocabulary cuts text by rule {pre!r}, which {why} (known: {', '.join(RULES)})")
    rule = RULES[pre]
    vocab = {token: i for i, token in enumerate(tokens)}
    return {
        "normalizer": {"type": rule.normalizer} if rule.normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": rule.steps()},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab, meta.get("tokenizer.ggml.merges") or [], ignore_merges=rule.whole_words),
    }


def _rule_of(meta: Mapping[str, Any]) -> str:
    return str(meta.get("tokenizer.ggml.pre") or DEFAULT)


def _characters(meta: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Gemma 4: merges of characters within lines, and of line breaks; what is no token becomes tokens of its bytes."""
    lines = {"type": "Split", "pattern": {"Regex": "\\n+"}, "behavior": "Isolated", "invert": False}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[meta.get("tokenizer.ggml.unknown_token_id", 0)]
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": lines,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": _bpe(
            vocab, meta.get("tokenizer.ggml.merges") or [], unk_token=unknown, fuse_unk=True, byte_fallback=True
        ),
    }


def _sentencepiece(meta: Mapping[str, Any], tokens: list[str], types: list[int], path: object) -> dict[str, Any]:
    scores = meta.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"{path}: its SentencePiece vocabulary has no scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    # SentencePiece joins the neighbours whose union scores best: as ranked merges, every way to cut each piece in two.
    ranked: list[tuple[float, int, int, int]] = []
    for i, (token, score) in enumerate(zip(tokens, scores.tolist(), strict=True)):
        if types[i] == _NORMAL and len(token) > 1:
            for cut in range(1, len(token)):
                left = vocab.get(token[:cut])
                if left is not None and (right := vocab.get(token[cut:])) is not None:
                    ranked.append((-score, i, left, right))
    ranked.sort()
    pairs = [(tokens[left], tokens[right]) for _, _, left, right in ranked]
    merges: list[str] | list[list[str]] = [f"{left} {right}" for left, right in pairs]
    if any(" " in left or " " in right for left, right in pairs):
        merges = [list(pair) for pair in pairs]
    unknown = meta.get("tokenizer.ggml.unknown_token_id", 0)
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    spaces: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    spaces.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoders: list[dict[str, Any]] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True),
    }
