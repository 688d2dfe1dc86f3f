"""The prompts of questions: one conversation, its end another for each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from octavo.chat.decisions.questions import Question
from octavo.chat.decisions.wording import Path, asked, label_paths, with_question
from octavo.chat.messages import Conversation, check_messages
from octavo.chat.render import Rendered
from octavo.errors import FieldError
from octavo.interface.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

_FINAL = "<|channel|>final<|message|>"  # harmony: the answer begins
_ACTIVE = frozenset("<[|{")  # a template may read marks in a text


@dataclass(frozen=True)
class QuestionPrompt:
    """A question's prompt, and the tokens of its labels behind it."""

    rendered: Rendered
    ids: list[int]
    labels: list[Path]


@dataclass(frozen=True)
class Renderer:
    """Renders a conversation as an engine does, and encodes its text. ``naming`` has errors name the question of that
    number."""

    render: Callable[[Conversation], Rendered]
    tokenize: Callable[[str], list[int]]
    tokenizer: Tokenizer
    naming: Callable[[int], AbstractContextManager[None]]

    def prompts(self, messages: Sequence[dict[str, Any]], questions: Sequence[Question]) -> list[QuestionPrompt]:
        """The prompt of each question about the conversation. Raises FieldError."""
        marks = [token.content for token in self.tokenizer.backend.get_added_tokens_decoder().values()]
        known = dict[tuple[str, int], list[Path]]()
        prompts = list[QuestionPrompt]()
        for rendered in self._rendered(messages, questions):
            if rendered.inside_reasoning:
                raise FieldError(
                    "the model thinks before each answer, and its chat template has no way to leave that out: "
                    "decisions need another model",
                    "model",
                )
            ids, text = rendered.ids, rendered.text or ""
            if rendered.harmony:
                ids, text = [*ids, *self._encode(_FINAL)], text + _FINAL
            count = len(questions[len(prompts)].options)
            end = text[-64:], count
            if end not in known:
                known[end] = label_paths(count, text, marks, self._encode, self._decode)
            prompts.append(QuestionPrompt(rendered, ids, known[end]))
        return prompts

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.backend.decode(ids, skip_special_tokens=False)
        return text

    def _rendered(self, messages: Sequence[dict[str, Any]], questions: Sequence[Question]) -> list[Rendered]:
        """The conversation with each question. Where the second one shows that a question stands in the prompt as it
        is, the template need not run for the others: their texts are put in its place."""
        found = [self._whole(messages, question, at) for at, question in enumerate(questions[:2])]
        around = _around([rendered.text or "" for rendered in found], questions)
        for at, question in enumerate(questions[2:], 2):
            turn = _text_of(question)
            if around is None or turn is None:
                found.append(self._whole(messages, question, at))
                continue
            with self.naming(at):
                text = turn.join(around)
                found.append(replace(found[0], text=text, ids=self.tokenize(text)))
        return found

    def _whole(self, messages: Sequence[dict[str, Any]], question: Question, at: int) -> Rendered:
        read = check_messages(with_question(messages, question), lambda part, where: part)
        with self.naming(at):
            return self.render(Conversation(read, thinking=False))


def _text_of(question: Question) -> str | None:
    """The question's turn where it is a text that no template reads as anything else."""
    turn = asked(question)
    return turn[0] if len(turn) == 1 and not _ACTIVE & set(turn[0]) else None


def _around(texts: Sequence[str], questions: Sequence[Question]) -> tuple[str, str] | None:
    """Return what stands before and behind the question in both prompts. None: they do not show it."""
    if len(questions) < 3:
        return None
    first, second = map(_text_of, questions[:2])
    if first is None or second is None or texts[0].count(first) != 1:
        return None
    before, behind = texts[0].split(first)
    return (before, behind) if texts[1] == before + second + behind else None


def prompt_for_engine(prompt: QuestionPrompt, ids: list[int], images: Sequence[Any], shared: int) -> Any:
    """The prompt of a read, with the ``ids`` of a label's beginning behind it. ``shared``: tokens at its beginning that
    those of all questions have, behind which a recurrent model keeps its state."""
    found: dict[str, Any] = {"prompt_token_ids": ids}
    if images:
        found["multi_modal_data"] = {"image": images}
    if shared and prompt.rendered.boundaries:
        found["boundaries"] = [shared]
    return found if len(found) > 1 else ids


def num_shared(prompts: Sequence[QuestionPrompt]) -> int:
    """Tokens with which all prompts begin; 0 for a single one."""
    if len(prompts) < 2:
        return 0
    columns = zip(*(prompt.ids for prompt in prompts), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def read_params(token_ids: Sequence[int]) -> SamplingParams:
    """The parameters of a read: one token, which nobody looks at, and the log-probabilities of ``token_ids``."""
    return SamplingParams(
        temperature=0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        logprob_token_ids=list(token_ids),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
