"""Turn a conversation into a request for the engine: images, the prompt, then the request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from octavo.chat.messages import Conversation, check_messages, check_texts, images_of
from octavo.chat.render import Rendered, no_constraint, render
from octavo.chat.replay import Replay
from octavo.chat.structured import Constraint
from octavo.entrypoints.generation.retention import retain, with_cuts
from octavo.entrypoints.generation.run import PromptOptions, TokenLimit, prepare_request
from octavo.entrypoints.state import ServerState
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.sampling_params import SamplingParams
from octavo.multimodal.items import ImageFeatures
from octavo.system.logging_setup import log_once
from octavo.text.messages import num_billing_lines

logger = logging.getLogger(__name__)

_MANY_MESSAGES = 500  # from which checking them is worth a thread
_LONG_CHAT = 20_000  # characters from which rendering and tokenising is worth a thread
_QUICK_STEPS, _QUICK_BYTES = 200_000, 4 << 20  # a template that takes more goes on in a thread

FindConstraint = Callable[[], Constraint | None]


async def read_messages(state: ServerState, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`check_messages`, in a thread for many of them. Lines for billing that it drops are counted."""
    if lines := num_billing_lines(messages):
        state.metrics.record_stripped_lines(lines)
        log_once(logger, logging.INFO, "leaving lines for billing out of instructions (x-anthropic-billing-header)")
    return await check_all(state, messages)


async def check_all(state: ServerState, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`check_messages`, in a thread for many of them."""
    if len(messages) < _MANY_MESSAGES:
        return check_messages(messages)
    checked: list[dict[str, Any]] = await state.engine.run_in_thread(check_messages, messages)
    return checked


async def prepare_chat(
    state: ServerState,
    conversation: Conversation,
    params: SamplingParams,
    options: PromptOptions,
    limit: TokenLimit,
    find_constraint: FindConstraint,
    keep_special_tokens: bool = True,
) -> tuple[EngineCoreRequest, Rendered]:
    """Make a request, whose prompt is from the chat template; what was rendered parses its answers. Raises ValueError,
    APIError naming the field.

    ``find_constraint`` gives the client's constraint. ``keep_special_tokens``: the output may hold special tokens, if
    the tool format needs them.
    """
    features = await _read_images(state, conversation)
    rendered = await _render(state, conversation, options.for_tenant, find_constraint)
    if rendered.harmony or (rendered.needs_special_tokens and keep_special_tokens):
        params.skip_special_tokens = False
    rendered.add_stop_tokens(params, state.engine.input_processor.eos_token_ids)
    prompt, form = rendered.prompt(features), rendered.constraint
    grammar = rendered.grammar if rendered.has_grammar else None
    request = await prepare_request(state, prompt, params, options, limit, form, grammar)
    if not rendered.continues:
        count_replay(state, conversation, rendered)
    if options.truncate_prompt_tokens is None:
        retain(state, request, rendered, conversation.keep, features)
    request.thoughts = rendered.budget
    return request, replace(rendered, count_calls=state.metrics.record_calls)


def count_replay(state: ServerState, conversation: Conversation, rendered: Rendered) -> None:
    """Count whether the last answer of a conversation stands in the prompt as it was spoken."""
    last = max((at for at, m in enumerate(conversation.messages) if m["role"] == "assistant"), default=None)
    if last is not None and state.args.replay:
        replayed = rendered.replayed
        known = replayed is not None and last in replayed.known
        found = replayed is not None and last in replayed.found
        state.metrics.record_replay(None if found else "changed" if known else "unknown")


async def count_prompt(
    state: ServerState,
    conversation: Conversation,
    options: PromptOptions,
    find_constraint: FindConstraint = no_constraint,
) -> list[int]:
    """Token ids of a conversation that is not to be answered, its images' included. Raises ValueError, APIError."""
    features = await _read_images(state, conversation)
    options = options.for_tenant
    replay = state.replay(options.cache_salt)
    ids = (await state.engine.run_in_thread(render_chat, state, conversation, options, find_constraint, replay)).ids
    return state.engine.input_processor.images.processor.expand(ids, features)[0] if features else ids


async def prompt_to_pool(state: ServerState, conversation: Conversation, options: PromptOptions) -> Any:
    """The prompt of a conversation that is to be pooled. Raises ValueError, APIError."""
    features = await state.images.read(images_of(conversation.messages))
    rendered = await state.engine.run_in_thread(render_chat, state, conversation, options)
    return rendered.prompt(features)


def render_chat(
    state: ServerState,
    conversation: Conversation,
    options: PromptOptions,
    find_constraint: FindConstraint = no_constraint,
    replay: Replay | None = None,
) -> Rendered:
    """`render` with what the server is set up with. Raises ValueError."""
    processor = state.engine.input_processor

    def tokenize(text: str) -> list[int]:
        return processor.tokenize(text, options.add_special_tokens, options.truncate_prompt_tokens, options.cache_salt)

    rendered = render(
        conversation,
        state.chat_options,
        state.engine.tokenizer,
        tokenize,
        lambda: processor.images.placeholder,
        find_constraint,
        replay,
    )
    if rendered.cuts:
        rendered = with_cuts(rendered, state, tokenize, options.cache_salt)
    return rendered.with_boundaries() if processor.model.is_recurrent else rendered


async def _render(
    state: ServerState, conversation: Conversation, options: PromptOptions, find_constraint: FindConstraint
) -> Rendered:
    """`render_chat`, in a thread where it may take long: for a long chat, tools, a template of the request's own,
    which is to be compiled, and one that takes many steps."""
    from octavo.text.template_meter import Meter, metered

    work = partial(render_chat, state, conversation, options, find_constraint, state.replay(options.cache_salt))
    size = sum(len(message["content"]) for message in conversation.messages)
    if size <= _LONG_CHAT and not conversation.tools and conversation.chat_template is None:
        with metered(Meter(steps=_QUICK_STEPS, size=_QUICK_BYTES)) as meter:
            try:
                return work()
            except ValueError:
                if meter.why is None:
                    raise
    found: Rendered = await state.engine.run_in_thread(work)
    return found


async def _read_images(state: ServerState, conversation: Conversation) -> list[ImageFeatures]:
    images = images_of(conversation.messages)
    features = await state.images.read(images)
    if images:
        check_texts(conversation.messages, images, state.engine.input_processor.images.placeholder)
    return features
