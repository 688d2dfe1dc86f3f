"""Turn a body of the Messages API into the conversation of all dialects, and into a request for the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from octavo.chat.answer import AnswerParser
from octavo.chat.messages import Conversation, FieldNames
from octavo.chat.render import Rendered
from octavo.chat.structured import Constraint, make_constraint
from octavo.entrypoints.anthropic.protocol import (
    AssistantMessage,
    ChoiceTool,
    CountTokensRequest,
    HostedToolParam,
    ImageBlockParam,
    InputMessage,
    MessagesRequest,
    TextBlockParam,
    ThinkingBlockParam,
    ToolParam,
    ToolReferenceBlockParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
    UrlSourceParam,
    UserMessage,
)
from octavo.entrypoints.dialect import CheckedRequest, Prepared
from octavo.entrypoints.errors import bad_request, shown
from octavo.entrypoints.generation.chat import count_prompt, prepare_chat, read_messages
from octavo.entrypoints.generation.context import in_words_of, naming
from octavo.entrypoints.generation.run import PromptOptions, TokenLimit, TopLogprobs, external_id, sampling_params
from octavo.multimodal.items import ImagePart
from octavo.text.messages import without_billing

_OPTIONS = PromptOptions(add_special_tokens=False)
_FIELDS = FieldNames(function="", parameters="input_schema", choice="tool_choice.name", required="any")


@dataclass
class PreparedMessage(Prepared[MessagesRequest]):
    """A conversation that is ready for the engine. ``id``: of the message that answers it."""

    id: str
    rendered: Rendered

    def new_parser(self) -> AnswerParser:
        """Make a parser of the answer."""
        thinking = self.body.thinking
        return self.rendered.new_parser(thinking is None or thinking.display != "omitted")


async def prepare(checked: CheckedRequest[MessagesRequest]) -> PreparedMessage:
    """Prepare the answer to a conversation. Raises ValueError, APIError."""
    state, body = checked.state, checked.body
    message_id = external_id(checked.http, "msg", between="_")
    conversation = conversation_of(body)
    body.messages = []  # images are not kept as long as the answer takes
    conversation.messages = await read_messages(state, conversation.messages)
    # Agents ask for a fixed number of tokens, however long the conversation has become: the answer gets what is left.
    limit = TokenLimit(body.max_tokens, clamps=True)
    with naming({"stop": "stop_sequences"}):
        params = sampling_params(state, body.sampling_fields(), limit, TopLogprobs(None), bool(body.stream))
    # Agents shorten the conversation when they read these words.
    with in_words_of("messages", "prompt is too long: it has"):
        request, rendered = await prepare_chat(
            state, conversation, params, _OPTIONS, limit, partial(constraint_of, body)
        )
    return PreparedMessage(checked, [request], message_id, rendered)


async def count_tokens(checked: CheckedRequest[CountTokensRequest]) -> int:
    """Count the tokens of a conversation's prompt. Raises ValueError, APIError."""
    conversation = conversation_of(checked.body)
    conversation.messages = await read_messages(checked.state, conversation.messages)
    find_constraint = partial(constraint_of, checked.body)
    return len(await count_prompt(checked.state, conversation, _OPTIONS, find_constraint))


def conversation_of(body: CountTokensRequest) -> Conversation:
    """The conversation, its messages not checked yet."""
    messages = [message for at, given in enumerate(body.messages) for message in messages_of(given, f"messages.{at}")]
    if told := without_billing([block.text for block in body.system or []]):
        messages.insert(0, {"role": "system", "content": "\n".join(told)})
    choice, thinking = body.tool_choice, body.thinking
    variables = {"enable_thinking": thinking.type != "disabled"} if thinking is not None else None
    return Conversation(
        messages,
        _tools(body.tools or []) or None,
        _tool_choice(choice),
        False if choice is not None and choice.disable_parallel_tool_use else None,
        reasoning_effort=body.output_config.effort if body.output_config is not None else None,
        chat_template_kwargs=variables,
        continue_final_message=_begins_answer(body.messages[-1]),
        fields=replace(_FIELDS, tools=_paths(body.tools or [])),
    )


