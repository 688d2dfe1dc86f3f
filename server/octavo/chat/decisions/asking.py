"""Questions as they are put to the model, once each or also with their options reversed, and the decision on them.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from octavo.chat.decisions.answers import (
    MIN_MASS,
    Decision,
    Diagnostics,
    NotedDecision,
    Notes,
    answer,
    mass_of,
    usage_of,
)
from octavo.chat.decisions.questions import Question
from octavo.chat.decisions.reads import Reads
from octavo.interface.outputs import RequestOutput


@dataclass(frozen=True)
class Ways:
    """The way in which questions are asked and answered. ``temperatures``: by type of question, 1 where it has none;
    ``notes``: the answer says how it came about, with ``diagnostics`` also of each question."""

    debias: bool = False
    diagnostics: bool = False
    notes: bool = False
    min_mass: float = MIN_MASS
    temperatures: Mapping[str, float] = field(default_factory=dict)


class Asking:
    """Questions, and those that are put to the model: these, and with ``debias`` each again with its options reversed,
    since models prefer some letters and places to others."""

    def __init__(self, questions: Sequence[Question], ways: Ways) -> None:
        self.questions, self._ways = questions, ways
        again = [replace(one, options=one.options[::-1]) for one in questions] if ways.debias else []
        self.put = [*questions, *again]

    def number(self, at: int) -> int:
        """The number of the question that is put to the model as number ``at``."""
        return at % len(self.questions)

    def logprobs(self, reads: Reads, at: int) -> list[float]:
        """The log-probabilities of a question's options: the mean where it was asked twice."""
        found = reads.logprobs(at)
        if not self._ways.debias:
            return found
        again = reads.logprobs(at + len(self.questions))[::-1]
        return [(one + other) / 2 for one, other in zip(found, again, strict=True)]

    def decide(self, reads: Reads, model: str, outputs: Sequence[RequestOutput]) -> Decision:
        """The decision, once all is read; ``outputs`` are those of all reads."""
        ways, found = self._ways, [self.logprobs(reads, at) for at in range(len(self.questions))]
        answers = [
            answer(question, logprobs, ways.min_mass, ways.temperatures.get(question.kind, 1.0))
            for question, logprobs in zip(self.questions, found, strict=True)
        ]
        decision = Decision(answers, model, usage_of(outputs))
        if not ways.notes:
            return decision
        said = [
            all(reads.says_label(place) for place in range(at, len(self.put), len(self.questions)))
            for at in range(len(self.questions))
        ]
        diagnostics = [Diagnostics(mass_of(logprobs), is_label) for logprobs, is_label in zip(found, said, strict=True)]
        notes = Notes(bool(ways.temperatures), diagnostics if ways.diagnostics else None)
        return NotedDecision(decision.answers, decision.model, decision.usage, notes)
