"""Completions and chat completions that are whole. msgspec structs: fast to encode, and a source of JSON schemas.

What is always null is there because OpenAI's or vLLM's objects always have it: clients read it without asking. Chunks
of streams have what they bring.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from octavo.chat.answer import AnswerParser
from octavo.entrypoints.args import BOTH
from octavo.entrypoints.generation.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    LogprobsFormatter,
    PromptLogprobs,
    prompt_logprobs,
)
from octavo.entrypoints.generation.retention import use_of
from octavo.entrypoints.generation.run import encode_choices, encoding_cost
from octavo.entrypoints.openai.prepare import PreparedChatCompletion, PreparedCompletion
from octavo.interface.outputs import CompletionOutput, RequestOutput
from octavo.text.detokenizer import TextOffsets, prompt_offsets
from octavo.text.messages import REASONING

SERVED_TIER = "default"  # there is no other


class PromptTokensDetails(Struct):
    """Prompt tokens that were not computed, and those that were and are kept longer than others."""

    cached_tokens: int
    cache_write_tokens: int = 0


class CompletionTokensDetails(Struct):
    """Tokens of reasoning, shown or not; of a prediction that the answers repeat, and those that they do not."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # of thinking models, of predictions


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, written: int = 0) -> Usage:
    """Usage with its total."""
    details = PromptTokensDetails(cached_tokens, written)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


class CompletionChoice(Struct):
    """One completion, or new text of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class Completion(Struct):
    """The response of /v1/completions, and a chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]  # or encoded: msgspec.Raw
    object: str = "text_completion"
    service_tier: UnsetType | None = UNSET
    system_fingerprint: str = ""
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: UnsetType | None = UNSET


class FunctionCall(Struct):
    """Name and arguments (JSON text) of a call."""

    name: str | UnsetType | None
    arguments: str


class ToolCall(Struct):
    """A call of a tool."""

    id: str
    function: FunctionCall
    type: str = "function"


class ChatMessage(Struct):
    """The model's message."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType | None = UNSET  # by one of the two names, or by both
    reasoning_content: str | UnsetType | None = UNSET


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Struct):
    """The response of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]  # or encoded: msgspec.Raw
    usage: Usage
    object: str = "chat.completion"
    service_tier: str | None = None
    system_fingerprint: str = ""
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: None = None


class ModelCard(Struct):
    """One name of the served model."""

    id: str
    created: int
    root: str
    max_model_len: int
    default_sampling_params: dict[str, Any]  # what the model's files recommend: of requests that set none
    input_modalities: list[str]  # what prompts may hold: "text", "image"
    tool_format: str | None = None  # of tool calls; "generic": the chat template shows none; null: they are not read
    object: str = "model"
    owned_by: str = "octavo"
    parent: str | None = None


class ModelList(Struct):
    """The response of /v1/models."""

    data: list[ModelCard]
    object: str = "list"


async def whole_chat_completion(prepared: PreparedChatCompletion, outputs: list[RequestOutput]) -> ChatCompletion:
    """Make the response of a request's final output."""
    (final,) = outputs
    state, body = prepared.state, prepared.body
    parsers = [prepared.new_parser() for _ in final.outputs]
    choices = await encode_choices(
        state,
        [
            (partial(_chat_choice, prepared, completion, parser), encoding_cost(completion, final))
            for completion, parser in zip(final.outputs, parsers, strict=True)
        ],
    )
    used = chat_usage(prepared, final, sum(len(completion.token_ids) for completion in final.outputs), parsers)
    response = ChatCompletion(
        prepared.id,
        prepared.created,
        prepared.answering_name,
        choices,
        used,
        service_tier=None if body.service_tier is None else SERVED_TIER,
        system_fingerprint=state.fingerprint,
    )
    if body.prompt_logprobs is not None and final.prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs(final.prompt_logprobs)
    if body.return_token_ids:
        response.prompt_token_ids = final.prompt_token_ids
    return response


def _chat_choice(prepared: PreparedChatCompletion, completion: CompletionOutput, parser: AnswerParser) -> ChatChoice:
    answer = parser.parse(completion)
    calls = [ToolCall(call.id or "", FunctionCall(call.name, call.arguments)) for call in answer.calls]
    content = prepared.echo + answer.content
    message = ChatMessage(
        content if content or not calls else None,
        prepared.role,
        tool_calls=calls or UNSET,
    )
    for name in thought_names(prepared):
        setattr(message, name, answer.reasoning or None)
    return ChatChoice(
        completion.index,
        message,
        chat_logprobs(prepared, completion),
        parser.finish_reason(completion.finish_reason),
        completion.stop_reason,
        completion.token_ids if prepared.body.return_token_ids else None,
    )


def thought_names(prepared: PreparedChatCompletion) -> list[str]:
    """The fields of thoughts in chat completions."""
    named = prepared.state.args.reasoning_field
    return [name for name in REASONING if named in (name, BOTH)]


