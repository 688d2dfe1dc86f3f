"""Tokens put together from known beginnings are the tokens of the whole text."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_configs import LLAMA_SIZES
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

from octavo.engine.input_processor import InputProcessor
from octavo.interface.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.interface.model_files import ModelFiles
from octavo.interface.sampling_params import SamplingParams
from octavo.text import split_patterns
from octavo.text.prefix_token_cache import MAX_PREFIXES, PrefixTokens
from octavo.text.tokenizer import Tokenizer

PIECES = (
    "the",
    " capital",
    " of",
    " France",
    "Paris.",
    "don't",
    "it'S",
    "'s",
    " ",
    "  ",
    "\n",
    " \n ",
    "\r\n",
    "\t",
    "\u00a0",
    "7",
    " 1234",
    "3.14",
    "日本",
    "Привет",
    " мир",
    "e\u0301",
    " \u0301",
    "ß",
    "ǅ",
    "ﬁ",
    "🙂",
    "👩\u200d🚀",
    "…",
    "_",
    "--",
    "/\n",
    " (",
    "a",
    " b",
    " I",
    "<|end|>",
    " <|end|>",
    "<mask>",
    " of<sep>",
    "<sep> b",
    "\u2028",
    "\x85",
    "ा",
    " ा",
    "Ⅷ",
    " ²",
)
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)
CORPUS = [
    "".join(PIECES[i % len(PIECES)] for i in range(start, start + 400, step)) for start in range(9) for step in (1, 7)
]


def trained(*cuts: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """Merges were learned without words: wherever two pieces are taken for one, they are merged over the border."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(cuts))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<mask>", lstrip=True)])
    backend.add_tokens([AddedToken("<sep>", rstrip=True), AddedToken("ital", normalized=True)])
    return Tokenizer(backend, {})


def split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_alone]


def with_bos_and_eos(tokenizer: Tokenizer) -> Tokenizer:
    end = tokenizer.backend.token_to_id("<|end|>")
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<|end|> $A <mask>", special_tokens=[("<|end|>", end), ("<mask>", end + 1)]
    )
    return tokenizer


KNOWN = {
    "gpt-2": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt-2, space in front": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits": lambda: trained(
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    ),
    "llama 3": lambda: with_bos_and_eos(trained(*split(split_patterns.LLAMA3))),
    "qwen 2": lambda: trained(*split(split_patterns.QWEN2), normalizer=normalizers.NFC()),
    "tekken": lambda: trained(*split(split_patterns.TEKKEN), normalizer=normalizers.NFKD()),
    "gpt-4o": lambda: trained(*split(split_patterns.GPT4O)),
}


@pytest.fixture(scope="module", params=KNOWN)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KNOWN[request.param]()


@settings(max_examples=100)
@given(st.data())
def test_every_text_gets_the_tokens_that_it_gets_alone(tokenizer: Tokenizer, data: st.DataObject) -> None:
    known = PrefixTokens(tokenizer, min_chars=2)
    said = [""]
    for more in data.draw(st.lists(texts, min_size=2, max_size=8)):
        before = data.draw(st.sampled_from(said))
        text = before[: data.draw(st.integers(0, len(before)))] + more
        said += [text, before + more]
        for one in said[-2:]:
            special = data.draw(st.booleans())
            assert known.encode(one, special) == tokenizer.encode(one, special)


def test_a_shared_beginning_is_tokenised_once(tokenizer: Tokenizer) -> None:
    known = PrefixTokens(tokenizer)
    system = "You know all there is to know of the capital of France, and answer in one word. " * 6
    asked = [f"{system}Question number {n}: what is it?" for n in range(4)]
    assert known.num_new_chars(asked[0]) == len(asked[0])
    assert [known.encode(text) for text in asked] == [tokenizer.encode(text) for text in asked]
    assert known.num_new_chars(f"{system}Question number 7") < 40
    known.encode(f"{system}Now something else")  # what all of them share is shorter than what the first ones did
    assert known.num_new_chars(f"{system}Again something else") < 40


