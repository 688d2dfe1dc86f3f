"""The text of a question that the model reads: the fixed wording ``decisions/1``, and labels of options. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from octavo.chat.decisions.questions import Option, Question
from octavo.errors import FieldError

VERSION = "decisions/1"  # another wording gives other probabilities, and is another version
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_HEADS = {
    "predicate": "Judge by what is above whether this statement is true:",
    "choice": "Choose by what is above:",
    "score": "Rate what is above:",
}
_LISTED = {"predicate": "", "choice": "Options:\n", "score": "Levels, the lowest first:\n"}
_TAIL_CHARS = 64

Path = tuple[int, ...]


def labels_for(count: int) -> list[str]:
    """Return as many labels: single letters where they suffice, else pairs."""
    if count <= len(_LETTERS):
        return list(_LETTERS[:count])
    return [_LETTERS[at // len(_LETTERS)] + _LETTERS[at % len(_LETTERS)] for at in range(count)]


def asked(question: Question) -> list[Any]:
    """The question's turn: texts, and images where the instructions have some."""
    labels = labels_for(len(question.options))
    lines = "\n".join(map(_line, labels, question.options))
    how = "one letter" if len(labels[0]) == 1 else "two letters"
    end = f"\n{_LISTED[question.kind]}{lines}\n\nAnswer with {how} and nothing else."
    parts: list[Any] = [f"{_HEADS[question.kind]}\n"]
    for part in [*question.instructions, end]:
        if isinstance(part, str) and isinstance(parts[-1], str):
            parts[-1] += f"\n{part}"
        else:
            parts.append(part)
    return parts


def _line(label: str, option: Option) -> str:
    return f"{label}: {option.text}" + (f" ({option.description})" if option.description else "")


def with_question(messages: Sequence[dict[str, Any]], question: Question) -> list[dict[str, Any]]:
    """The conversation with the question as its end: behind what a user said last, since many templates want turns to
    alternate, else as a turn of its own."""
    turn = asked(question)
    last = messages[-1]
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": turn}]
    return [*messages[:-1], {**last, "content": [*last["content"], "", *turn]}]


def label_paths(
    count: int,
    text: str,
    marks: Sequence[str],
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
) -> list[Path]:
    """The tokens of each of ``count`` labels behind a prompt that ends with ``text``.

    Only the prompt's end is encoded: from the last of ``marks`` on, the tokens at which text is always cut. Where a
    label behind it would cut it otherwise (two newlines by GPT-2's rule), the model, which reads the prompt as it is,
    writes the label's own tokens. Raises FieldError where the vocabulary does not tell the labels apart.
    """
    end = text[-_TAIL_CHARS:]
    at = max((end.rfind(mark) for mark in marks), default=-1)
    end = end[max(at, 0) :]
    before, paths = encode(end), list[Path]()
    for label in labels_for(count):
        ids, own = encode(end + label), encode(label)
        if ids[: len(before)] != before and decode(before + own) == decode(before) + label:
            ids = before + own
        paths.append(tuple(ids[len(before) :]) if ids[: len(before)] == before else ())
    beginnings = {path[:length] for path in paths for length in range(1, len(path))}
    if not all(paths) or len(set(paths)) < count or beginnings & set(paths):
        raise FieldError(
            f"the model's vocabulary does not tell {count} labels (A, B, ...) apart behind its chat template; ask with "
            "fewer options, or another model",
            "model",
        )
    return paths
