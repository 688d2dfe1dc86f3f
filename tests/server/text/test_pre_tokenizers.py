"""Texts are cut by the names that GGUF files have for it as llama.cpp, and the families' own tokenizers, cut them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import regex
from tokenizers import Tokenizer

from octavo.errors import ModelError
from octavo.gguf.header import GGUFFile
from octavo.gguf.pre_tokenizers import DEFAULT, REFUSED, RULES, Rule
from octavo.gguf.tokenizer import tokenizer_json
from octavo.text.split_patterns import GPT4O, LLAMA3, QWEN2, TEKKEN

# Every name in the llama.cpp inside llama-cpp-python 0.3.36.
LLAMA_CPP = """
    a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe command-r dbrx
    deepseek-coder deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4 f2llmv2 falcon
    falcon-h1 falcon3 gemma4 gigachat glm4 glm5 gpt-2 gpt-4o gpt3-finnish granite-docling granite-embed-multi-311m
    granite-embed-multi-97m grok-2 hunyuan hunyuan-dense hy_v4 jais jais-2 jina-de jina-es jina-v1-en jina-v2-code
    jina-v2-de jina-v2-es jina-v5-nano joyai-llm kanana2 kimi-k2 kormo laguna lfm2 llada-moe llama-bpe llama-v3
    llama3 llama4 megrez mellum mellum2 midm-2.0 minerva-7b minicpm5 minimax-m2 modern-bert mpt olmo phi-2 pixtral
    poro-chat qwen2 qwen35 refact roberta-bpe sarvam-moe seed-coder smaug-bpe smollm solar-open spark2_5 stablelm2
    starcoder superbpe talkie tekken tiny_aya trillion ufakzeka viking whitespace youtu
