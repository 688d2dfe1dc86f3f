"""The limit of a model's thoughts, as a request asks for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ThoughtBudget:
    """Tokens that an answer's thoughts may take; what ends them then is appended as if the model had said it."""

    num_tokens: int
    closing: list[int]  # tokens that end the thoughts: a message, if any, and the closing tag
    ends: list[int]  # tokens of the closing tag
    begins: list[int]  # tokens of the opening tag; none: the prompt has opened the thoughts
