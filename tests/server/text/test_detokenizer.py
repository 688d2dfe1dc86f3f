"""The text of an answer never depends on how its tokens arrived."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.interface.sampling_params import SamplingParams
from octavo.text.detokenizer import REPLACEMENT, Detokenizer, Vocabulary

KINDS = ["byte_level", "byte_fallback", "byte_fallback_no_strip", "word_piece"]


@pytest.fixture(scope="session")
def tokenizers_by_kind(request):
    return {kind: request.getfixturevalue(kind) for kind in KINDS}


@pytest.fixture(scope="session")
def vocabularies(tokenizers_by_kind):
    return {kind: Vocabulary(tokenizer) for kind, tokenizer in tokenizers_by_kind.items()}


def stream(vocabulary, ids, cuts=(), prompt=(), **params) -> tuple[list[str], str | None, Detokenizer]:
    """Feed ids cut into steps at ``cuts``; returns the deltas, the stop string and the detokenizer."""
    detokenizer = Detokenizer(vocabulary, SamplingParams(max_tokens=None, **params), list(prompt))
    bounds = [0, *sorted({c for c in cuts if 0 < c < len(ids)}), len(ids)]
    deltas: list[str] = []
    for start, end in itertools.pairwise(bounds):
        _, stop = detokenizer.update(ids[start:end], finished=end == len(ids))
        deltas.append(detokenizer.take_delta())
        if stop is not None:
            return deltas, stop, detokenizer
    return deltas, None, detokenizer


def ids_and_cuts(max_id: int):
    return st.tuples(
        st.lists(st.integers(0, max_id - 1), max_size=40), st.lists(st.integers(1, 40), max_size=10), st.booleans()
    )


def test_the_kinds_are_told_apart(vocabularies):
    assert {kind: v.kind for kind, v in vocabularies.items()} == {
        "byte_level": "byte_level",
        "byte_fallback": "byte_fallback",
        "byte_fallback_no_strip": "byte_fallback",
        "word_piece": "other",
    }
    assert vocabularies["byte_fallback"].strips_leading_space
    assert not vocabularies["byte_fallback_no_strip"].strips_leading_space


@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_deltas_add_up_to_decoding_all_ids_at_once(tokenizers_by_kind, vocabularies, data):
    """Any ids at all (half characters, invalid UTF-8, added and special tokens), any split into steps."""
    tokenizer = tokenizers_by_kind["byte_level"]
    ids, cuts, skip = data.draw(ids_and_cuts(tokenizer.vocab_size))
    deltas, _, _ = stream(vocabularies["byte_level"], ids, cuts, skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), kind=st.sampled_from(["byte_fallback", "byte_fallback_no_strip"]))
@settings(deadline=None, max_examples=300)
def test_deltas_continue_the_prompts_text(tokenizers_by_kind, vocabularies, data, kind):
    """With byte fallback, the answer is what decoding prompt and answer together adds to the prompt's text.

    (Invalid UTF-8 aside: tokenizers then replaces a whole run of bytes that we have already shown in part.)
    """
    tokenizer = tokenizers_by_kind[kind]
    ids, cuts, skip = data.draw(ids_and_cuts(tokenizer.vocab_size))
    prompt = data.draw(st.sampled_from([[], [1], tokenizer.encode("The fox"), [1, *tokenizer.encode("dog")]]))
    whole = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    deltas, _, _ = stream(vocabularies[kind], ids, cuts, prompt, skip_special_tokens=skip)
    text = "".join(deltas)
    if REPLACEMENT in whole or REPLACEMENT in text:
        return
    assert tokenizer.decode(prompt, skip_special_tokens=skip) + text == whole


@given(text=st.text(max_size=60), cuts=st.lists(st.integers(1, 60), max_size=20), kind=st.sampled_from(KINDS[:3]))
@settings(deadline=None, max_examples=300)
def test_real_text_streams_without_replacement_characters(tokenizers_by_kind, vocabularies, text, cuts, kind):
    text = "x" + "".join(c for c in text if c not in f"<▁{REPLACEMENT}")  # what no tokenizer here can give back
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas, _, _ = stream(vocabularies[kind], ids, range(1, len(ids)))
    assert all(REPLACEMENT not in delta for delta in deltas)
    assert "".join(deltas) == tokenizer.decode(ids) == text
    assert "".join(stream(vocabularies[kind], ids, cuts)[0]) == text


def test_word_piece_streams_words_with_their_spaces(tokenizers_by_kind, vocabularies):
    tokenizer = tokenizers_by_kind["word_piece"]
    prompt, answer = tokenizer.encode("The capital of France"), tokenizer.encode("is Paris. The lazy dog jumps")
    deltas, _, _ = stream(vocabularies["word_piece"], answer, range(1, 50), prompt)
    assert tokenizer.decode(prompt) + "".join(deltas) == tokenizer.decode(prompt + answer)


def test_word_piece_without_spaces_between_special_tokens(tokenizers_by_kind, vocabularies):
    tokenizer = tokenizers_by_kind["word_piece"]
    end = tokenizer.backend.token_to_id("<|end|>")
    texts = [
        "".join(
            stream(
                vocabularies["word_piece"], [end, end], [1], skip_special_tokens=False, spaces_between_special_tokens=s
            )[0]
        )
        for s in (True, False)
    ]
    assert texts == ["<|end|> <|end|>", "<|end|><|end|>"]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_without_a_token_show_nothing(vocabularies, kind):
    """Models pad their vocabulary beyond the tokenizer's."""
    assert "".join(stream(vocabularies[kind], [100_000, 100_001], [1])[0]) == ""


