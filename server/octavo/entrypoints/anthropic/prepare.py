"""Turn a body of the Messages API into the conversation of all dialects, and into a request for the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from octavo.chat.answer import AnswerParser
from octavo.chat.breakpoints import Keep, Marked
from octavo.chat.earlier_thoughts import earlier_thoughts_of
from octavo.chat.messages import Conversation, FieldNames
from octavo.chat.render import Rendered
from octavo.chat.structured import Constraint, make_constraint
from octavo.entrypoints.anthropic import editing
from octavo.entrypoints.anthropic.breakpoints import marked, seconds_of
from octavo.entrypoints.anthropic.diagnostics import Diagnosis, diagnose, fingerprint_of
from octavo.entrypoints.anthropic.messages import messages_of
from octavo.entrypoints.anthropic.protocol import (
    AssistantMessage,
    ChoiceTool,
    ClearThinking,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    SystemMessage,
    TextBlockParam,
    ToolUseBlockParam,
    UserMessage,
)
from octavo.entrypoints.anthropic.tools import Tools
from octavo.entrypoints.dialect import CheckedRequest, Prepared
from octavo.entrypoints.errors import bad_request
from octavo.entrypoints.generation.chat import check_all, count_prompt, prepare_chat, read_messages
from octavo.entrypoints.generation.context import in_words_of, is_too_long, naming
from octavo.entrypoints.generation.run import PromptOptions, TokenLimit, TopLogprobs, external_id, sampling_params
from octavo.entrypoints.lora.served import current_adapter
from octavo.entrypoints.sealing import Seal
from octavo.entrypoints.state import ServerState

_OPTIONS = PromptOptions(add_special_tokens=False)
_FIELDS = FieldNames(function="", parameters="input_schema", choice="tool_choice.name", required="any")


class AppliedEdit(Struct):
    """The number of things that an edit of the conversation has cleared."""

    type: str
    cleared_input_tokens: int
    cleared_tool_uses: int | UnsetType = UNSET
    cleared_thinking_turns: int | UnsetType = UNSET


@dataclass
class PreparedMessage(Prepared[MessagesRequest]):
    """A conversation that is ready for the engine. ``id``: of the message that answers it."""

    id: str
    rendered: Rendered
    edits: list[AppliedEdit]
    diagnosis: Diagnosis | None

    @property
    def omits_thoughts(self) -> bool:
        """The client wants to see no reasoning, and gets it sealed."""
        thinking = self.body.thinking
        return thinking is not None and thinking.display == "omitted"

    @property
    def only_warms(self) -> bool:
        """The client wants the prompt computed, and no answer."""
        return self.body.max_tokens == 0

    def new_parser(self) -> AnswerParser:
        """Make a parser of the answer."""
        return self.rendered.new_parser()


async def prepare(checked: CheckedRequest[MessagesRequest]) -> PreparedMessage:
    """Prepare the answer to a conversation. Raises ValueError, APIError."""
    state, body = checked.state, checked.body
    message_id = external_id(checked.http, "msg", between="_")
    conversation, edits = await _edited(checked)
    conversation.keep = await _kept(checked, any(edit.cleared_tool_uses for edit in edits))
    adapter = current_adapter.get()
    model = state.model_name if adapter is None else adapter.name
    now = fingerprint_of(body, model) if body.diagnostics is not None else None
    body.messages = []  # images are not kept as long as the answer takes
    # Agents ask for a fixed number of tokens, however long the conversation has become: the answer gets what is left.
    limit = TokenLimit(max(1, body.max_tokens), clamps=True)
    with naming({"stop": "stop_sequences"}):
        params = sampling_params(state, body.sampling_fields(), limit, TopLogprobs(None), bool(body.stream))
    # Agents shorten the conversation when they read these words.
    with in_words_of("messages", "prompt is too long: it has"):
        request, rendered = await prepare_chat(
            state, conversation, params, _OPTIONS, limit, partial(constraint_of, body)
        )
    diagnosis = None
    if now is not None and body.diagnostics is not None:
        now.tokens = len(request.prompt_token_ids)
        diagnosis = await diagnose(state, body.diagnostics.previous_message_id, message_id, now)
    return PreparedMessage(checked, [request], message_id, rendered, edits, diagnosis)


async def count_tokens(checked: CheckedRequest[CountTokensRequest]) -> tuple[int, int]:
    """Count the tokens of a conversation's prompt, and those that it would have without edits. Raises ValueError,
    APIError."""
    conversation, edits = await _edited(checked)
    count = len(await count_prompt(checked.state, conversation, _OPTIONS, partial(constraint_of, checked.body)))
    return count, count + sum(edit.cleared_input_tokens for edit in edits)


async def _edited(checked: CheckedRequest[Any]) -> tuple[Conversation, list[AppliedEdit]]:
    """The checked conversation, and what edits have cleared of it."""
    conversation, edits = await _without_results(checked)
    edit = _thoughts_edit(checked.body)
    if edit is None or conversation.keeps_thoughts is not False or not _can_drop_thoughts(checked.state, conversation):
        return conversation, edits
    gone = editing.earlier_thoughts(conversation.messages)
    length, after = await _lengths(checked, replace(conversation, keeps_thoughts=True), conversation, gone)
    told = [AppliedEdit(edit.type, length - after, cleared_thinking_turns=len(gone))] if length > after else []
    return conversation, [*told, *edits]


def _can_drop_thoughts(state: ServerState, conversation: Conversation) -> bool:
    """False if the prompt is the same whether earlier thoughts are wanted or not."""
    tokenizer, options = state.engine.tokenizer, state.chat_options
    if tokenizer is None:
        return False
    template = tokenizer.get_chat_template(options.chat_template, tools=bool(conversation.tools))
    found, preserve = earlier_thoughts_of(template, options.thought_format), options.preserve_reasoning
    return found.variables(preserve, True) != found.variables(preserve, False)


async def _lengths(
    checked: CheckedRequest[Any], whole: Conversation, edited: Conversation, cleared: Sequence[str]
) -> tuple[int, int]:
    """The tokens of a conversation's prompt, and those without ``cleared`` texts. Raises ValueError."""
    state, find_constraint = checked.state, partial(constraint_of, checked.body)
    after = len(await count_prompt(state, edited, _OPTIONS, find_constraint))
    try:
        return len(await count_prompt(state, whole, _OPTIONS, find_constraint)), after
    except ValueError as error:
        if not is_too_long(error):
            raise
        tokenize = state.engine.input_processor.tokenize  # piece by piece: all of it is more than the model takes
        return after + sum(len(tokenize(text, False, -1)) for text in cleared), after


