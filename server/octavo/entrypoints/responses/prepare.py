"""Turn items of the Responses API into the conversation of all dialects, and into a request for the engine."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from octavo.chat.breakpoints import Keep, Marked
from octavo.chat.messages import Conversation, FieldNames
from octavo.chat.render import Rendered
from octavo.chat.structured import Constraint, make_constraint, schema_constraint
from octavo.chat.tools.told import described, offered
from octavo.entrypoints.dialect import CheckedRequest, Prepared
from octavo.entrypoints.errors import bad_request, shown
from octavo.entrypoints.fields.prompt_cache import whole_seconds
from octavo.entrypoints.fields.values import with_verbosity
from octavo.entrypoints.generation.chat import check_all, count_prompt, prepare_chat, read_messages
from octavo.entrypoints.generation.context import in_words_of, naming, without_oldest_that_fits
from octavo.entrypoints.generation.run import PromptOptions, TokenLimit, TopLogprobs, external_id, sampling_params
from octavo.entrypoints.replica import elsewhere, new_id
from octavo.entrypoints.responses.breakpoints import marked
from octavo.entrypoints.responses.items import ResponseObject
from octavo.entrypoints.responses.protocol import (
    AdditionalToolsParam,
    AllowedToolsParam,
    CallOutputParam,
    CustomCallParam,
    FunctionCallParam,
    HostedToolParam,
    ImagePartParam,
    InputTokensRequest,
    Item,
    ItemReferenceParam,
    JsonObjectFormatParam,
    JsonSchemaFormatParam,
    MessageParam,
    ReasoningParam,
    ReasoningTextParam,
    RefusalPartParam,
    ResponsesRequest,
    TextPartParam,
    ToolReferenceParam,
    ToolSearchCallParam,
    ToolSearchOutputParam,
    ToolSearchParam,
)
from octavo.entrypoints.responses.store import CONVERSATION, Turn, find, find_item, no_conversation, read_items
from octavo.entrypoints.responses.tools import SEARCH, Toolbox, custom_arguments, function_name, toolbox_of
from octavo.entrypoints.sealing import Seal
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.tenants import current_tenant
from octavo.interface.messages import EngineCoreRequest
from octavo.metrics.stats import Tenant
from octavo.multimodal.items import ImagePart
from octavo.text.messages import object_of

_OPTIONS = PromptOptions(add_special_tokens=False)
_IN_BACKGROUND = PromptOptions(add_special_tokens=False, priority=1)  # behind those that somebody waits for
_OF_CHATS = {"messages": "input"}
_INSTRUCTING = ("system", "developer")


@dataclass
class PreparedResponse(Prepared[ResponsesRequest]):
    """A conversation that is ready for the engine. ``id``, ``created``: of the response; ``tenant``: whose it is."""

    id: str
    created: int
    tenant: Tenant | None
    items: list[Item]
    tools: Toolbox
    rendered: Rendered

    def turn(self, response: ResponseObject, output: Sequence[Item]) -> Turn:
        """Return what the store keeps of the response. ``output``: its items."""
        conversation = self.body.conversation.id if self.body.conversation is not None else None
        return Turn(response, self.items, len(self.body.input), output, self.tenant, conversation)


async def prepare(checked: CheckedRequest[ResponsesRequest]) -> PreparedResponse:
    """Prepare the answer to a conversation. Raises ValueError, APIError."""
    state, body = checked.state, checked.body
    external_id(checked.http, "resp")  # claims a client's own; the response's cannot be chosen: it finds what is kept
    conversation, items, tools = await _read(checked)
    conversation.keep = await _kept(checked, items, tools)

    async def attempt(conversation: Conversation) -> tuple[EngineCoreRequest, Rendered]:
        limit = TokenLimit(body.max_output_tokens, "max_output_tokens")
        logprobs = TopLogprobs(body.num_logprobs, "top_logprobs")
        options = _IN_BACKGROUND if body.background else _OPTIONS
        stream = bool(body.stream or body.background)
        params = sampling_params(state, body.sampling_fields(), limit, logprobs, stream)
        with in_words_of("input"):
            return await prepare_chat(state, conversation, params, options, limit, partial(constraint_of, body))

    request, rendered = await (
        without_oldest_that_fits(conversation, attempt) if body.truncation == "auto" else attempt(conversation)
    )
    response_id = new_id("resp_", state.store_tag)
    created, tenant = int(time.time()), current_tenant.get()
    return PreparedResponse(checked, [request], response_id, created, tenant, items, tools, rendered)


async def count_tokens(checked: CheckedRequest[InputTokensRequest]) -> int:
    """Count the tokens of a conversation's prompt. Raises ValueError, APIError."""
    conversation, _, _ = await _read(checked)
    return len(await count_prompt(checked.state, conversation, _OPTIONS, partial(constraint_of, checked.body)))


