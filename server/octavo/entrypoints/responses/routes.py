"""POST /v1/responses, and the routes of stored responses"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo.chat.answer import AnswerParser
from octavo.chat.messages import Conversation
from octavo.chat.parts import Part, PartSplitter
from octavo.entrypoints.admission import check_model, check_serving
from octavo.entrypoints.errors import APIError, bad_request, shown
from octavo.entrypoints.generation.chat import PreparedChat, count_prompt, prepare_chat, read_messages
from octavo.entrypoints.generation.context import in_words_of, naming, without_oldest_that_fits
from octavo.entrypoints.generation.logprobs import LogprobsFormatter
from octavo.entrypoints.generation.run import (
    Generation,
    PromptOptions,
    TokenLimit,
    TopLogprobs,
    external_id,
    sampling_params,
)
from octavo.entrypoints.generation.stream import EventStream
from octavo.entrypoints.replica import elsewhere, new_id
from octavo.entrypoints.responses.answers import (
    DeletedResponse,
    Event,
    IncompleteDetails,
    InputTokenCount,
    InputTokensDetails,
    ItemWriter,
    OutputTokensDetails,
    ResponseFailure,
    ResponseItems,
    ResponseObject,
    ResponseUsage,
    listed,
    size_of,
)
from octavo.entrypoints.responses.logprobs import TextLogprobs
from octavo.entrypoints.responses.prepare import constraint_of, conversation_of
from octavo.entrypoints.responses.protocol import InputTokensRequest, Item, ItemReferenceParam, ResponsesRequest
from octavo.entrypoints.responses.store import ResponseStore, StoredResponse
from octavo.entrypoints.responses.tools import Toolbox, toolbox_of
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.tenants import current_tenant
from octavo.entrypoints.transport.request_body import read_body
from octavo.entrypoints.transport.responses import JSON, encode_json, unless_disconnected
from octavo.entrypoints.transport.sse import EventTemplate, named_event
from octavo.interface.outputs import CompletionOutput, RequestOutput
from octavo.interface.pooling_params import check_generates
from octavo.interface.sampling_params import SamplingParams
from octavo.metrics.stats import Tenant

_OPTIONS = PromptOptions(add_special_tokens=False)
_OF_CHATS = {"messages": "input"}
_MOST_LISTED = 100
ITEMS_QUERY: dict[str, dict[str, Any]] = {
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string", "description": "the id of an item: those behind it are listed"},
    "limit": {"type": "integer", "minimum": 1, "maximum": _MOST_LISTED},
}


@dataclass
class _Context:
    """One request, its conversation ready for the engine, and the response that grows of it."""

    state: ServerState
    store: ResponseStore
    body: ResponsesRequest
    items: list[Item]
    tools: Toolbox
    chat: PreparedChat
    response: ResponseObject
    tenant: Tenant | None

    def __post_init__(self) -> None:
        body = self.body
        self.parser: AnswerParser = self.chat.new_parser()
        self.splitter = PartSplitter()
        self._logprobs = TextLogprobs() if body.num_logprobs is not None else None
        summarized = body.reasoning is not None and body.reasoning.summary not in (None, "none")
        seals = "reasoning.encrypted_content" in (body.include or ())
        self.writer = ItemWriter(self.response.id, self.tools.names, summarized, seals, self._logprobs)

    def note_logprobs(self, completion: CompletionOutput) -> None:
        """Take the log-probabilities of new tokens, without those of special tokens, which have no text."""
        if self._logprobs is None or completion.logprobs is None:
            return
        vocabulary = self.state.engine.output_processor.vocabulary
        special: Collection[int] = vocabulary.special_ids if vocabulary is not None else ()
        if not self.chat.request.sampling_params.skip_special_tokens:
            special = ()
        entries = LogprobsFormatter(self.state).chat(
            completion.token_ids, completion.logprobs, self.body.num_logprobs or 0
        )
        pairs = zip(completion.token_ids, entries.content or (), strict=True)
        self._logprobs.add([entry for token_id, entry in pairs if token_id not in special])

    def end(self, output: RequestOutput, num_tokens: int, finish_reason: str | None) -> None:
        """Complete the response, and keep it if it is to be kept. ``output`` is the last of ``num_tokens`` tokens."""
        response, parts = self.response, self.splitter.parts
        cut = finish_reason == "length"
        response.status = "incomplete" if cut else "completed"
        if cut:
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        else:
            response.completed_at = int(time.time())
        response.output = [
            self.writer.item(part, "incomplete" if cut and part is parts[-1] else "completed") for part in parts
        ]
        thoughts = "".join(part.text for part in parts if part.kind == "reasoning")
        response.usage = self._usage(output, num_tokens, thoughts)
        if self.body.store is not False:
            size = sum(map(size_of, self.items)) + len(encode_json(response))
            kept = [self.writer.kept(part) for part in parts]
            self.store.put(StoredResponse(response, self.items, kept, size, self.tenant))

    def _usage(self, output: RequestOutput, num_tokens: int, thoughts: str) -> ResponseUsage:
        tokenizer = self.state.engine.tokenizer
        reasoning = len(tokenizer.encode(thoughts, False)) if thoughts and tokenizer is not None else 0
        prompt = len(output.prompt_token_ids)
        return ResponseUsage(
            prompt,
            InputTokensDetails(output.num_cached_tokens),
            num_tokens,
            OutputTokensDetails(min(reasoning, num_tokens)),
            prompt + num_tokens,
        )


async def create_response(request: Request) -> Response:
    """Handle POST /v1/responses."""
    state = state_of(request)
    check_serving(state)
    body = await read_body(request, ResponsesRequest, state)
    body.check()
    check_model(state, body.model)
    check_generates(state.engine.config.model.pooler)
    external_id(request, "resp")  # claims a client's own; the response's cannot be chosen, since it finds what is kept
    context = await _prepare(state, _store(request), body)
    if body.stream:
        generation = await Generation(state, [context.chat.request], [None]).start()
        return EventStream(generation, _Events(context))
    return await unless_disconnected(request, _complete(context))


async def count_input_tokens(request: Request) -> Response:
    """Handle POST /v1/responses/input_tokens."""
    state = state_of(request)
    body = await read_body(request, InputTokensRequest, state)
    body.check()
    check_model(state, body.model)
    items = _items(state, _store(request), body)
    tools = toolbox_of(body.tools, items, len(items) - len(body.input))
    conversation = conversation_of(body, items, tools)
    with naming(_OF_CHATS):
        conversation.messages = await read_messages(state, conversation.messages)
    ids = await count_prompt(state, conversation, _OPTIONS, partial(constraint_of, body))
    return JSON(InputTokenCount(len(ids)))


async def retrieve_response(request: Request) -> Response:
    """Handle GET /v1/responses/{response_id}."""
    if request.query_params.get("stream") in ("true", "1"):
        raise bad_request("stream is not supported for responses that are kept: drop it", "stream")
    return JSON(_stored(request).response)


async def delete_response(request: Request) -> Response:
    """Handle DELETE /v1/responses/{response_id}."""
    entry = _stored(request)
    _store(request).delete(entry.response.id)
    return JSON(DeletedResponse(entry.response.id))


async def cancel_response(request: Request) -> Response:
    """Handle POST /v1/responses/{response_id}/cancel, which is for responses in the background."""
    entry = _stored(request)
    raise bad_request(
        f"response {entry.response.id} is {entry.response.status} and cannot be cancelled: background is not built; "
        "to stop one that is under way, close its connection",
        "response_id",
    )


async def compact_response(request: Request) -> Response:
    """Handle POST /v1/responses/compact, whose summary would be another server's to read."""
    raise APIError(404, 'compact is not supported: send truncation "auto", or the items that are to stay')


