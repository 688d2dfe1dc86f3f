"""Pre-tokenizers of byte-level vocabularies in GGUF files, by the name in ``tokenizer.ggml.pre``.

A rule is one or more patterns; each cuts the pieces that those before it have left. The names, and which of them mean
the same, are llama.cpp's (llama-vocab.cpp); a file without a name, or "default", has a rule of its own there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from octavo.text.split_patterns import GPT4O, LLAMA3, QWEN2, TEKKEN


@dataclass(frozen=True)
class Rule:
    """``patterns`` cut, one after the other; empty: GPT-2's, which the library has built in. ``digits``: each is a
    piece first. ``starts``: texts begin with BOS unless the file says otherwise. ``whole_words``: a piece that is a
    token is not merged anew."""

    patterns: tuple[str, ...] = ()
    digits: bool = False
    starts: bool = False
    whole_words: bool = False
    normalizer: str | None = None

    def steps(self) -> list[dict[str, Any]]:
        """The steps as tokenizer.json has them."""
        cut: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if self.digits else []
        cut += [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not self.patterns}
        return [*cut, level]


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD, _BLANKS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_NUMERALS_BY_3, _FROM_RIGHT = r"\p{N}{1,3}", r"\d{1,3}(?=(?:\d{3})*(?!\d))"
_HAN_KANA = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_HANGUL = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters that have a case, but for those that DeepSeek's first vocabulary does not list: later ones, and mathematics.
_LISTED = (
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8f}\x{2d00}-\x{2d2d}\x{a78f}-\x{a7ff}"
    r"\x{ab30}-\x{ab68}\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1df1e}]]"
)
_LISTED_PUNCTUATION = r"[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK_WORDS = rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK_3 = rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}|{_BLANKS}"
_SPARK = rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_BLANKS}"
_FALCON = r"[\p{P}\$\+<=>\^~\|`]+"
_NOT_STOPS = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_BLANKS_BY_POWERS = "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s{1}"
_KOREAN_CHINESE = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-"
    r"\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_OF_GPT2, _OF_DIGITS = Rule(), Rule(digits=True)
_OF_LLAMA3, _OF_QWEN2, _OF_GPT4O = Rule((LLAMA3,)), Rule((QWEN2,)), Rule((GPT4O,))
_OF_DEEPSEEK3 = Rule((_NUMERALS_BY_3, _HAN_KANA, _DEEPSEEK_3))
_BY_LINE_BREAK = Rule((rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_SYMBOLS}[\r\n]*|\s*[\r\n]|{_BLANKS}",))
_BY_MARKS = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
_PHRASES = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"


def _named(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


DEFAULT = "default"
RULES: dict[str, Rule] = {
    DEFAULT: Rule((_FALCON.replace("`", ""), _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **_named(
        "gpt-2 phi-2 mpt olmo jais gigachat trillion granite-docling modern-bert jina-es jina-de jina-v2-es jina-v2-de "
        "a.x-4.0 mellum exaone4 jina-v1-en jina-v2-code roberta-bpe",
        _OF_GPT2,
    ),
    **_named("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", _OF_DIGITS),
    **_named(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        replace(_OF_LLAMA3, starts=True, whole_words=True),
    ),
    **_named("dbrx smaug-bpe chatglm-bpe", _OF_LLAMA3),
    **_named("glm4 glm5", replace(_OF_LLAMA3, whole_words=True)),
    "jais-2": Rule((LLAMA3.replace(_BLANKS, _BLANKS_BY_POWERS),)),
    "minicpm5": Rule((_NUMERALS_BY_3, LLAMA3.replace(_NUMERALS_BY_3, r"\p{N}+")), whole_words=True),
    **_named("qwen2 deepseek-r1-qwen megrez f2llmv2", replace(_OF_QWEN2, normalizer="NFC")),
    **_named("kormo stablelm2 hunyuan solar-open grok-2", _OF_QWEN2),
    "qwen35": Rule((f"{_BY_MARKS}|{_BLANKS}",)),
    "seed-coder": Rule((rf"{_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}|{_BLANKS}",)),
    "ufakzeka": Rule((rf"{_WORD}|\p{{N}}|{_SYMBOLS}[\r\n]*|{_LINES}|{_BLANKS}",)),
    **_named("bailingmoe bailingmoe2 llada-moe", _BY_LINE_BREAK),
    "laguna": Rule((r"[^\n]+|[\n]+", QWEN2)),
    "exaone-moe": Rule((rf"{_ENDINGS}|{_PHRASES}|\p{{N}}|{_SYMBOLS}[\r\n/]?|\s*[\r\n]|{_BLANKS}",)),
    "tekken": Rule((TEKKEN,), starts=True, whole_words=True),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", _OF_GPT4O),
    "granite-embed-multi-97m": replace(_OF_GPT4O, whole_words=True),
    **_named("tiny_aya cohere2moe", Rule((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O))),
    "youtu": Rule((_KOREAN_CHINESE, GPT4O.replace(_NUMERALS_BY_3, r"\p{N}")), whole_words=True),
    "deepseek-llm": Rule(
        (r"[\r\n]", rf"\s?{_LISTED}+", rf"\s?{_LISTED_PUNCTUATION}+", r"\s+$", _HAN_HANGUL, r"\p{N}+")
    ),
    "deepseek-coder": Rule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}")),
    **_named("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _OF_DEEPSEEK3),
    "spark2_5": Rule((_NUMERALS_BY_3, _HAN_KANA, _SPARK, r"\p{N}")),
    "falcon": Rule((_FALCON, _GPT2, "[0-9][0-9][0-9]")),
    **_named("bloom gpt3-finnish poro-chat", Rule((_NOT_STOPS,))),
    "viking": Rule((_NOT_STOPS, r"\p{N}")),
    "superbpe": Rule((r"\p{N}+", _FROM_RIGHT)),
    "chameleon": Rule(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        starts=True,
    ),
}
# Names that llama.cpp knows and that are refused here: why.
REFUSED = {
    "kimi-k2": "its files have no merges",
    "afmoe": "it groups digits by their number",
    "whitespace": "it has no bytes",
    "sarvam-moe": "it merges characters, not bytes",
    "granite-embed-multi-311m": "it merges characters, not bytes",
    "gemma4": "it is that of vocabularies of kind gemma4",
}
