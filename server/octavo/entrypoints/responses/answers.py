"""Responses that answer: their items, their end and what is kept of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from msgspec import UNSET
from pydantic import BaseModel

from octavo.chat.answer import AnswerParser
from octavo.chat.parts import Part, PartSplitter, Step
from octavo.entrypoints.generation.logprobs import ChatLogprob, LogprobsFormatter
from octavo.entrypoints.generation.retention import use_of
from octavo.entrypoints.responses.items import (
    ConversationReference,
    CustomCallItem,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseObject,
    ResponseUsage,
    Status,
    SummaryText,
    ToolSearchItem,
)
from octavo.entrypoints.responses.logprobs import TextLogprobs
from octavo.entrypoints.responses.prepare import PreparedResponse
from octavo.entrypoints.responses.protocol import (
    CustomCallParam,
    FunctionCallParam,
    Item,
    MessageParam,
    ReasoningParam,
    ReasoningTextParam,
    RefusalPartParam,
    TextPartParam,
    ToolSearchCallParam,
)
from octavo.entrypoints.responses.store import Turn, keep
from octavo.entrypoints.responses.tools import ToolName, custom_input, search_arguments
from octavo.entrypoints.sealing import Seal
from octavo.interface.outputs import CompletionOutput, RequestOutput


async def whole(prepared: PreparedResponse, outputs: list[RequestOutput]) -> ResponseObject:
    """Make the response of a request's final output."""
    (output,) = outputs
    (completion,) = output.outputs
    answer = Answer(prepared)
    answer.note_logprobs(completion)
    answer.items.take(answer.splitter.feed(answer.parser.parse(completion)))
    answer.items.take(answer.splitter.finish())
    answer.end(output, len(completion.token_ids), completion.finish_reason)
    await answer.keep()
    return answer.response


class Answer:
    """The response that grows as tokens come. ``parser`` and ``splitter`` make parts of them, ``items`` makes items."""

    def __init__(self, prepared: PreparedResponse) -> None:
        body = prepared.body
        self._prepared = prepared
        self.response = _begin(prepared)
        self.parser: AnswerParser = prepared.rendered.new_parser()
        self.splitter = PartSplitter()
        self._logprobs = TextLogprobs() if body.num_logprobs is not None else None
        summarized = body.reasoning is not None and body.reasoning.summary not in (None, "none")
        seal = prepared.state.seal if "reasoning.encrypted_content" in (body.include or ()) else None
        self.items = ItemWriter(prepared.id, prepared.tools.names, summarized, seal, self._logprobs)

    def note_logprobs(self, completion: CompletionOutput) -> None:
        """Take the log-probabilities of new tokens, without those of special tokens, which have no text."""
        if self._logprobs is None or completion.logprobs is None:
            return
        vocabulary = self._prepared.state.engine.output_processor.vocabulary
        special: Collection[int] = vocabulary.special_ids if vocabulary is not None else ()
        if not self._prepared.requests[0].sampling_params.skip_special_tokens:
            special = ()
        entries = LogprobsFormatter(self._prepared.state).chat(
            completion.token_ids, completion.logprobs, self._prepared.body.num_logprobs or 0
        )
        pairs = zip(completion.token_ids, entries.content or (), strict=True)
        self._logprobs.add([entry for token_id, entry in pairs if token_id not in special])

    def end(self, output: RequestOutput, num_tokens: int, finish_reason: str | None) -> None:
        """Complete the response. ``output`` is the last of ``num_tokens`` tokens."""
        response, parts = self.response, self.splitter.parts
        cut = finish_reason == "length"
        response.status = "incomplete" if cut else "completed"
        if cut:
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        else:
            response.completed_at = int(time.time())
        response.output = [
            self.items.item(part, "incomplete" if cut and part is parts[-1] else "completed") for part in parts
        ]
        response.usage = self._usage(output, num_tokens)

    async def keep(self) -> None:
        """Store the response if it is to be stored: before its end is sent, so that a client that has it can go on with
        it. A response that cannot be stored says ``store: false``, and is in no conversation."""
        prepared, response = self._prepared, self.response
        if response.store or response.conversation is not None:
            stored = await keep(prepared.state, self.turn())
            response.store = response.store and stored
            response.conversation = response.conversation if stored else None
            prepared.state.metrics.record_stored(stored)

    def turn(self) -> Turn:
        """The complete response with its items."""
        return self._prepared.turn(self.response, [self.items.kept(part) for part in self.splitter.parts])

    def _usage(self, output: RequestOutput, num_tokens: int) -> ResponseUsage:
        prompt = len(output.prompt_token_ids)
        written = use_of(self._prepared.requests[0], output.num_cached_tokens).written
        return ResponseUsage(
            prompt,
            InputTokensDetails(output.num_cached_tokens, written),
            num_tokens,
            OutputTokensDetails(self.parser.num_thinking_tokens),
            prompt + num_tokens,
        )