"""
TEXTS = [
    "",
    " ",
    "  ",
    "     ",
    "\t",
    "\n",
    "\n\n\n",
    "\t\n",
    " \r\n\t x",
    "two words",
    " a blank first",
    "   three blanks",
    "Mixed CASE Words",
    "A sentence, with a stop.",
    " (in brackets)",
    "\n = 5",
    "it's",
    "I'VE, they'LL, DON'T we'd",
    "'quoted' ''",
    "7",
    "42",
    "365",
    "1999",
    "86400",
    "123456",
    "1234567",
    "12345678901",
    "v2.10.3-rc1",
    "3.14159 1,000,000 1e-9",
    "naïve Ünïcödé",
    "Добрый вечер",
    "γνῶθι σεαυτόν",
    "ខ្ញុំស្រឡាញ់",
    "สวัสดีครับ",
    "שלום עולם",
    "مرحبا، كيف",
    "今天下雨了，真的。",
    "カタカナとひらがな",
    "안녕 ㄱㄴ 하세요",
    "e\u0301te\u0301 क्षत्रिय",
    "½ ²³ ٣٤٥ Ⅷ",
    "😀👍🏽 ok 🇫🇷",
    "Math𝐀𝐁 ѴՔ Ωmega Ⴀ ა",
    "x=1;\n\tif (x > 10) { return `$y^2`; } ~|<+>",
    "a\r\nb\r\n\r\n c",
    "/path/to//file\n/",
    "CamelCaseHTTPServer's",
    "blanks at the end   ",
    "a  b   c    d",
    "IMGIMGABCZ <sentinel:12>",
    "......!!!???",
    " " * 70 + "x",
]


def cut(rule: Rule, text: str) -> list[str]:
    """By another library: pieces are what a pattern matches, and what lies between."""
    pieces = [text] if text else []
    digits = [r"\p{N}"] if rule.digits else []
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    for pattern in (*digits, *(rule.patterns or (gpt2,))):
        pattern = regex.sub(r"\\x\{(\w+)\}", lambda match: f"\\U{int(match[1], 16):08x}", pattern)
        compiled, found = regex.compile(pattern, regex.V1), []
        for piece in pieces:
            at = 0
            for match in compiled.finditer(piece):
                found += [piece[at : match.start()], match[0]]
                at = match.end()
            found.append(piece[at:])
        pieces = [piece for piece in found if piece]
    return pieces


@pytest.mark.parametrize("name", RULES)
def test_a_rule_cuts_as_its_patterns_say(name: str) -> None:
    rule = RULES[name]
    whole = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    step = {"type": "Sequence", "pretokenizers": rule.steps()}
    cutter = Tokenizer.from_str(json.dumps(whole | {"pre_tokenizer": step})).pre_tokenizer
    for text in TEXTS:
        found = [text[first:last] for _, (first, last) in cutter.pre_tokenize_str(text)]
        assert found == cut(rule, text), text


def test_every_name_of_llama_cpp_is_known_or_refused_with_a_reason() -> None:
    names = set(LLAMA_CPP.split())
    assert names == set(RULES) | set(REFUSED) and not set(RULES) & set(REFUSED)


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("default", "ab 1234567 x.y", ["ab", " ", "123", "456", "7", " x", ".", "y"]),
        ("falcon", "12345 $x", ["123", "45", " ", "$", "x"]),
        ("deepseek-v3", "1234 漢字kana's", ["123", "4", " ", "漢字", "kana", "'s"]),
        ("qwen35", "e\u0301a 12", ["e\u0301a", " ", "1", "2"]),
        ("superbpe", "by 1234567 of", ["by ", "1", "234", "567", " of"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("viking", "a, b12", ["a", ",", " b", "1", "2"]),
        ("bailingmoe", "a\n\nb", ["a", "\n\n", "b"]),
        ("ufakzeka", "Ankara'da", ["Ankara", "'da"]),
        ("deepseek-llm", "Aa ა12\n", ["Aa", " ", "ა", "12", "\n"]),
    ],
)
def test_pieces_are_those_of_the_families(name: str, text: str, pieces: list[str]) -> None:
    assert cut(RULES[name], text) == pieces


def test_families_of_one_rule_share_it() -> None:
    """As the patterns that prompts' prefixes are cut by."""
    for name, pattern in (("glm4", LLAMA3), ("stablelm2", QWEN2), ("kanana2", GPT4O), ("tekken", TEKKEN)):
        assert RULES[name].patterns == (pattern,)


def test_a_file_without_a_name_has_llama_cpps_default() -> None:
    meta = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]}
    wanted = {"type": "Sequence", "pretokenizers": RULES[DEFAULT].steps()}
    for more in ({}, {"tokenizer.ggml.pre": ""}, {"tokenizer.ggml.pre": "default"}):
        assert tokenizer_json(meta | more, "m.gguf")["pre_tokenizer"] == wanted
    with pytest.raises(ModelError, match=r"rule 'kimi-k2', which is not supported: its files have no merges"):
        tokenizer_json(meta | {"tokenizer.ggml.pre": "kimi-k2"}, "m.gguf")


PEERS = Path(os.environ.get("OCTAVO_PEERS") or Path.home() / ".cache" / "octavo" / "peers")
VOCABULARIES = [path for path in sorted(PEERS.glob("**/models/ggml-vocab-*.gguf")) if Path(f"{path}.inp").exists()]


@pytest.mark.long
@pytest.mark.skipif(not VOCABULARIES, reason="llama.cpp's vocabularies are not here: make peers ARGS=vocabularies")
@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_ids_are_those_of_llama_cpps_vocabularies(path: Path) -> None:
    file = GGUFFile(path)
    if file.metadata.get("tokenizer.ggml.model") not in ("gpt2", "llama", "gemma4", "bert"):
        pytest.skip("a vocabulary of another kind")
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(file.metadata, path)))
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    answers = Path(f"{path}.out").read_text().splitlines()
    assert len(answers) >= 46
    for text, answer in zip(texts, answers, strict=False):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == [int(one) for one in answer.split()], text