async def _read(checked: CheckedRequest[Any]) -> tuple[Conversation, list[Item], Toolbox]:
    """The conversation, its messages checked, with its items and tools. Raises APIError."""
    body: InputTokensRequest = checked.body
    items = [opened(item, checked.state.seal) for item in await _items(checked.state, body)]
    lists_all = checked.state.args.deferred_tools == "top"
    tools = toolbox_of(body.tools, items, len(items) - len(body.input), lists_all)
    conversation = conversation_of(body, items, tools)
    with naming(_OF_CHATS):
        conversation.messages = await read_messages(checked.state, conversation.messages)
    return conversation, items, tools


async def _kept(checked: CheckedRequest[ResponsesRequest], items: list[Item], tools: Toolbox) -> Keep | None:
    """The parts of the prompt that are to be found again."""
    body = checked.body
    copies, seconds = marked(body, items)
    whole = whole_seconds(body, bool(seconds))
    if not seconds:
        return Keep(whole=whole) if whole else None
    found = conversation_of(body, copies, tools)
    with naming(_OF_CHATS):
        return Keep(Marked(await check_all(checked.state, found.messages), found.listed, seconds), whole)


async def _items(state: ServerState, body: InputTokensRequest) -> list[Item]:
    """Gather all items of the conversation. Raises APIError where an earlier response or item is not kept."""
    items, store, tenant = list[Item](), state.store, current_tenant.get()
    if (previous := body.previous_response_id) is not None:
        entry = await find(store, previous, tenant)
        if entry is None:
            why = elsewhere(previous, state.store_tag) or "it was not stored, has expired, or made room for others"
            raise bad_request(
                f"previous_response_id {shown(previous)} is not found: {why}; send the whole conversation as input",
                "previous_response_id",
                code="previous_response_not_found",
            )
        items += read_items([*entry.input, *entry.output])
    if body.conversation is not None:
        entry = await find(store, body.conversation.id, tenant, CONVERSATION)
        if entry is None:
            raise no_conversation(state, body.conversation.id, "conversation")
        items += read_items(entry.output)
    for number, item in enumerate(body.input):
        if not isinstance(item, ItemReferenceParam):
            items.append(item)
            continue
        found = await find_item(store, item.id, tenant)
        if found is None:
            raise bad_request(
                f"input.{number}: item {shown(item.id)} is not found; send the item itself", f"input.{number}"
            )
        items.append(found)
    return items


def conversation_of(body: InputTokensRequest, items: Sequence[Item], tools: Toolbox) -> Conversation:
    """The conversation of all ``items``, those of earlier responses too, its messages not checked yet."""
    choice = body.tool_choice
    if isinstance(choice, ToolReferenceParam):
        named: Any = {"type": "function", "function": {"name": tools.function_of(choice.name)}}
    elif isinstance(choice, AllowedToolsParam):
        allowed = [{"function": {"name": tools.function_of(tool.name)}} for tool in choice.tools]
        named = {"type": "allowed_tools", "mode": choice.mode, "tools": allowed}
    else:
        named = choice
    return Conversation(
        messages_of(items, body.instructions, len(items) - len(body.input), tools.told),
        tools.functions or None,
        named,
        body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        chat_template_kwargs=with_verbosity(body.text.verbosity if body.text else None, body.chat_template_kwargs),
        listed=tools.listed,
        fields=FieldNames("", choice="tool_choice.name", allowed="tool_choice", tools=tools.paths),
    )


def constraint_of(body: InputTokensRequest) -> Constraint | None:
    """The form of the answer. Raises APIError naming the field."""
    asked = body.text.format if body.text is not None else None
    if isinstance(asked, JsonSchemaFormatParam):
        constraint = schema_constraint({"schema": asked.schema_, "strict": asked.strict}, "text.format")
    elif isinstance(asked, JsonObjectFormatParam):
        constraint = make_constraint("text.format", json_object=True)
    else:
        return None
    constraint.allows_calls = True
    return constraint


