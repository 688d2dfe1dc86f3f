"""Separates reasoning from the answer while both are generated. Pure."""

from __future__ import annotations

BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """Splits ``<think>reasoning</think>answer``; the parts do not depend on how the text is cut into pieces.

    ``inside``: the text begins inside the reasoning, because the prompt ended with the opening tag. White space around
    the tags belongs to neither part.
    """

    def __init__(self, inside: bool) -> None:
        self._thinking: bool | None = True if inside else None  # None: not known yet
        self._may_open = True  # the opening tag may come next
        self._answering = False
        self._text = ""
        self._answer_begun = False

    def feed(self, text: str) -> tuple[str, str]:
        """New text as (reasoning, answer), as far as it is certain."""
        self._text += text
        return self._split(ended=False)

    def finish(self) -> tuple[str, str]:
        """What was held back, as (reasoning, answer), now that the text has ended."""
        return self._split(ended=True)

    def _split(self, ended: bool) -> tuple[str, str]:
        if self._may_open and not self._read_opening(ended):
            return "", ""
        reasoning = self._read_reasoning(ended) if self._thinking else ""
        if self._thinking:
            return reasoning, ""
        answer, self._text = self._text, ""
        if self._answering and not self._answer_begun:
            answer = answer.lstrip()
            self._answer_begun = bool(answer)
        return reasoning, answer

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

    def _read_reasoning(self, ended: bool) -> str:
        end = self._text.find(END)
        if end != -1:
            reasoning, self._text = self._text[:end].rstrip(), self._text[end + len(END) :]
            self._thinking, self._answering = False, True
            return reasoning
        if ended:
            reasoning, self._text = self._text, ""
            return reasoning.rstrip()
        hold = next((n for n in range(len(END) - 1, 0, -1) if self._text.endswith(END[:n])), 0)
        reasoning = self._text[: len(self._text) - hold].rstrip()
        self._text = self._text[len(reasoning) :]
        return reasoning


# vLLM's names -> whether output begins inside the reasoning if neither the prompt nor the text says so. The reasoning
# of openai_gptoss is split off together with its tool calls (tools.parsers.harmony).
REASONING_PARSERS = {"deepseek_r1": True, "openai_gptoss": False, "qwen3": False}


def begins_inside_reasoning(name: str, prompt_end: str) -> bool:
    """Whether the output for a prompt with this end begins inside the reasoning."""
    prompt_end = prompt_end.rstrip()
    if prompt_end.endswith(BEGIN):
        return True
    return REASONING_PARSERS[name] and not prompt_end.endswith(END)