def constraint_of(body: CountTokensRequest) -> Constraint | None:
    """The form of the answer. Raises APIError naming the field."""
    config = body.output_config
    if config is not None and config.format is not None:
        asked, field = config.format, "output_config.format"
        if body.output_format is not None:
            raise bad_request("output_format is the older name of output_config.format: send one", "output_format")
    elif body.output_format is not None:
        asked, field = body.output_format, "output_format"
    else:
        return None
    constraint = make_constraint(f"{field}.schema", json=json.dumps(asked.schema_))
    constraint.allows_calls = True
    return constraint


def messages_of(message: InputMessage, where: str) -> list[dict[str, Any]]:
    """One message as those of a chat: each tool's result is one of its own there. ``where`` is its field."""
    if isinstance(message, AssistantMessage):
        return [_answer(message)]
    if not isinstance(message, UserMessage):
        return [{"role": message.role, "content": _joined(message.content)}]
    found: list[dict[str, Any]] = []
    said: list[str | ImagePart] = []
    for at, block in enumerate(message.content):
        if isinstance(block, ToolResultBlockParam):
            if said:
                found.append({"role": "user", "content": _content(said)})
                said = []
            parts = [_part(part, f"{where}.content.{at}.content.{i}") for i, part in enumerate(block.content or [])]
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(parts)})
        else:
            said.append(_part(block, f"{where}.content.{at}"))
    if said or not found:
        found.append({"role": "user", "content": _content(said)})
    return found


def _part(block: TextBlockParam | ImageBlockParam | ToolReferenceBlockParam, where: str) -> str | ImagePart:
    """A part of a chat. ``where`` is the block's field."""
    if not isinstance(block, ImageBlockParam):
        return block.text
    if isinstance(block.source, UrlSourceParam):
        return ImagePart(f"{where}.source.url", block.source.url)
    return ImagePart(f"{where}.source.data", block.source.data, is_base64=True)


def _content(parts: list[str | ImagePart]) -> str | list[str | ImagePart]:
    """A text, or with images parts."""
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _answer(message: AssistantMessage) -> dict[str, Any]:
    blocks = message.content
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": _joined([block for block in blocks if isinstance(block, TextBlockParam)]),
    }
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlockParam)]:
        answer["reasoning_content"] = "\n".join(thoughts)
    if calls := [block for block in blocks if isinstance(block, ToolUseBlockParam)]:
        answer["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return answer


def _begins_answer(last: InputMessage) -> bool:
    """Tell whether the answer goes on with the last message: it is text of the assistant."""
    return (
        isinstance(last, AssistantMessage)
        and any(isinstance(block, TextBlockParam) and block.text for block in last.content)
        and not any(isinstance(block, ToolUseBlockParam) for block in last.content)
    )


def _joined(blocks: Sequence[TextBlockParam | ToolReferenceBlockParam]) -> str:
    return "\n".join(block.text for block in blocks)


def _tools(tools: Sequence[ToolParam | HostedToolParam]) -> list[dict[str, Any]]:
    """The client's tools. Those of Anthropic's servers are left out beside them: agents add them to their requests, and
    a model that is not told of a tool does not miss it. Alone they are refused. Raises APIError."""
    found = [_tool(tool) for tool in tools if isinstance(tool, ToolParam)]
    if tools and not found:
        raise bad_request(
            f"tools.0.type {shown(tools[0].type)} is not supported: this server does not run tools; send tools of the "
            "client",
            "tools.0.type",
        )
    return found


def _paths(tools: Sequence[ToolParam | HostedToolParam]) -> list[str]:
    return [f"tools.{number}" for number, tool in enumerate(tools) if isinstance(tool, ToolParam)]


def _tool(tool: ToolParam) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _tool_choice(choice: Any) -> Any:
    if choice is None:
        return None
    if isinstance(choice, ChoiceTool):
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
