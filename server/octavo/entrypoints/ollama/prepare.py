"""Turn Ollama's bodies into the conversation of all dialects, and into a request for the engine."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.chat.answer import AnswerParser
from octavo.chat.infill import Around
from octavo.chat.messages import Conversation, check_messages
from octavo.chat.options import NONE
from octavo.chat.render import Rendered
from octavo.chat.structured import Constraint, make_constraint
from octavo.chat.thoughts import thoughts_of
from octavo.chat.tools.harmony import speaks_harmony
from octavo.chat.tools.plan import plan_tools
from octavo.entrypoints.dialect import CheckedRequest, Prepared
from octavo.entrypoints.errors import bad_request, shown
from octavo.entrypoints.fields.shapes import SHAPES
from octavo.entrypoints.generation.chat import prepare_chat as prepare_conversation
from octavo.entrypoints.generation.context import in_words_of, naming, without_oldest_that_fits
from octavo.entrypoints.generation.infill import infill_prompts
from octavo.entrypoints.generation.run import (
    PromptOptions,
    TokenLimit,
    TopLogprobs,
    prepare_request,
    sampling_params,
)
from octavo.entrypoints.ollama.protocol import ChatRequest, GenerateRequest, Options
from octavo.entrypoints.state import ServerState
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.sampling_params import SamplingParams
from octavo.multimodal.items import ImagePart
from octavo.multimodal.pieces import Pieces
from octavo.system.logging_setup import log_once

logger = logging.getLogger(__name__)

_Ready = tuple[EngineCoreRequest, Rendered]
_OF_IDS = {"prompt_token_ids": "context"}  # where the client's tokens are
_RAW = "raw, suffix, or the model's own"
_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    **{name: name for name in SHAPES},
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_OPTIONS = {ours: f"options.{name}" for name, ours in _SAMPLING.items()} | {"max_tokens": "options.num_predict"}


@dataclass
class PreparedAnswer(Prepared[Any]):
    """A prompt that is ready for the engine."""

    rendered: Rendered

    @property
    def model(self) -> str:
        """The name that the client uses."""
        return self.body.model or self.state.model_name

    def new_parser(self) -> AnswerParser:
        """Make a parser of the answer."""
        return self.rendered.new_parser(self.body.think is not False)


async def prepare_chat(checked: CheckedRequest[ChatRequest]) -> PreparedAnswer | None:
    """Prepare the answer to a conversation; None where it is empty. One that is too long loses its oldest messages, as
    few as will do, unless ``truncate`` is false. Raises ValueError, APIError."""
    state, body = checked.state, checked.body
    _check(state, body)
    if not body.messages:
        if body.tools:  # wrong ones are refused, whatever else is asked
            empty = Conversation([{"role": "user", "content": ""}], body.tools)
            plan_tools(empty, state.chat_options, template_of(state) or "")
        return None
    conversation = chat_conversation(body)
    body.messages = None  # images are not kept as long as the answer takes
    attempt = partial(_render, state, body)
    request, rendered = await (
        attempt(conversation) if body.truncate is False else without_oldest_that_fits(conversation, attempt)
    )
    return PreparedAnswer(checked, [request], rendered)


async def prepare_generate(checked: CheckedRequest[GenerateRequest]) -> PreparedAnswer | None:
    """Prepare the answer to a prompt; None where it is empty. Raises ValueError, APIError."""
    state, body = checked.state, checked.body
    _check(state, body)
    if not body.prompt and not body.suffix:
        return None
    if body.suffix or body.raw or not template_of(state):
        request, rendered = await _prepare_raw(state, body)
    else:
        conversation = generate_conversation(body)
        body.images = None  # not kept as long as the answer takes
        request, rendered = await _render(state, body, conversation)
    return PreparedAnswer(checked, [request], rendered)


def _check(state: ServerState, body: ChatRequest | GenerateRequest) -> None:
    """Check what depends on the server. Raises APIError."""
    if body.think not in (None, False, "none") and not can_think(state):
        raise bad_request(
            f"think is not supported: the chat template of {body.model or state.model_name} shows no thoughts "
            "(--reasoning-parser names their format); drop think",
            "think",
        )
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true; set it or drop top_logprobs", "top_logprobs")
    if body.keep_alive is not None:
        log_once(
            logger, logging.INFO, "keep_alive in requests has no effect: the model stays as long as the server runs"
        )


async def _render(state: ServerState, body: ChatRequest | GenerateRequest, conversation: Conversation) -> _Ready:
    options = body.options or Options()
    params = _params(state, body, options)
    with in_words_of("messages" if isinstance(body, ChatRequest) else "prompt"), naming(_OF_IDS):
        request, rendered = await prepare_conversation(
            state,
            conversation,
            params,
            PromptOptions(add_special_tokens=False),
            limit_of(options),
            partial(constraint_of, body.format),
        )
    return _within(num_ctx_of(state, options), request), rendered


async def _prepare_raw(state: ServerState, body: GenerateRequest) -> _Ready:
    """The prompt as it is, without a chat template."""
    if body.system:
        raise bad_request(f"system needs a chat template, and there is none here ({_RAW})", "system")
    if body.images:
        raise bad_request(f"images need a chat template, and there is none here ({_RAW})", "images")
    if (body.raw or body.suffix) and body.context:
        raise bad_request("context is not for raw prompts: put the earlier text into prompt", "context")
    options = body.options or Options()
    params = _params(state, body, options)
    prompt: str | list[int] = body.prompt or ""
    if body.suffix:
        (prompt,) = await infill_prompts(state, [prompt], Around(body.suffix), params, "suffix")
    if body.context:
        prompt = [*body.context, *state.engine.input_processor.tokenize(body.prompt or "", add_special_tokens=False)]
    with in_words_of("prompt"), naming(_OF_IDS):
        request = await prepare_request(
            state,
            prompt,
            params,
            PromptOptions(),
            limit_of(options),
            constraint_of(body.format),
        )
    tags = thoughts_of("", state.chat_options.thought_format).tags
    rendered = Rendered(request.prompt_token_ids, state.chat_options, tags=tags)
    return _within(num_ctx_of(state, options), request), rendered


def _params(state: ServerState, body: ChatRequest | GenerateRequest, options: Options) -> SamplingParams:
    with naming(_OPTIONS):
        logprobs = TopLogprobs((body.top_logprobs or 0) if body.logprobs else None, "top_logprobs")
        return sampling_params(state, sampling_fields(options), limit_of(options), logprobs, body.streams)


def _within(num_ctx: int | None, request: EngineCoreRequest) -> EngineCoreRequest:
    """Keep prompt and answer together within ``num_ctx`` tokens. Raises APIError where the prompt alone takes them."""
    params, length = request.sampling_params, len(request.prompt_token_ids)
    if num_ctx is not None:
        if length >= num_ctx:
            raise bad_request(
                f"prompt has {length} tokens, but options.num_ctx is {num_ctx} for prompt and answer together; raise "
                "it (at most max_model_len) or shorten the prompt",
                "options.num_ctx",
            )
        params.max_tokens = min(params.max_tokens or num_ctx, num_ctx - length)
    return request


def template_of(state: ServerState) -> str:
    """The chat template, '' where there is none."""
    tokenizer = state.engine.tokenizer
    try:
        return "" if tokenizer is None else tokenizer.get_chat_template(state.chat_options.chat_template)
    except ValueError:
        return ""


def can_think(state: ServerState) -> bool:
    """Tell whether the server separates reasoning from answers."""
    options, template = state.chat_options, template_of(state)
    if speaks_harmony(options, template):
        return options.reasoning_parser != NONE
    return thoughts_of(template, options.thought_format).tags is not None


def num_ctx_of(state: ServerState, options: Options | None) -> int | None:
    """``options.num_ctx`` where it is less than the server takes anyway. Agents ask for a fixed number, whatever the
    model is; more than there is means all there is, as in Ollama."""
    num_ctx = options.num_ctx if options is not None else None
    return None if num_ctx is None or num_ctx >= state.engine.config.scheduler.max_model_len else num_ctx


def sampling_fields(options: Options) -> dict[str, Any]:
    """Fields of SamplingParams."""
    given = {ours: value for name, ours in _SAMPLING.items() if (value := getattr(options, name)) is not None}
    if given.get("seed") == -1:
        del given["seed"]
    return given


def limit_of(options: Options) -> TokenLimit:
    """The limit of an answer."""
    limit = options.num_predict
    return TokenLimit(None if limit is None or limit < 1 else limit, "options.num_predict", clamps=True)


def constraint_of(form: Any) -> Constraint | None:
    """The constraint that ``format`` names. Raises APIError."""
    if form in (None, ""):
        return None
    if form == "json":
        constraint = make_constraint("format", json_object=True)
    elif isinstance(form, dict):
        constraint = make_constraint("format", json=json.dumps(form))
        constraint.lenient = True
    else:
        raise bad_request(f'format must be "json" or a JSON schema, got {shown(form)}', "format")
    constraint.allows_calls = True
    return constraint


def chat_conversation(body: ChatRequest) -> Conversation:
    """The conversation of /api/chat. Raises APIError naming the message."""
    messages = check_messages(openai_messages(body.messages or []))
    return _with_think(Conversation(messages, body.tools), body.think)


def generate_conversation(body: GenerateRequest) -> Conversation:
    """The conversation that /api/generate stands for: a system prompt and a message."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    asked = _with_images(body.prompt, body.images, "images") if body.images else body.prompt or ""
    messages = check_messages([*system, {"role": "user", "content": asked}])
    return _with_think(Conversation(messages, earlier_ids=body.context or []), body.think)