def chat_usage(
    prepared: PreparedChatCompletion,
    output: RequestOutput,
    completion_tokens: int,
    parsers: Iterable[AnswerParser] | None = None,
) -> Usage:
    """Count the tokens of a request and its answers; those of thoughts, too, where ``parsers`` have read them all."""
    cached = output.num_cached_tokens
    written = use_of(prepared.requests[0], cached).written
    used = usage(len(output.prompt_token_ids), completion_tokens, cached, written)
    if (predicted := output.predicted) is not None:
        used.completion_tokens_details = CompletionTokensDetails(UNSET, predicted.accepted, predicted.rejected)
    if parsers is not None and prepared.rendered.may_think:
        details = used.completion_tokens_details or CompletionTokensDetails()
        details.reasoning_tokens = sum(parser.num_thinking_tokens for parser in parsers)
        used.completion_tokens_details = details
    return used


def chat_logprobs(prepared: PreparedChatCompletion, completion: CompletionOutput) -> ChatLogprobs | None:
    """Format the log-probabilities of new tokens; None where the client wants none."""
    if completion.logprobs is None or not prepared.body.logprobs:
        return None
    formatter = LogprobsFormatter(prepared.state, prepared.body.return_tokens_as_token_ids)
    top = None if prepared.body.logprob_token_ids else prepared.body.top_logprobs or 0
    return formatter.chat(completion.token_ids, completion.logprobs, top)


async def whole_completion(prepared: PreparedCompletion, outputs: list[RequestOutput]) -> Completion:
    """Make the response of all prompts' final outputs."""
    choices = await encode_choices(
        prepared.state,
        [
            (partial(_choice, prepared, position, completion, final), encoding_cost(completion, final))
            for position, final in enumerate(outputs)
            for completion in final.outputs
        ],
    )
    used = usage(
        sum(len(final.prompt_token_ids) for final in outputs),
        0 if prepared.prompt_only else sum(len(choice.token_ids) for final in outputs for choice in final.outputs),
        sum(final.num_cached_tokens for final in outputs),
    )
    whole = completion_of(prepared, choices, used)
    whole.service_tier = whole.kv_transfer_params = None
    return whole


def completion_of(
    prepared: PreparedCompletion, choices: list[CompletionChoice], used: Usage | UnsetType | None = UNSET
) -> Completion:
    """Make a response, or a chunk of one."""
    state = prepared.state
    return Completion(
        prepared.id,
        prepared.created,
        prepared.answering_name,
        choices,
        system_fingerprint=state.fingerprint,
        usage=used,
    )


def _choice(
    prepared: PreparedCompletion, position: int, completion: CompletionOutput, final: RequestOutput
) -> CompletionChoice:
    choice = ChoicePieces(prepared, position, completion.index).take(completion, final)
    for name in ("prompt_logprobs", "token_ids", "prompt_token_ids"):
        if getattr(choice, name) is UNSET:
            setattr(choice, name, None)
    return choice


class ChoicePieces:
    """The pieces of one choice: several in a stream, otherwise one."""

    def __init__(self, prepared: PreparedCompletion, position: int, index: int) -> None:
        self._prepared = prepared
        self._position = position
        self._index = position * prepared.n + index
        self._offsets: TextOffsets | None = None  # of the tokens that are generated
        self._first = True
        self._format = LogprobsFormatter(prepared.state, prepared.body.return_tokens_as_token_ids)

    def take(self, completion: CompletionOutput, output: RequestOutput) -> CompletionChoice:
        """Make a choice of new tokens, with what the prompt adds to the first."""
        prepared, body = self._prepared, self._prepared.body
        prompt_ids = output.prompt_token_ids
        if prepared.prompt_only:
            completion.text, completion.token_ids = "", []
            completion.logprobs = None if completion.logprobs is None else completion.logprobs[:0]
            if completion.finish_reason is not None:
                completion.finish_reason, completion.stop_reason = "length", None
        choice = CompletionChoice(self._index, completion.text, None, completion.finish_reason, completion.stop_reason)
        if self._first:
            choice.text = prepared.echoed(self._position) + choice.text
            if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
                choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
            if body.return_token_ids:
                choice.prompt_token_ids = prompt_ids
        if body.return_token_ids:
            choice.token_ids = completion.token_ids
        if body.logprobs is not None and completion.logprobs is not None:
            choice.logprobs = self._logprobs(completion, output, body.logprobs)
        self._first = False
        return choice

    def _logprobs(self, completion: CompletionOutput, output: RequestOutput, top: int) -> CompletionLogprobs:
        prepared, vocabulary = self._prepared, self._prepared.state.engine.output_processor.vocabulary
        ids, positions = completion.token_ids, completion.logprobs or ()
        offsets = [0] * len(ids)  # without a tokenizer there is no text
        if vocabulary is not None:
            if self._offsets is None:
                params = prepared.requests[self._position].sampling_params
                start = len(prepared.echoed(self._position))
                self._offsets = TextOffsets(vocabulary, params, output.prompt_token_ids, start)
            offsets = self._offsets.take(ids)
        new = self._format.completion(ids, positions, None if prepared.body.logprob_token_ids else top, offsets)
        if self._first and prepared.body.echo and output.prompt_logprobs is not None:
            before = [0] * len(output.prompt_token_ids)
            if vocabulary is not None:
                before = prompt_offsets(vocabulary, output.prompt_token_ids, prepared.echoed(self._position))
            return self._format.completion(output.prompt_token_ids, output.prompt_logprobs, top, before) + new
        return new
