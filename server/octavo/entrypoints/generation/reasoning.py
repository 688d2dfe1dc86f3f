"""The thoughts that some models write before their answer, told from it while they are written. Pure."""

from __future__ import annotations

BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """Splits ``<think>thoughts</think>answer``; however the text is cut, the parts add up to the same.

    ``inside``: the text begins among the thoughts, because the prompt ended with the opening tag. White space around
    the tags belongs to neither part.
    """

    def __init__(self, inside: bool) -> None:
        self._thinking: bool | None = True if inside else None  # None: not known yet
        self._may_open = True  # the opening tag may come next
        self._answering = False
        self._text = ""
        self._answer_begun = False

    def feed(self, text: str) -> tuple[str, str]:
        """New text as (thoughts, answer), as far as it is certain."""
        self._text += text
        return self._split(ended=False)

    def finish(self) -> tuple[str, str]:
        return self._split(ended=True)

    def _split(self, ended: bool) -> tuple[str, str]:
        if self._may_open and not self._read_opening(ended):
            return "", ""
        thoughts = self._read_thoughts(ended) if self._thinking else ""
        if self._thinking:
            return thoughts, ""
        answer, self._text = self._text, ""
        if self._answering and not self._answer_begun:
            answer = answer.lstrip()
            self._answer_begun = bool(answer)
        return thoughts, answer

    def _read_opening(self, ended: bool) -> bool:
        """Whether it is known by now if the text begins with the tag."""
        visible = self._text.lstrip()
        if visible.startswith(BEGIN):
            self._thinking = True
            self._text = visible[len(BEGIN) :].lstrip()
            if not self._text and not ended:
                self._text = BEGIN  # the space behind the tag may go on
                return False
        elif BEGIN.startswith(visible) and not ended:
            return False
        elif self._thinking:
            self._text = visible
        else:
            self._thinking = False
        self._may_open = False
        return True

    def _read_thoughts(self, ended: bool) -> str:
        end = self._text.find(END)
        if end != -1:
            thoughts, self._text = self._text[:end].rstrip(), self._text[end + len(END) :]
            self._thinking, self._answering = False, True
            return thoughts
        if ended:
            thoughts, self._text = self._text, ""
            return thoughts.rstrip()
        hold = next((n for n in range(len(END) - 1, 0, -1) if self._text.endswith(END[:n])), 0)
        thoughts = self._text[: len(self._text) - hold].rstrip()
        self._text = self._text[len(thoughts) :]
        return thoughts


# vLLM's names -> whether thoughts are taken to have begun when neither the prompt nor the text says so.
REASONING_PARSERS = {"deepseek_r1": True, "qwen3": False}


def begins_inside(name: str, prompt_end: str) -> bool:
    """Whether the answer to a prompt that ends so begins among the thoughts."""
    prompt_end = prompt_end.rstrip()
    if prompt_end.endswith(BEGIN):
        return True
    return REASONING_PARSERS[name] and not prompt_end.endswith(END)