def _begin(prepared: PreparedResponse) -> ResponseObject:
    """Make the response before its first token, which repeats the request."""
    body, params = prepared.body, prepared.requests[0].sampling_params
    text, choice, reasoning = body.text, body.tool_choice, body.reasoning
    form = text.format if text is not None else None
    summary = reasoning.summary if reasoning is not None and reasoning.summary != "none" else None
    return ResponseObject(
        prepared.id,
        prepared.created,
        prepared.answering_name,
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
        prepared.tools.given,
        params.top_p,
        body.user,
        top_logprobs=body.num_logprobs or 0,
        background=bool(body.background),
        conversation=ConversationReference(body.conversation.id) if body.conversation is not None else None,
        truncation=body.truncation or "disabled",
    )


def _echo(form: BaseModel) -> dict[str, Any]:
    """The form of a text as responses show it, with all fields."""
    given = form.model_dump(by_alias=True)
    return {**given, "strict": bool(given["strict"])} if "strict" in given else given


class ItemWriter:
    """Makes the items of one answer. They have ids of their own, made of the response's.

    ``names``: of the tools, by what the model calls them. ``summarized``: reasoning comes as its summary. ``seal``: it
    comes as encrypted_content too. ``logprobs``: of tokens in texts, added as the tokens come.
    """

    def __init__(
        self,
        response_id: str,
        names: Mapping[str, ToolName] | None = None,
        summarized: bool = False,
        seal: Seal | None = None,
        logprobs: TextLogprobs | None = None,
    ) -> None:
        self._suffix = response_id.partition("_")[2]
        self._names = names or {}
        self.summarized, self._seal = summarized, seal
        self._logprobs = logprobs
        self._logprobs_of: dict[int, list[ChatLogprob]] = {}  # of parts, by index

    def id_of(self, part: Part) -> str:
        """The item's id."""
        tool = self.tool(part)
        call = "ctc" if tool.custom else "tsc" if tool.searches else "fc"
        prefix = {"text": "msg", "reasoning": "rs", "call": call}[part.kind]
        return f"{prefix}_{self._suffix}{part.index:02x}"

    def tool(self, part: Part) -> ToolName:
        """The client's name of the tool that is called."""
        return self._names.get(part.name) or ToolName(part.name)

    def item(self, part: Part, status: Status) -> OutputItem:
        """A part, as far as it has come, as an item."""
        if part.kind == "text":
            text = OutputText(part.text, logprobs=list(self._logprobs_of.get(part.index, ())))
            return OutputMessage(self.id_of(part), status, [text])
        if part.kind == "reasoning":
            sealed_text = self._seal.close(part.text) if self._seal is not None and status != "in_progress" else UNSET
            if self.summarized:
                return ReasoningItem(self.id_of(part), status, [], [SummaryText(part.text)], sealed_text)
            return ReasoningItem(self.id_of(part), status, [ReasoningText(part.text)], [], sealed_text)
        tool = self.tool(part)
        namespace = tool.namespace or UNSET
        if tool.searches:
            return ToolSearchItem(self.id_of(part), part.call_id, status, search_arguments(part.text))
        if tool.custom:
            return CustomCallItem(self.id_of(part), part.call_id, tool.name, custom_input(part.text), namespace)
        return FunctionCallItem(self.id_of(part), status, part.call_id, tool.name, part.text, namespace)

    def kept(self, part: Part) -> Item:
        """The same as an item of a later request's input."""
        if part.kind == "text":
            content: list[TextPartParam | RefusalPartParam] = [TextPartParam(type="output_text", text=part.text)]
            return MessageParam.model_construct(role="assistant", content=content, id=self.id_of(part))
        if part.kind == "reasoning":
            text = ReasoningTextParam(type="reasoning_text", text=part.text)
            return ReasoningParam(type="reasoning", content=[text], id=self.id_of(part))
        tool = self.tool(part)
        if tool.searches:
            return ToolSearchCallParam(
                type="tool_search_call",
                call_id=part.call_id,
                arguments=search_arguments(part.text),
                id=self.id_of(part),
            )
        shared: dict[str, Any] = {"call_id": part.call_id, "name": tool.name, "id": self.id_of(part)}
        shared["namespace"] = tool.namespace
        if tool.custom:
            return CustomCallParam(type="custom_tool_call", input=custom_input(part.text), **shared)
        return FunctionCallParam(type="function_call", arguments=part.text, **shared)

    def take(self, steps: Iterable[Step]) -> None:
        """Note the tokens that the texts of a whole answer have."""
        for action, part, text in steps:
            if action == "add":
                self.take_text(part, text)

    def take_text(self, part: Part, text: str) -> list[ChatLogprob]:
        """Note and return the tokens of new text of a part; none without log-probabilities."""
        if self._logprobs is None:
            return []
        taken = self._logprobs.take(text)
        if part.kind == "text":
            self._logprobs_of.setdefault(part.index, []).extend(taken)
        return taken
