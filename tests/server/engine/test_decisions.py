"""Reads and answers of decisions, on drawn labels and drawn models."""

from __future__ import annotations

import json
import math
import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reciting import small_tokenizer

from octavo.chat.decisions.answers import answer
from octavo.chat.decisions.asking import Asking, Ways
from octavo.chat.decisions.calibration import (
    HIGHEST,
    LOWEST,
    calibration_file,
    expected_error,
    fit_temperature,
    read_temperatures,
    shares,
)
from octavo.chat.decisions.questions import Option, Question
from octavo.chat.decisions.reads import Reads
from octavo.chat.decisions.wording import label_paths, labels_for

SIZE = 5  # of the vocabulary
paths = st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=3).map(tuple)


def free_of_prefixes(labels):
    return [one for one in labels if not any(one != other and other[: len(one)] == one for other in labels)]


@given(st.lists(st.lists(paths, min_size=1, max_size=9, unique=True), min_size=1, max_size=3), st.integers(0, 999))
def test_a_label_has_the_product_of_its_tokens_probabilities(drawn, seed):
    labels = [free_of_prefixes(one) for one in drawn]

    def model(question, path):
        weights = [random.Random(f"{seed} {question} {path} {token}").random() + 0.01 for token in range(SIZE)]
        return [math.log(weight / sum(weights)) for weight in weights]

    reads, waiting, count = Reads(labels), [], 0
    waiting = reads.first()
    while waiting:
        read = waiting.pop()
        found = model(read.question, read.path)
        waiting += reads.take(read, {token: found[token] for token in read.token_ids})
        count += 1
    for question, own in enumerate(labels):
        expected = [sum(model(question, one[:at])[one[at]] for at in range(len(one))) for one in own]
        for found, wanted in zip(reads.logprobs(question), expected, strict=True):
            assert abs(found - wanted) < 1e-12
    inner = {(question, one[:at]) for question, own in enumerate(labels) for one in own for at in range(len(one))}
    assert count == len(inner)  # no beginning is read twice


logprobs = st.lists(st.floats(-900, -0.5), min_size=2, max_size=6)


@given(logprobs, st.sampled_from(["choice", "score"]))
def test_shares_are_a_distribution_in_the_order_of_the_labels(values, kind):
    options = [Option(f"v{at}", f"v{at}") for at in range(len(values))]
    found = answer(Question(kind, ["?"], options, "n"), values, 0)
    shares = [one.probability for one in found.probabilities]
    assert abs(math.fsum(shares) - 1) < 1e-9 and found.name == "n"
    by_value = [share for _, share in sorted(zip(values, shares, strict=True))]
    assert by_value == sorted(shares)
    assert found.confidence == math.exp(max(values))
    if kind == "score":
        assert 0 <= found.score <= len(values) - 1
    else:
        assert values[int(found.choice[1:])] == max(values)


@given(logprobs, st.floats(0.001, 1))
def test_a_refusal_is_what_has_less_than_the_least_mass(values, least):
    options = [Option(f"v{at}", f"v{at}") for at in range(len(values))]
    found = answer(Question("score", ["?"], options), values, least)
    assert (type(found).__name__ == "RefusalAnswer") == (math.fsum(map(math.exp, values)) < least)


def drawn_rows(rng, true_temperature, count):
    """Questions answered as often as their shares at a temperature say."""
    rows = []
    for _ in range(count):
        logprobs = [rng.uniform(-6, 0) for _ in range(rng.randrange(2, 6))]
        rows.append((logprobs, rng.choices(range(len(logprobs)), shares(logprobs, true_temperature))[0]))
    return rows


def loss(rows, temperature):
    return -math.fsum(math.log(shares(logprobs, temperature)[right]) for logprobs, right in rows)


@given(st.floats(0.3, 4), st.integers(0, 99))
def test_the_fitted_temperature_makes_the_answers_likeliest(true_temperature, seed):
    rows = drawn_rows(random.Random(seed), true_temperature, 60)
    fitted = fit_temperature(rows)
    assert LOWEST <= fitted <= HIGHEST
    for other in (fitted * 0.98, fitted * 1.02, 1.0, true_temperature):
        assert loss(rows, fitted) <= loss(rows, min(max(other, LOWEST), HIGHEST)) + 1e-9