def test_a_conversation_that_grows(tokenizer: Tokenizer) -> None:
    known, text = PrefixTokens(tokenizer), "A first question, which is about as long as they are. " * 6
    for turn in range(12):
        assert known.encode(text) == tokenizer.encode(text)
        if turn > 1:
            assert known.num_new_chars(text) < 0.5 * len(text)
        text += f"Then answer {turn} and the next question in its turn. " * 3


def merged_over_spaces() -> Tokenizer:
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))


def unknown_pattern() -> Tokenizer:
    return trained(*split(r"\S+ \S+|\s+|\S+"))


def token(*args: str, normalizer: normalizers.Normalizer | None = None, **options: bool) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer=normalizer)
        tokenizer.backend.add_tokens([AddedToken(*args, **options)])
        return tokenizer

    return make


def bytes_first() -> Tokenizer:
    return trained(*reversed(split(split_patterns.LLAMA3)))


def dropout() -> Tokenizer:
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.backend.model.dropout = 1.0
    return tokenizer


def changes_spaces() -> Tokenizer:
    return trained(
        pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer=normalizers.Replace(Regex(r"l\s+"), "l")
    )


UNKNOWN = {
    "merged over spaces": merged_over_spaces,
    "unknown pattern": unknown_pattern,
    "bytes first": bytes_first,
    "dropout": dropout,
    "changes spaces": changes_spaces,
    "token with a space": token("capital of"),
    "token that takes the space behind it": token("capital", rstrip=True),
    "token in front of which there may be no letter": token(" of", single_word=True),
    "token of a letter and a mark": token("e\u0301 b", normalized=True, normalizer=normalizers.NFC()),
    "the same and the space behind it": token("e\u0301", normalized=True, rstrip=True, normalizer=normalizers.NFC()),
    "token with a space that is none": token("e\u00a0F", normalized=True, normalizer=normalizers.NFKC()),
}


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_nothing_is_kept_of_texts_that_may_not_be_cut(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    known = PrefixTokens(tokenizer, min_chars=2)
    for n in range(4):
        text = f"the capital of France caf\u00e9  by one Fy the capital of {n}"
        assert known.encode(text) == tokenizer.encode(text)
        assert known.num_new_chars(text) == len(text)


def test_memory_is_bounded() -> None:
    tokenizer = KNOWN["gpt-2"]()
    known = PrefixTokens(tokenizer)
    for n in range(3 * MAX_PREFIXES):
        for end in ("one thing", "another"):
            known.encode(f"{n} " + "and so on " * 40 + end)
    kept = [n for n in range(3 * MAX_PREFIXES) if known.num_new_chars(text := f"{n} " + "and so on " * 40) < len(text)]
    assert kept == list(range(2 * MAX_PREFIXES, 3 * MAX_PREFIXES))


def test_several_threads() -> None:
    tokenizer = KNOWN["llama 3"]()
    known = PrefixTokens(tokenizer, min_chars=8)
    asked = [f"{'the capital of France ' * (n % 5)}and {n} more of them" for n in range(400)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(known.encode, asked)) == [tokenizer.encode(text) for text in asked]


def test_a_salted_request_leaves_and_finds_no_trace() -> None:
    tokenizer = KNOWN["llama 3"]()
    model = ModelConfig(
        model="m",
        files=ModelFiles("m", "safetensors", "/nowhere"),
        dtype="float32",
        max_model_len=4096,
        hf_config=LLAMA_SIZES | {"vocab_size": 1000},
        generation_config={},
    )
    processor = InputProcessor(
        EngineConfig(model=model, cache=CacheConfig(), scheduler=SchedulerConfig(max_model_len=4096)), tokenizer
    )
    text = "the capital of France " * 20
    for salt in ("mine", None):
        for n in range(3):
            request = processor.process("r", f"{text}{n}", SamplingParams(), cache_salt=salt)
            assert request.prompt_token_ids == tokenizer.encode(f"{text}{n}")
        new = processor.prefix_tokens.num_new_chars(text)
        assert (new == len(text)) == (salt is not None)