def messages_of(
    items: Sequence[Item],
    instructions: str | None = None,
    earlier: int = 0,
    told: Mapping[int, Sequence[dict[str, Any]]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Items as messages of a chat: reasoning, text and calls that follow one another are one answer. The first
    ``earlier`` ones are of earlier responses; ``told`` as in `Toolbox`. Raises APIError naming the item.

    ``instructions`` and system messages at the beginning become one, since many templates take no more.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for at, item in enumerate(items):
        where = f"input.{at - earlier}" if at >= earlier else "previous_response_id"
        if isinstance(item, AdditionalToolsParam | ToolSearchOutputParam):
            messages += _tools_found(item, told.get(at, ()))
        elif isinstance(item, CallOutputParam):
            messages.append(
                {"role": "tool", "tool_call_id": item.call_id, "content": content_of(item.output, f"{where}.output")}
            )
        elif isinstance(item, MessageParam) and item.role != "assistant":
            if item.role in _INSTRUCTING and len(messages) == 1 and messages[0]["role"] in _INSTRUCTING:
                messages[0]["content"] += "\n\n" + text_of(item.content, f"{where}.content")
            else:
                messages.append({"role": item.role, "content": content_of(item.content, f"{where}.content")})
        else:
            _add_to_answer(messages, item, where)
    return messages


def _tools_found(
    item: AdditionalToolsParam | ToolSearchOutputParam, tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return what the prompt says of tools at the place of the item that brings them: a result, or instructions."""
    if isinstance(item, ToolSearchOutputParam) and item.call_id is not None:
        names = [tool.name for tool in item.tools if not isinstance(tool, ToolSearchParam | HostedToolParam)]
        text = described(tools) if tools else ", ".join(names)
        return [{"role": "tool", "tool_call_id": item.call_id, "content": text or "no tools"}]
    return [{"role": "developer", "content": offered(tools)}] if tools else []


def text_of(parts: Sequence[TextPartParam | ImagePartParam | RefusalPartParam], where: str) -> str:
    """The text of parts, whose field is ``where``. Raises APIError where there are images, which only users and tools
    send."""
    texts = content_of(parts, where)
    if isinstance(texts, str):
        return texts
    at = next(number for number, part in enumerate(parts) if isinstance(part, ImagePartParam))
    raise bad_request(
        f"{where}.{at}: input_image is for messages of users and outputs of calls; send it there", f"{where}.{at}"
    )


def content_of(parts: Sequence[TextPartParam | ImagePartParam | RefusalPartParam], where: str) -> str | list[Any]:
    """A text, or with images parts of a chat. ``where`` is the field of the parts."""
    found = [
        ImagePart(f"{where}.{number}.image_url", part.image_url)
        if isinstance(part, ImagePartParam)
        else (part.refusal if isinstance(part, RefusalPartParam) else part.text)
        for number, part in enumerate(parts)
    ]
    texts = [part for part in found if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(found) else found


def reasoning_of(item: ReasoningParam) -> str:
    """The reasoning of an item, in one of the two places where it may be."""
    return "\n".join(part.text for part in item.content or item.summary or ())


def opened(item: Item, seal: Seal) -> Item:
    """The item; of reasoning that is sealed alone, with its text."""
    if not isinstance(item, ReasoningParam) or item.content or item.summary:
        return item
    text = seal.open(item.encrypted_content)
    return item.model_copy(update={"content": [ReasoningTextParam(type="reasoning_text", text=text)]}) if text else item


def _called(item: FunctionCallParam | CustomCallParam | ToolSearchCallParam) -> tuple[str, str]:
    """The function that an item calls, and its arguments as JSON text."""
    if isinstance(item, ToolSearchCallParam):
        given = item.arguments
        return SEARCH, given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    arguments = item.arguments if isinstance(item, FunctionCallParam) else custom_arguments(item.input)
    return function_name(item.name, item.namespace), arguments


def _add_to_answer(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """Add a part of an answer to the one that is last, or begin one. ``where`` is the item's field."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, FunctionCallParam | CustomCallParam | ToolSearchCallParam):
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        name, arguments = _called(item)
        if not isinstance(object_of(arguments), dict | None):
            raise bad_request(f"{where}.arguments must be a JSON object, got {shown(arguments)}", f"{where}.arguments")
        call = {"name": name, "arguments": arguments}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": call})
        return
    is_new = last is None or bool(last["content"]) or "tool_calls" in last
    if is_new:
        messages.append(last := {"role": "assistant", "content": ""})
    assert last is not None
    if isinstance(item, MessageParam):
        last["content"] = text_of(item.content, f"{where}.content")
    elif isinstance(item, ReasoningParam) and (thoughts := reasoning_of(item)):
        last["reasoning_content"] = thoughts