async def list_input_items(request: Request) -> Response:
    """Handle GET /v1/responses/{response_id}/input_items."""
    entry = _stored(request)
    asked = request.query_params
    items = [listed(item, number) for number, item in enumerate(entry.input)]
    if asked.get("order", "desc") not in ("asc", "desc"):
        raise bad_request(f"order must be asc or desc, got {shown(asked['order'])}", "order")
    if asked.get("order", "desc") == "desc":
        items.reverse()
    limit = asked.get("limit", "20")
    if not (limit.isdecimal() and limit.isascii() and 1 <= int(limit[:4]) <= _MOST_LISTED):
        raise bad_request(f"limit must be between 1 and {_MOST_LISTED}, got {shown(limit)}", "limit")
    if (after := asked.get("after")) is not None:
        at = next((number for number, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise bad_request(f"after must be the id of an item of this response, got {shown(after)}", "after")
        items = items[at + 1 :]
    found = items[: int(limit)]
    first, last = (found[0]["id"], found[-1]["id"]) if found else ("", "")
    return JSON(ResponseItems(found, first, last, len(items) > len(found)))


async def _prepare(state: ServerState, store: ResponseStore, body: ResponsesRequest) -> _Context:
    items = _items(state, store, body)
    tools = toolbox_of(body.tools, items, len(items) - len(body.input))
    conversation = conversation_of(body, items, tools)
    with naming(_OF_CHATS):
        conversation.messages = await read_messages(state, conversation.messages)

    async def prepare(conversation: Conversation) -> PreparedChat:
        limit = TokenLimit(body.max_output_tokens, "max_output_tokens")
        logprobs = TopLogprobs(body.num_logprobs, "top_logprobs")
        params = sampling_params(state, body.sampling_fields(), limit, logprobs, bool(body.stream))
        with in_words_of("input"):
            return await prepare_chat(state, conversation, params, _OPTIONS, limit, partial(constraint_of, body))

    if body.truncation == "auto":
        chat = await without_oldest_that_fits(conversation, prepare)
    else:
        chat = await prepare(conversation)
    params = chat.request.sampling_params
    response = _begin(state, body, tools, params)
    return _Context(state, store, body, items, tools, chat, response, current_tenant.get())


def _begin(state: ServerState, body: ResponsesRequest, tools: Toolbox, params: SamplingParams) -> ResponseObject:
    """The response before its first token: what was asked for."""
    text, choice, reasoning = body.text, body.tool_choice, body.reasoning
    form = text.format if text is not None else None
    summary = reasoning.summary if reasoning is not None and reasoning.summary != "none" else None
    return ResponseObject(
        new_id("resp_", state.replica_tag),
        int(time.time()),
        state.answering_name,
        body.instructions,
        body.max_output_tokens,
        body.max_tool_calls,
        body.metadata or {},
        body.parallel_tool_calls is not False,
        body.previous_response_id,
        body.prompt_cache_key,
        params.presence_penalty,
        params.frequency_penalty,
        body.store is not False,
        {"effort": reasoning.effort if reasoning is not None else None, "summary": summary},
        body.safety_identifier,
        params.temperature,
        {
            "format": {"type": "text"} if form is None else _echo(form),
            "verbosity": text.verbosity or "medium" if text is not None else "medium",
        },
        choice if isinstance(choice, str) else "auto" if choice is None else choice.model_dump(),
        tools.given,
        params.top_p,
        body.user,
        top_logprobs=body.num_logprobs or 0,
        truncation=body.truncation or "disabled",
    )


def _echo(form: BaseModel) -> dict[str, Any]:
    """The form of a text as responses show it, with all fields."""
    given = form.model_dump(by_alias=True)
    return {**given, "strict": bool(given["strict"])} if "strict" in given else given


def _items(state: ServerState, store: ResponseStore, body: InputTokensRequest) -> list[Item]:
    """All items of the conversation. Raises APIError where an earlier response or item is not kept."""
    items, tenant = list[Item](), current_tenant.get()
    if (previous := body.previous_response_id) is not None:
        entry = store.get(previous, tenant)
        if entry is None:
            why = elsewhere(previous, state.replica_tag) or "it was not stored, or made room for others"
            raise bad_request(
                f"previous_response_id {shown(previous)} is not found: {why}; send the whole conversation as input",
                "previous_response_id",
                code="previous_response_not_found",
            )
        items += entry.input + entry.output
    for number, item in enumerate(body.input):
        if not isinstance(item, ItemReferenceParam):
            items.append(item)
            continue
        found = store.item(item.id, tenant)
        if found is None:
            raise bad_request(
                f"input.{number}: item {shown(item.id)} is not found; send the item itself", f"input.{number}"
            )
        items.append(found)
    return items


async def _complete(context: _Context) -> Response:
    with Generation(context.state, [context.chat.request], [None]) as generation:
        await generation.start()
        final = (await generation.final_outputs())[0]
    (completion,) = final.outputs
    context.note_logprobs(completion)
    context.writer.take(context.splitter.feed(context.parser.parse(completion)))
    context.writer.take(context.splitter.finish())
    context.end(final, len(completion.token_ids), completion.finish_reason)
    return JSON(context.response)


class _Events:
    """The events of a streamed answer."""

    def __init__(self, context: _Context) -> None:
        self._context = context
        self._num_tokens = 0
        self._last: RequestOutput | None = None
        self._number = 0
        self._only_text = context.chat.is_plain and context.body.num_logprobs is None
        self._text: tuple[Part, EventTemplate] | None = None  # once it has begun, where there is nothing else

    def write(self, item: tuple[int, RequestOutput]) -> bytes:
        """The events of one output; empty if all of its text is held back."""
        _, output = item
        (completion,) = output.outputs
        context = self._context
        self._num_tokens += len(completion.token_ids)
        if self._text is not None and completion.finish_reason is None:
            self._last = output
            return self._write_text(*self._text, completion.text) if completion.text else b""
        events: list[Event] = []
        if self._last is None:
            events += self._snapshots("response.created", "response.in_progress")
        self._last = output
        context.note_logprobs(completion)
        for step in context.splitter.feed(context.parser.feed(completion)):
            events += context.writer.events(step)
            if self._only_text and self._text is None and step[0] == "open":
                self._text = step[1], context.writer.text_template(step[1])
        if completion.finish_reason is not None:
            for step in context.splitter.finish():
                events += context.writer.events(step, cut=completion.finish_reason == "length")
        return b"".join(map(self._write, events))

    def end(self) -> bytes:
        """The whole response."""
        assert self._last is not None
        (completion,) = self._last.outputs
        self._context.end(self._last, self._num_tokens, completion.finish_reason)
        return b"".join(map(self._write, self._snapshots(f"response.{self._context.response.status}")))

    def error(self, error: APIError) -> bytes:
        """The failed response, which is the last event."""
        response = self._context.response
        response.status, response.error = "failed", ResponseFailure(error.detail.message)
        return b"".join(map(self._write, self._snapshots("response.failed")))

    def _snapshots(self, *kinds: str) -> list[Event]:
        return [{"type": kind, "response": self._context.response} for kind in kinds]

    def _write_text(self, part: Part, template: EventTemplate, text: str) -> bytes:
        part.pieces.append(text)
        self._number += 1
        return b'%b,"sequence_number":%d}\n\n' % (template.fill(text).removesuffix(b"}\n\n"), self._number - 1)

    def _write(self, event: Event) -> bytes:
        written = named_event(event["type"], {**event, "sequence_number": self._number})
        self._number += 1
        return written


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def _stored(request: Request) -> StoredResponse:
    response_id = request.path_params["response_id"]
    entry = _store(request).get(response_id, current_tenant.get())
    if entry is None:
        why = elsewhere(response_id, state_of(request).replica_tag)
        why = why or "it was not stored, was deleted, or made room for others"
        raise APIError(
            404, f"response {shown(response_id)} is not found: {why}", param="response_id", code="response_not_found"
        )
    return entry