async def _without_results(checked: CheckedRequest[Any]) -> tuple[Conversation, list[AppliedEdit]]:
    """The checked conversation without old results of tools."""
    body = checked.body
    edit = body.context_management.tool_edit if body.context_management is not None else None
    whole = await _read(checked)
    if edit is None:
        return whole, []
    trigger = edit.trigger.value if edit.trigger is not None else editing.TRIGGER
    by_calls = edit.trigger is not None and edit.trigger.type == "tool_uses"
    if by_calls and editing.num_tool_uses(body.messages) <= trigger:
        return whole, []
    before = body.messages
    cleared = editing.clear_tool_uses(before, edit)
    if not cleared.texts:
        return whole, []
    body.messages = cleared.messages
    try:
        edited = await _read(checked)
    finally:
        body.messages = before
    length, after = await _lengths(checked, whole, edited, cleared.texts)
    least = edit.clear_at_least.value if edit.clear_at_least is not None else 0
    if (not by_calls and length <= trigger) or length - after < least:
        return whole, []
    return edited, [AppliedEdit(edit.type, max(0, length - after), len(cleared.texts))]


async def _kept(checked: CheckedRequest[MessagesRequest], is_edited: bool) -> Keep | None:
    """The parts of the prompt that are to be found again. Raises APIError."""
    state, body = checked.state, checked.body
    edit = body.context_management.tool_edit if body.context_management is not None else None
    if is_edited and edit is not None:
        body = body.model_copy(update={"messages": editing.clear_tool_uses(body.messages, edit).messages})
    copy, seconds = marked(body)
    whole = seconds_of(body.cache_control) if body.cache_control is not None else 0.0
    if not seconds:
        return Keep(whole=whole) if whole else None
    found = conversation_of(copy, state.seal, state.args.deferred_tools == "top")
    return Keep(Marked(await check_all(state, found.messages), found.listed, seconds), whole)


async def _read(checked: CheckedRequest[Any]) -> Conversation:
    state = checked.state
    conversation = conversation_of(checked.body, state.seal, state.args.deferred_tools == "top")
    conversation.messages = await read_messages(state, conversation.messages)
    if (edit := _thoughts_edit(checked.body)) is not None:
        most = edit.num_turns
        conversation.keeps_thoughts = most is None or editing.num_thinking_turns(conversation.messages) <= most
    return conversation


def _thoughts_edit(body: CountTokensRequest) -> ClearThinking | None:
    return body.context_management.thoughts_edit if body.context_management is not None else None


def conversation_of(body: CountTokensRequest, seal: Seal, lists_all: bool = False) -> Conversation:
    """The conversation, its messages not checked yet. ``lists_all``: see `Tools`. Raises APIError."""
    tools = Tools(body.tools or [], lists_all)
    messages = messages_of(body.messages, tools, seal)
    if body.system:
        messages.insert(0, {"role": "system", "content": [block.text for block in body.system]})
    choice, thinking = body.tool_choice, body.thinking
    return Conversation(
        messages,
        tools.functions or None,
        _tool_choice(choice),
        False if choice is not None and choice.disable_parallel_tool_use else None,
        reasoning_effort=_effort(body),
        thinking=None if thinking is None else thinking.type in ("enabled", "adaptive"),
        continue_final_message=_begins_answer(body.messages[-1]),
        budget=thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None,
        budget_is_hint=True,
        listed=tools.listed,
        fields=replace(_FIELDS, tools=tools.paths),
    )


def _effort(body: CountTokensRequest) -> str | None:
    """The effort of the turn, which instructions since the user's last message set, or of the request."""
    for message in reversed(body.messages):
        if isinstance(message, UserMessage):
            break
        if isinstance(message, SystemMessage) and message.output_config is not None and message.output_config.effort:
            return message.output_config.effort
    return body.output_config.effort if body.output_config is not None else None


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


def _begins_answer(last: InputMessage) -> bool:
    """Tell whether the answer goes on with the last message: it is text of the assistant."""
    return (
        isinstance(last, AssistantMessage)
        and any(isinstance(block, TextBlockParam) and block.text for block in last.content)
        and not any(isinstance(block, ToolUseBlockParam) for block in last.content)
    )


def _tool_choice(choice: Any) -> Any:
    if choice is None:
        return None
    if isinstance(choice, ChoiceTool):
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