def test_a_cut_off_character_shows_at_the_end_only(byte_level, vocabularies):
    ids = byte_level.encode("a👩", add_special_tokens=False)
    assert len(ids) > 2, "the tokenizer must split the character for this test to mean anything"
    deltas, _, _ = stream(vocabularies["byte_level"], ids[:-1], range(1, 20))
    assert all(REPLACEMENT not in delta for delta in deltas[:-1])
    assert deltas[-1].endswith(REPLACEMENT)


# Stop strings.


def first_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """What a reader would do character by character: stop at the first end of a stop string, the longest of those."""
    for end in range(1, len(text) + 1):
        matches = [s for s in stops if text[:end].endswith(s)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


few_letters = st.text(alphabet="abc 日", min_size=1, max_size=5)


@given(
    text=st.text(alphabet="abc 日", max_size=40),
    stops=st.lists(few_letters, min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 40), max_size=12),
    include=st.booleans(),
)
@settings(deadline=None, max_examples=500)
def test_stop_strings_match_a_reader_going_character_by_character(byte_level, vocabularies, text, stops, cuts, include):
    ids = byte_level.encode(text, add_special_tokens=False)
    deltas, stop, detokenizer = stream(
        vocabularies["byte_level"], ids, cuts, stop=stops, include_stop_str_in_output=include
    )
    expected, expected_stop = first_stop(text, stops, include)
    assert ("".join(deltas), stop) == (expected, expected_stop)
    assert detokenizer.text == "", "what was taken is forgotten"


@given(text=st.text(alphabet="ab ", max_size=30), stops=st.lists(few_letters, min_size=1, max_size=3))
@settings(deadline=None, max_examples=300)
def test_only_a_possible_beginning_of_a_stop_string_is_held_back(byte_level, vocabularies, text, stops):
    ids = byte_level.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(vocabularies["byte_level"], SamplingParams(stop=stops), [])
    shown = ""
    for i, token_id in enumerate(ids):
        _, stop = detokenizer.update([token_id], finished=False)
        shown += detokenizer.take_delta()
        if stop is not None:
            return
        full = byte_level.decode(ids[: i + 1])
        held = full[len(shown) :]
        assert full.startswith(shown)
        assert held == "" or any(s.startswith(held) and s != held for s in stops)


def test_the_step_that_finds_a_stop_string_says_how_many_tokens_it_used(byte_level, vocabularies):
    ids = byte_level.encode("one\n\n\ntwo\nthree", add_special_tokens=False)
    detokenizer = Detokenizer(vocabularies["byte_level"], SamplingParams(stop="two"), [])
    used, stop = detokenizer.update(ids, finished=True)
    assert stop == "two"
    assert byte_level.decode(ids[:used]).startswith("one\n\n\ntwo")
    assert "two" not in byte_level.decode(ids[: used - 1])
    assert detokenizer.text == "one\n\n\n"


def test_min_tokens_lets_earlier_stop_strings_pass(byte_level, vocabularies):
    ids = byte_level.encode("a.b.c.d.", add_special_tokens=False)
    assert len(ids) == 8
    detokenizer = Detokenizer(vocabularies["byte_level"], SamplingParams(stop=".", min_tokens=4), [])
    for token_id in ids:
        _, stop = detokenizer.update([token_id], finished=False)
        if stop:
            break
    assert detokenizer.text == "a.b.c"


def test_a_stop_token_shows_no_text_unless_asked(byte_level, vocabularies):
    x, y = byte_level.encode("x", add_special_tokens=False), byte_level.encode("y", add_special_tokens=False)
    for include, expected in ((False, "x"), (True, "xy")):
        params = SamplingParams(include_stop_str_in_output=include)
        detokenizer = Detokenizer(vocabularies["byte_level"], params, [])
        detokenizer.update(x + y, finished=True, stopped_by_token=True)
        assert detokenizer.text == expected


def test_the_cost_of_a_token_does_not_grow_with_the_answer(byte_level, vocabularies):
    """Work per token is counted in time for 200 tokens at the start and after 50,000."""
    rng = random.Random(0)
    ids = [rng.randrange(byte_level.vocab_size) for _ in range(200)]
    detokenizer = Detokenizer(vocabularies["byte_level"], SamplingParams(stop=["never there"]), [])

    def best_of(times: int = 5) -> float:
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            for token_id in ids:
                detokenizer.update([token_id], finished=False)
                detokenizer.take_delta()
            taken.append(time.perf_counter() - start)
        return min(taken)

    early = best_of()
    for _ in range(250):
        detokenizer.update(ids, finished=False)
    detokenizer.take_delta()
    assert best_of() < 3 * early
