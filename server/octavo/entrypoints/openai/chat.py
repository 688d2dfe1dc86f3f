"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.errors import bad_request
from octavo.entrypoints.generation import run as serving
from octavo.entrypoints.generation.messages import check_messages, for_template
from octavo.entrypoints.generation.reasoning import ReasoningParser, begins_inside
from octavo.entrypoints.generation.structured import Constraint, after_thoughts, constraint_of, or_calls
from octavo.entrypoints.generation.tools import plan as tools
from octavo.entrypoints.generation.tools.plan import ToolPlan
from octavo.entrypoints.generation.tools.prompt_fallback import knows_tools, teach
from octavo.entrypoints.openai.chat_answer import AnswerParser
from octavo.entrypoints.openai.logprobs import prompt_logprobs
from octavo.entrypoints.openai.protocol import ChatCompletionRequest
from octavo.entrypoints.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Usage,
    usage,
)
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.transport.http_answers import (
    DONE,
    JSON,
    EventStream,
    EventTemplate,
    event,
    read_body,
    unless_disconnected,
)
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.outputs import CompletionOutput, RequestOutput
from octavo.text.chat_template import check_variables

_TAG_TOKENS = 12  # at the end of a prompt that surely hold a tag and the space around it
_MANY_MESSAGES = 500  # from which checking them is worth a thread
_LONG_CHAT = 20_000  # bytes of a body from which rendering and tokenising is worth a thread


