"""The short reads of the model that answer questions, and the log-probabilities of labels in them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.chat.decisions.wording import Path
from octavo.interface.outputs import RequestOutput

_NEGLIGIBLE = math.log(1e-7)  # below it a label's beginning is not read on: its labels have no probability


@dataclass(frozen=True)
class Read:
    """One token to read: behind the prompt of ``question`` and ``path``, the beginning of labels. ``token_ids``: whose
    log-probabilities are wanted."""

    question: int
    path: Path
    token_ids: list[int]


class Reads:
    """The reads of all questions: one each, and more where labels have several tokens."""

    def __init__(self, labels: Sequence[Sequence[Path]]) -> None:
        """``labels``: the paths of each question's labels; none is another's beginning."""
        self._labels = labels
        self._known: list[dict[Path, float]] = [{(): 0.0} for _ in labels]
        self._says_label = [False] * len(labels)

    def first(self) -> list[Read]:
        """The first read of each question."""
        return [self._read(question, ()) for question in range(len(self._labels))]

    def take(self, read: Read, found: Mapping[int, float], likeliest: int | None = None) -> list[Read]:
        """Take a read's log-probabilities by token id, and the likeliest token of all; returns the reads that follow
        from it."""
        if not read.path:
            self._says_label[read.question] = likeliest in read.token_ids
        known, labels = self._known[read.question], set(self._labels[read.question])
        more = []
        for token in read.token_ids:
            path = (*read.path, token)
            known[path] = known[read.path] + found[token]
            if path not in labels and known[path] > _NEGLIGIBLE:
                more.append(self._read(read.question, path))
        return more

    def logprobs(self, question: int) -> list[float]:
        """The log-probability of each label of a question, as a whole text behind the prompt."""
        known = self._known[question]
        return [known.get(path, -math.inf) for path in self._labels[question]]

    def says_label(self, question: int) -> bool:
        """True if the likeliest token behind a question is a label, or the beginning of one."""
        return self._says_label[question]

    def _read(self, question: int, path: Path) -> Read:
        length = len(path)
        follow = {label[length] for label in self._labels[question] if label[:length] == path}
        return Read(question, path, sorted(follow))


def named_logprobs(output: RequestOutput) -> tuple[dict[int, float], int]:
    """The log-probabilities of a read's tokens by id, and the likeliest token of all."""
    (answer,) = output.outputs
    assert answer.logprobs is not None
    ids, values = answer.logprobs.token_ids[0], answer.logprobs.logprobs[0]
    assert ids is not None and values is not None
    return dict(zip(ids[1:], values[1:], strict=True)), answer.token_ids[0]
