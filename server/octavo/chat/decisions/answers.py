"""Answers to questions, in the form of OpenAI's /v1/decisions. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.chat.decisions.calibration import shares
from octavo.chat.decisions.questions import Question
from octavo.interface.outputs import RequestOutput

MIN_MASS = 0.01  # a refusal below it


@dataclass(slots=True)
class PredicateAnswer:
    """The probability that a statement is true."""

    name: str | None
    probability: float
    type: str = "predicate"


@dataclass(slots=True)
class ChoiceProbability:
    """One option's share."""

    value: str | bool
    probability: float


@dataclass(slots=True)
class ChoiceAnswer:
    """The likeliest option. ``confidence``: the probability that the model says its label, of all that it may say."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]
    type: str = "choice"


@dataclass(slots=True)
class ScoreProbability:
    """One level's share; ``value`` is its number, from 0."""

    value: int
    label: str
    probability: float


@dataclass(slots=True)
class ScoreAnswer:
    """The mean of the levels' numbers. ``confidence``: as of a choice, of the likeliest level."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[ScoreProbability]
    type: str = "score"


@dataclass(slots=True)
class RefusalAnswer:
    """The model would have said something else than a label."""

    name: str | None
    type: str = "refusal"


Answer = PredicateAnswer | ChoiceAnswer | ScoreAnswer | RefusalAnswer


@dataclass(slots=True)
class CachedTokens:
    """Tokens of prompts that were in the prefix cache, and what was written there beyond the usual."""

    cached_tokens: int
    cache_write_tokens: int = 0


@dataclass(slots=True)
class ThoughtTokens:
    """Tokens of reasoning: none."""

    reasoning_tokens: int = 0


@dataclass(slots=True)
class DecisionUsage:
    """Tokens of all reads: each has its whole prompt, of which nearly all is cached, and gives one token."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ThoughtTokens
    total_tokens: int


@dataclass(slots=True)
class Decision:
    """The response of /v1/decisions: answers in the order of the questions."""

    answers: list[Answer]
    model: str
    usage: DecisionUsage


@dataclass(slots=True)
class Diagnostics:
    """The probabilities of a question's labels together, and whether the model would have said the beginning of one."""

    mass: float
    says_label: bool


@dataclass(slots=True)
class Notes:
    """Octavo's notes: whether temperatures of a calibration apply, and of each question what the model would have
    said, where that was asked for."""

    calibrated: bool
    diagnostics: list[Diagnostics] | None = None


@dataclass(slots=True)
class NotedDecision(Decision):
    """A decision with notes."""

    octavo: Notes


def usage_of(outputs: Sequence[RequestOutput]) -> DecisionUsage:
    """The usage of all reads."""
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    cached = CachedTokens(sum(output.num_cached_tokens for output in outputs))
    return DecisionUsage(prompts, cached, len(outputs), ThoughtTokens(), prompts + len(outputs))


def mass_of(logprobs: Sequence[float]) -> float:
    """The labels' probabilities together."""
    return math.fsum(map(math.exp, logprobs))


def answer(question: Question, logprobs: Sequence[float], min_mass: float, temperature: float = 1.0) -> Answer:
    """The answer to a question whose labels have these log-probabilities, which are divided by ``temperature``; a
    refusal where their probabilities sum to less than ``min_mass``."""
    highest, mass = max(logprobs), mass_of(logprobs)
    if math.isinf(highest) or mass < min_mass:
        return RefusalAnswer(question.name)
    own = shares(logprobs, temperature)
    best = own.index(max(own))
    confidence = math.exp(highest) if temperature == 1 else own[best] * mass
    if question.kind == "predicate":
        return PredicateAnswer(question.name, own[0])
    if question.kind == "choice":
        found = [ChoiceProbability(option.value, share) for option, share in zip(question.options, own, strict=True)]
        return ChoiceAnswer(question.name, question.options[best].value, confidence, found)
    levels = [
        ScoreProbability(at, option.text, share)
        for at, (option, share) in enumerate(zip(question.options, own, strict=True))
    ]
    mean = math.fsum(level.value * level.probability for level in levels)
    return ScoreAnswer(question.name, mean, confidence, levels)
