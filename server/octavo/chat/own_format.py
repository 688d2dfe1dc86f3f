"""Read the format of answers from a model's own ``response_template``, where a flag asks for it or no row fits."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.chat.options import AUTO, HF, ChatOptions, ResponseFormat
from octavo.chat.thoughts import thoughts_of
from octavo.chat.tools.choice import knows_tools, own_format
from octavo.chat.tools.formats.response_template import response_format
from octavo.chat.tools.harmony import speaks_harmony
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_FILE = "tokenizer_config.json"


def with_response_template(options: ChatOptions, tokenizer: Tokenizer | None) -> ChatOptions:
    """The options with the formats of the model's ``response_template`` where a parser is "hf", or is left to the chat
    template and that shows none. Raises ConfigError if a parser is "hf" and the model has no such format."""
    calls, thoughts = options.tool_call_parser, options.reasoning_parser
    told = None if tokenizer is None else tokenizer.config.get("response_template")
    found = ResponseFormat(None, None)
    why = f"{_FILE} has none"
    if told is not None:
        try:
            found, why = response_format(told), ""
        except ValueError as error:
            why = str(error)
            logger.warning("response_template in %s is not used: %s", _FILE, error)
    elif tokenizer is not None and "response_schema" in tokenizer.config:
        why = f"{_FILE} has the older response_schema alone, which is not read"
        logger.info("response_schema in %s is not used: only response_template is", _FILE)
    for flag, value, own, what in (
        ("tool_call_parser", calls, found.row, "tool_calls"),
        ("reasoning_parser", thoughts, found.tags, "thinking"),
    ):
        if value == HF and own is None:
            why = why or f"it has no field {what}"
            raise ConfigError(
                f"{flag} hf takes the format of the model's response_template, and {why}; leave {flag} out, or name "
                "another format"
            )
    if tokenizer is None or (found.row is None and found.tags is None):
        return options
    with suppress(ValueError):  # the model has no chat template
        template = tokenizer.get_chat_template(options.chat_template, tools=True)
        if not speaks_harmony(options, template):
            if calls in (None, AUTO) and found.row is not None and knows_tools(template) and not own_format(template):
                calls = HF
            if thoughts in (None, AUTO) and found.tags is not None and thoughts_of(template).tags is None:
                thoughts = HF
    for what, value in (("calls", calls), ("thoughts", thoughts)):
        if value == HF:
            logger.info("chat template: %s are as the model's response_template says", what)
    return replace(options, tool_call_parser=calls, reasoning_parser=thoughts, response=found)