def test_many_answers_show_the_true_temperature_and_lower_the_error():
    rows = drawn_rows(random.Random(1), 2.5, 4000)
    fitted = fit_temperature(rows)
    assert abs(fitted - 2.5) < 0.2
    assert expected_error(rows, fitted) < 0.05 < expected_error(rows, 1.0)


def test_answers_that_are_always_right_or_always_wrong_reach_the_limits():
    assert math.isclose(fit_temperature([([-0.1, -2.0], 0)] * 9), LOWEST, rel_tol=1e-6)
    assert math.isclose(fit_temperature([([-0.1, -2.0], 1)] * 9), HIGHEST, rel_tol=1e-6)


@given(logprobs, st.floats(0.1, 9))
def test_a_temperature_moves_shares_and_keeps_their_order(values, temperature):
    options = [Option(f"v{at}", f"v{at}") for at in range(len(values))]
    found = answer(Question("choice", ["?"], options), values, 0, temperature)
    assert [one.probability for one in found.probabilities] == shares(values, temperature)
    assert found.choice == answer(Question("choice", ["?"], options), values, 0).choice
    assert found.confidence <= math.fsum(map(math.exp, values)) + 1e-12


@given(st.lists(logprobs, min_size=1, max_size=3), st.booleans())
def test_options_that_are_asked_in_both_orders_get_the_mean(values, debias):
    questions = [
        Question("choice", ["?"], [Option(f"v{at}", f"v{at}") for at in range(len(one))], f"q{number}")
        for number, one in enumerate(values)
    ]
    asking = Asking(questions, Ways(debias=debias, min_mass=0))
    labels = [[(letter,) for letter in range(len(question.options))] for question in asking.put]
    reads = Reads(labels)
    for read in reads.first():  # letters are worth something in themselves
        own = values[asking.number(read.question)]
        own = own if read.question < len(questions) else own[::-1]
        assert not reads.take(read, {letter: own[letter] - 0.1 * letter for letter in read.token_ids}, 0)
    for at, one in enumerate(values):
        last = len(one) - 1
        bias = [0.05 * last if debias else 0.1 * letter for letter in range(len(one))]
        expected = [value - less for value, less in zip(one, bias, strict=True)]
        assert asking.logprobs(reads, at) == pytest.approx(expected, abs=1e-9)


def test_a_calibration_file_is_read_back_and_others_are_refused():
    written = calibration_file({"choice": 1.5, "score": 0.5})
    assert read_temperatures(json.loads(json.dumps(written))) == {"choice": 1.5, "score": 0.5}
    for wrong, words in (
        ([], "object"),
        ({"temperatures": {}}, "wording null"),
        ({**written, "wording": "decisions/0"}, "decisions/0"),
        ({**written, "temperatures": {"chioce": 1}}, "chioce"),
        ({**written, "temperatures": {"choice": True}}, "number"),
        ({**written, "temperatures": {"choice": 0}}, "0.05"),
        ({**written, "temperatures": {"choice": math.nan}}, "number"),
    ):
        with pytest.raises(ValueError, match=words):
            read_temperatures(wrong)


@pytest.mark.parametrize("count", [2, 30])
@pytest.mark.parametrize(
    "end", ["<|assistant|>", "<|assistant|>\n", "<|assistant|><think>\n\n</think>\n\n", "Answer:\n\n"]
)
def test_labels_stand_behind_the_prompt_as_the_model_reads_it(end: str, count: int) -> None:
    """GPT-2's rule cuts two newlines in two as soon as a letter follows on them."""
    backend = small_tokenizer([end, *labels_for(count)], ("<|assistant|>",), ("<think>", "</think>"))

    def encode(text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    found = label_paths(
        count,
        f"Question.{end}",
        ["<|assistant|>", "</think>"],
        encode,
        partial(backend.decode, skip_special_tokens=False),
    )
    before = backend.decode(encode(end), skip_special_tokens=False)
    behind = [backend.decode([*encode(end), *path], skip_special_tokens=False) for path in found]
    assert behind == [before + label for label in labels_for(count)]
