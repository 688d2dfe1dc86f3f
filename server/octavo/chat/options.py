"""Options of chats, for a server or an `LLM`: how conversations become prompts and how answers are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STRICT_LEVELS = ("auto", "function", "parameter")
PRESERVE = ("auto", "always", "never")
# Values of flags: as the chat template shows; not at all; as the model's own response_template says.
AUTO, NONE, HF = "auto", "none", "hf"


@dataclass(frozen=True)
class ResponseFormat:
    """The format of answers that a model's ``response_template`` tells."""

    row: Any  # the `Format` of its calls, or None
    tags: Any  # the `ThoughtTags`, or None


@dataclass(frozen=True)
class ChatOptions:
    """The flags of `octavo serve` of the same names."""

    chat_template: str | None = None  # the template itself; None: the model's own
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    exclude_tools_when_tool_choice_none: bool = False
    tool_call_parser: str | None = None  # None, "auto": the format that the chat template shows; "none": no calls
    enable_auto_tool_choice: bool = True
    strict_json_schema: bool = True
    tool_strict_level: str = "auto"  # calls that a grammar holds where the model is free to call, see STRICT_LEVELS
    reasoning_budget_message: str = ""  # that the model reads where the budget of its thoughts is used up
    preserve_reasoning: str = (
        AUTO  # thoughts of earlier turns in prompts, of PRESERVE; auto: unless a request drops them
    )
    reasoning_parser: str | None = None  # None, "auto": the tags that the chat template shows; "none": no thoughts

    response: ResponseFormat | None = None  # of the model's response_template, where a flag is "hf": no flag itself

    @property
    def call_format(self) -> Any:
        """The format of calls that a flag says, or its name; None: the chat template tells."""
        if self.tool_call_parser == HF and self.response is not None:
            return self.response.row
        return None if self.tool_call_parser in (AUTO, NONE) else self.tool_call_parser

    @property
    def thought_format(self) -> Any:
        """The tags of thoughts, or their name, that a flag says; None: the chat template tells."""
        if self.reasoning_parser == HF and self.response is not None:
            return self.response.tags
        return self.reasoning_parser

    @property
    def reads_calls(self) -> bool:
        """False if calls stay in the text of an answer."""
        return self.tool_call_parser != NONE