def _with_think(conversation: Conversation, think: bool | str | None) -> Conversation:
    if think is not None:
        conversation.thinking = think is not False and think != "none"
    if isinstance(think, str):
        conversation.reasoning_effort = think
    return conversation


def openai_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in OpenAI's form. Calls and their results are numbered, since Ollama's need no ids: a result is that of
    the first call of its name which has none yet, else of the first call. Raises APIError naming the message."""
    waiting: list[tuple[str, Any]] = []  # ids and names of calls without results
    found = []
    for at, message in enumerate(messages):
        where = f"messages.{at}"
        known = {key: value for key, value in message.items() if key not in ("images", "thinking", "tool_name")}
        for key in ("thinking", "tool_name"):
            if not isinstance(message.get(key), str | None):
                raise bad_request(f"{where}.{key} must be a string, got {shown(message[key])}", f"{where}.{key}")
        if thinking := message.get("thinking"):
            known["reasoning_content"] = thinking
        if isinstance(calls := message.get("tool_calls"), list):
            known["tool_calls"] = [_call(call, f"call{at:04}{i:01}", waiting) for i, call in enumerate(calls)]
        if message.get("role") == "tool":
            name = message.get("tool_name", message.get("name"))
            known |= {"name": name} if name is not None else {}
            known["tool_call_id"] = message.get("tool_call_id") or _take(waiting, name)
        if images := message.get("images"):
            known["content"] = _with_images(message.get("content"), images, f"{where}.images")
        found.append(known)
    return found


def _with_images(content: Any, images: Any, where: str) -> Any:
    """A message's content with its images, which come first. Raises APIError naming the one that is no text."""
    if not isinstance(images, list):
        raise bad_request(f"{where} must be a list of images in base64, got {shown(images)}", where)
    parts: list[Any] = []
    for at, image in enumerate(images):
        if not isinstance(image, str | Pieces):
            raise bad_request(f"{where}.{at} must be an image in base64, got {shown(image)}", f"{where}.{at}")
        parts.append(ImagePart(f"{where}.{at}", image, is_base64=True))
    return [*parts, content] if content else parts


def _call(call: Any, number: str, waiting: list[tuple[str, Any]]) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call  # refused by check_messages
    given = call.get("id")
    name = call["function"].get("name")
    waiting.append((given if isinstance(given, str) and given else number, name))
    function = {key: value for key, value in call["function"].items() if key != "index"}
    return {"type": "function", **call, "id": waiting[-1][0], "function": function}


def _take(waiting: list[tuple[str, Any]], name: Any) -> str | None:
    at = next((i for i, (_, called) in enumerate(waiting) if called == name), 0)
    return waiting.pop(at)[0] if waiting else None