@dataclass
class _Job:
    """One conversation on its way."""

    state: ServerState
    body: ChatCompletionRequest
    id: str
    created: int
    request: EngineCoreRequest
    role: str
    echo: str  # what the answer begins with
    plan: ToolPlan | None
    inside_thoughts: bool  # the prompt ends among the model's thoughts

    def new_parser(self) -> AnswerParser:
        reasoning = ReasoningParser(self.inside_thoughts) if self.state.args.reasoning_parser else None
        return AnswerParser(reasoning, self.plan, self.body.include_reasoning is not False)

    def chunk(
        self,
        choices: list[ChatChunkChoice],
        used: Usage | UnsetType | None = UNSET,
        prompt_ids: list[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            self.id, self.created, self.state.model_name, choices, system_fingerprint=self.state.fingerprint,
            usage=used, prompt_token_ids=prompt_ids,
        )  # fmt: skip


async def create_chat_completion(request: Request) -> Response:
    state = serving.state_of(request)
    state.check_serving()
    body = await read_body(request, ChatCompletionRequest, state.max_body_bytes)
    body.check()
    state.check_model(body.model)
    job = await _prepare(state, body, serving.external_id(request, "chatcmpl", body.request_id))
    if body.stream:
        run = await serving.Running(state, [job.request], [None]).start()
        events = _Events(job)
        return EventStream(run, events)
    return await unless_disconnected(request, _answer(job))


async def _prepare(state: ServerState, body: ChatCompletionRequest, answer_id: str) -> _Job:
    messages = (
        check_messages(body.messages)
        if len(body.messages) < _MANY_MESSAGES
        else await state.engine.run_in_thread(check_messages, body.messages)
    )
    if body.stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs come with whole answers only; drop stream or prompt_logprobs"
        raise bad_request(message, "prompt_logprobs")
    asked_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(body, asked_field)
    params = serving.sampling_params(state, body, max_tokens, (body.top_logprobs or 0) if body.logprobs else None)
    size = sum(len(message["content"]) for message in messages)
    ids, plan, constraint = (
        await state.engine.run_in_thread(interpret, state, body, messages)
        if size > _LONG_CHAT or body.tools
        else interpret(state, body, messages)
    )
    if plan is not None and plan.parser.needs_special_tokens and body.skip_special_tokens is None:
        params.skip_special_tokens = False
    request = await serving.prepare(
        state, body, ids, params, max_tokens, asked_field, add_special_tokens=False, constraint=constraint
    )
    inside = _ends_inside_thoughts(state, ids)
    if request.grammar is not None and state.engine.tokenizer is not None:
        token_id = state.engine.tokenizer.backend.token_to_id
        if plan is not None and plan.or_calls is not None:
            request.grammar = or_calls(request.grammar, plan.or_calls, token_id)
        if state.args.reasoning_parser is not None:
            request.grammar = after_thoughts(request.grammar, inside, token_id)
    continued = messages[-1] if body.continue_final_message or not _generates(body) else None
    role = continued["role"] if continued is not None else state.args.response_role
    echo = messages[-1]["content"] if body.echo and messages[-1]["role"] == role else ""
    return _Job(state, body, answer_id, int(time.time()), request, role, echo, plan, inside)


def interpret(
    state: ServerState, body: ChatCompletionRequest, messages: list[dict[str, Any]]
) -> tuple[list[int], ToolPlan | None, Constraint | None]:
    """The prompt's token ids, how tools are called, and what the answer must be like. Raises ValueError, APIError."""
    constraint = constraint_of(body)
    tools.narrow(body)
    plan = tools.plan(body, state.args, _template(state, body)) if body.tools or body.tool_choice else None
    if plan is not None:
        assert state.engine.tokenizer is not None
        constraint = tools.combined(constraint, plan, state.engine.tokenizer.backend.token_to_id)
    return render(state, body, messages), plan, constraint


def _ends_inside_thoughts(state: ServerState, ids: list[int]) -> bool:
    name, tokenizer = state.args.reasoning_parser, state.engine.tokenizer
    if name is None or tokenizer is None:
        return False
    return begins_inside(name, tokenizer.decode(ids[-_TAG_TOKENS:], skip_special_tokens=False))


def _generates(body: ChatCompletionRequest) -> bool:
    """Whether the template opens a new message for the answer; by default unless the last one is continued."""
    return not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt


def render(state: ServerState, body: ChatCompletionRequest, messages: list[dict[str, Any]]) -> list[int]:
    """The conversation as token ids. Raises ValueError."""
    template = _template(state, body)
    check_variables(body.chat_template_kwargs or {}, "chat_template_kwargs")
    variables = {**state.args.default_chat_template_kwargs, **(body.chat_template_kwargs or {})}
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    tokenizer = state.engine.tokenizer
    assert tokenizer is not None
    tools = None if body.tool_choice == "none" and state.args.exclude_tools_when_tool_choice_none else body.tools
    if tools and body.tool_choice != "none" and not knows_tools(template):
        messages = teach(messages, tools)
    text = tokenizer.apply_chat_template(
        for_template(messages, template),
        tools=tools,
        documents=body.documents,
        add_generation_prompt=_generates(body),
        continue_final_message=bool(body.continue_final_message),
        chat_template=template,
        **variables,
    )
    # The template writes special tokens itself.
    special = bool(body.add_special_tokens)
    return state.engine.input_processor.tokenize(text, special, body.truncate_prompt_tokens, body.cache_salt)


def _template(state: ServerState, body: ChatCompletionRequest) -> str:
    """The chat template of a request. Raises ValueError."""
    tokenizer = state.engine.tokenizer
    if tokenizer is None:
        raise bad_request(
            "messages need a tokenizer, but the engine runs without one (--skip-tokenizer-init)", "messages"
        )
    if body.chat_template is not None and not state.args.trust_request_chat_template:
        raise bad_request(
            "chat_template is taken from requests only with the server's --trust-request-chat-template; drop it",
            "chat_template",
        )
    return tokenizer.get_chat_template(body.chat_template or state.chat_template, tools=bool(body.tools))


async def _answer(job: _Job) -> Response:
    with serving.Running(job.state, [job.request], [None]) as run:
        await run.start()
        final = (await run.final_outputs())[0]
    body = job.body
    choices = await serving.encoded(
        job.state,
        [(partial(_choice, job, completion), serving.weight(completion, final)) for completion in final.outputs],
    )
    used = _usage(final, sum(len(c.token_ids) for c in final.outputs))
    state = job.state
    answer = ChatCompletion(job.id, job.created, state.model_name, choices, used, system_fingerprint=state.fingerprint)
    if body.prompt_logprobs is not None and final.prompt_logprobs is not None:
        answer.prompt_logprobs = prompt_logprobs(final.prompt_logprobs)
    if body.return_token_ids:
        answer.prompt_token_ids = final.prompt_token_ids
    return JSON(answer)


def _choice(job: _Job, completion: CompletionOutput) -> ChatChoice:
    parser = job.new_parser()
    message = parser.message(completion, job.role, job.echo)
    return ChatChoice(
        completion.index,
        message,
        _logprobs(job, completion),
        parser.finish_reason(completion.finish_reason),
        completion.stop_reason,
        completion.token_ids if job.body.return_token_ids else UNSET,
    )


def _usage(output: RequestOutput, completion_tokens: int) -> Usage:
    return usage(len(output.prompt_token_ids), completion_tokens, output.num_cached_tokens)


def _logprobs(job: _Job, completion: CompletionOutput) -> ChatLogprobs | None:
    if completion.logprobs is None or not job.body.logprobs:
        return None
    formatter = serving.formatter(job.state, job.body)
    return formatter.chat(completion.token_ids, completion.logprobs, job.body.top_logprobs or 0)


class _Events:
    """The events of a stream."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._parsers: dict[int, AnswerParser] = {}
        self._completion_tokens = 0
        self._last: RequestOutput | None = None
        self._include_usage, self._continuous_usage = serving.streamed_usage(job.state, job.body)
        self._no_usage = None if self._include_usage else UNSET
        self._templates: dict[int, EventTemplate] = {}  # by answer, for pieces that are text and nothing else
        more = job.body.logprobs or job.body.return_token_ids or self._continuous_usage
        self._only_text = not (more or job.plan is not None or job.state.args.reasoning_parser is not None)

    def write(self, item: tuple[int, RequestOutput]) -> bytes:
        """What one output tells; nothing when all of it is held back."""
        _, output = item
        self._last = output
        job = self._job
        events = b""
        for completion in output.outputs:
            if completion.index not in self._parsers:
                events += self._open(completion.index, output)  # before the first token is counted
            self._completion_tokens += len(completion.token_ids)
            template = self._templates.get(completion.index)
            if template is not None and completion.finish_reason is None:
                if completion.text:
                    events += template.fill(completion.text)
                continue
            if piece := _piece(job, completion, self._parsers[completion.index]):
                events += event(job.chunk([piece], self._used(output)))
        return events

    def _open(self, index: int, output: RequestOutput) -> bytes:
        """The chunk with the role, before an answer's first token."""
        job = self._job
        self._parsers[index] = job.new_parser()
        if self._only_text:
            self._templates[index] = EventTemplate(partial(_text_only, job, index, self._no_usage))
        opening = ChatChunkChoice(index, ChatDelta(role=job.role, content=job.echo))
        prompt_ids = output.prompt_token_ids if job.body.return_token_ids else UNSET
        return event(job.chunk([opening], self._used(output), prompt_ids))

    def _used(self, output: RequestOutput) -> Usage | UnsetType | None:
        return _usage(output, self._completion_tokens) if self._continuous_usage else self._no_usage

    def end(self) -> bytes:
        if self._last is None or not self._include_usage:
            return DONE
        return event(self._job.chunk([], _usage(self._last, self._completion_tokens))) + DONE


def _text_only(job: _Job, index: int, used: UnsetType | None, text: str) -> ChatChunk:
    return job.chunk([ChatChunkChoice(index, ChatDelta(content=text))], used)


def _piece(job: _Job, completion: CompletionOutput, parser: AnswerParser) -> ChatChunkChoice | None:
    """The news of one answer; None when all of it is held back for now."""
    logprobs = _logprobs(job, completion)
    ids = completion.token_ids if job.body.return_token_ids else UNSET
    delta = parser.take(completion).delta()
    if not (delta or completion.finish_reason or logprobs is not None or (ids is not UNSET and ids)):
        return None
    piece = ChatChunkChoice(
        completion.index,
        delta or ChatDelta(),
        logprobs,
        parser.finish_reason(completion.finish_reason),
        token_ids=ids,
    )
    if completion.finish_reason is not None:
        piece.stop_reason = completion.stop_reason
    return piece
