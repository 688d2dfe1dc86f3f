"""Reads and answers of decisions, on drawn labels and drawn models."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from octavo.chat.decisions.answers import answer
from octavo.chat.decisions.questions import Option, Question
from octavo.chat.decisions.reads import Reads

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
