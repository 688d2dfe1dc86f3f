"""Turn bodies of completions and chat completions into requests for the engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from functools import partial

from octavo.chat.answer import AnswerParser
from octavo.chat.breakpoints import Keep, Marked
from octavo.chat.infill import Around
from octavo.chat.render import Rendered
from octavo.entrypoints.dialect import CheckedRequest, Prepared
from octavo.entrypoints.errors import bad_request
from octavo.entrypoints.fields.prompt_cache import marked, whole_seconds
from octavo.entrypoints.generation.chat import check_all, prepare_chat, read_messages
from octavo.entrypoints.generation.context import naming
from octavo.entrypoints.generation.infill import infill_prompts
from octavo.entrypoints.generation.run import TokenLimit, TopLogprobs, external_id, prepare_request, sampling_params
from octavo.entrypoints.openai.protocol import NO_LIMIT, ChatCompletionRequest, CompletionRequest
from octavo.entrypoints.openai.response_format import constraint_of

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass
class PreparedCompletion(Prepared[CompletionRequest]):
    """Prompts that are ready for the engine."""

    id: str
    created: int
    n: int
    prompt_only: bool  # echo with max_tokens 0: only the prompt's log-probabilities are wanted
    _echoed: dict[int, str] = field(default_factory=dict)  # by position: every choice repeats it

    def echoed(self, position: int) -> str:
        """Return the prompt as its choices repeat it; empty without echo."""
        if not self.body.echo:
            return ""
        if (text := self._echoed.get(position)) is None:
            text = self.texts[position]
            if text is None or self.body.truncate_prompt_tokens is not None:
                tokenizer, ids = self.state.engine.tokenizer, self.requests[position].prompt_token_ids
                text = "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
            self._echoed[position] = text
        return text


@dataclass
class PreparedChatCompletion(Prepared[ChatCompletionRequest]):
    """A conversation that is ready for the engine."""

    id: str
    created: int
    rendered: Rendered
    role: str
    echo: str  # what the answer begins with

    def new_parser(self) -> AnswerParser:
        """Make a parser of one answer."""
        return self.rendered.new_parser(self.body.include_reasoning is not False)


async def prepare_completion(checked: CheckedRequest[CompletionRequest]) -> PreparedCompletion:
    """Prepare the completions of prompts. Raises ValueError, APIError."""
    state, body = checked.state, checked.body
    completion_id = external_id(checked.http, "cmpl", body.request_id)
    max_tokens = {None: DEFAULT_MAX_TOKENS, NO_LIMIT: None}.get(body.max_tokens, body.max_tokens)
    prompt_only = bool(body.echo) and max_tokens == 0
    params = sampling_params(
        state,
        body.sampling_fields(),
        TokenLimit(1 if prompt_only else max_tokens),
        TopLogprobs(body.logprobs),
        bool(body.stream),
    )
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = body.logprobs
    prompts = body.prompts()
    options = body.prompt_options(add_special_tokens=True)
    texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
    if body.suffix:
        room, options = options.truncate_prompt_tokens, replace(options, truncate_prompt_tokens=None)
        room = state.engine.config.scheduler.max_model_len - 1 if room == -1 else room
        infilled = await infill_prompts(state, prompts, Around(body.suffix, room=room), params, "suffix")
        prompts, texts = [*infilled], [None] * len(prompts)
    limit, constraint = TokenLimit(params.max_tokens), constraint_of(body)
    requests = []
    for prompt in prompts:
        with naming({"prompt_token_ids": "prompt"}):
            requests.append(await prepare_request(state, prompt, params, options, limit, constraint))
        await asyncio.sleep(0)  # let other requests run between a thousand prompts
    created = int(time.time())
    return PreparedCompletion(checked, requests, completion_id, created, params.n, prompt_only, texts=texts)


async def prepare_chat_completion(checked: CheckedRequest[ChatCompletionRequest]) -> PreparedChatCompletion:
    """Prepare the answer to a conversation. Raises ValueError, APIError."""
    state, body = checked.state, checked.body
    completion_id = external_id(checked.http, "chatcmpl", body.request_id)
    messages = await read_messages(state, body.messages)
    keep = await _kept(checked)
    body.messages = []  # images are not kept as long as the answer takes
    if body.stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs are not available in streams; drop stream or prompt_logprobs"
        raise bad_request(message, "prompt_logprobs")
    limit = body.token_limit()
    logprobs = TopLogprobs((body.top_logprobs or 0) if body.logprobs else None, "top_logprobs")
    params = sampling_params(state, body.sampling_fields(), limit, logprobs, bool(body.stream))
    conversation = body.conversation(messages)
    conversation.keep = keep
    request, rendered = await prepare_chat(
        state,
        conversation,
        params,
        body.prompt_options(add_special_tokens=False),
        limit,
        partial(constraint_of, body),
        keep_special_tokens=body.skip_special_tokens is None,
    )
    if body.prediction is not None:
        predict, text = state.engine.input_processor.predict, body.prediction.text
        request.prediction = await state.engine.run_in_thread(predict, text)
        body.prediction = None
    continued = body.continue_final_message or not conversation.opens_answer
    role = messages[-1]["role"] if continued else state.args.response_role
    echo = messages[-1]["content"] if body.echo and messages[-1]["role"] == role else ""
    created = int(time.time())
    return PreparedChatCompletion(checked, [request], completion_id, created, rendered, role, echo)


async def _kept(checked: CheckedRequest[ChatCompletionRequest]) -> Keep | None:
    """The parts of the prompt that are to be found again. Raises APIError."""
    body = checked.body
    messages, seconds = marked(body, body.messages)
    whole = whole_seconds(body, bool(seconds))
    if not seconds:
        return Keep(whole=whole) if whole else None
    return Keep(Marked(await check_all(checked.state, messages), None, seconds), whole)
