"""From a conversation to a request for the engine: the chat template, tools, reasoning and constraints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.chat.answer import AnswerParser
from octavo.chat.messages import (
    Conversation,
    check_messages,
    check_texts,
    images_of,
)
from octavo.chat.reasoning import ReasoningParser, begins_inside_reasoning
from octavo.chat.structured import Constraint, after_reasoning, or_calls
from octavo.chat.system_messages import rendered
from octavo.chat.tools.choice import format_of, with_arguments_as_text
from octavo.chat.tools.harmony import (
    STOPS,
    harmony_grammar,
    harmony_messages,
    nearest_effort,
    speaks_harmony,
)
from octavo.chat.tools.parsers import HarmonyParser
from octavo.chat.tools.plan import ToolPlan, apply_allowed_tools, combine_constraints, plan_tools
from octavo.chat.tools.prompt_fallback import inject_tool_prompt
from octavo.engine.input_processor import Prompt
from octavo.entrypoints.errors import APIError, bad_request
from octavo.entrypoints.generation.run import PromptOptions, prepare_request
from octavo.entrypoints.state import ServerState
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.sampling_params import SamplingParams
from octavo.multimodal.items import ImageFeatures
from octavo.text.chat_template import TemplateLimitError, check_variables
from octavo.text.content_format import with_parts
from octavo.text.messages import for_template

_TAG_TOKENS = 12  # at the end of a prompt that surely hold a tag and the space around it
_MANY_MESSAGES = 500  # from which checking them is worth a thread
_LONG_CHAT = 20_000  # characters from which rendering and tokenising is worth a thread
_QUICK_STEPS, _QUICK_BYTES = 200_000, 4 << 20  # a template that takes more goes on in a thread


@dataclass
class ChatRequest:
    """A conversation that is ready for the engine, and how its answers are parsed."""

    request: EngineCoreRequest
    plan: ToolPlan | None
    inside_reasoning: bool  # the prompt ends inside the model's reasoning
    harmony: bool = False  # answers are in the format of gpt-oss
    continues: bool = False  # the prompt ends inside the answer

    def new_parser(self, state: ServerState, show_reasoning: bool = True) -> AnswerParser:
        """A parser of one answer."""
        if self.harmony:
            names = self.plan.names if self.plan is not None else ()
            harmony = HarmonyParser(names, self.plan is not None, self.continues)
            return AnswerParser(None, harmony, self.plan, show_reasoning)
        calls = self.plan.new_parser if self.plan is not None else None
        reasoning = ReasoningParser(self.inside_reasoning, calls) if state.chat_options.reasoning_parser else None
        tools = calls() if calls is not None else None
        return AnswerParser(reasoning, tools, self.plan, show_reasoning)

    def is_plain(self, state: ServerState) -> bool:
        """Whether all text of an answer is content."""
        return self.plan is None and not self.harmony and state.chat_options.reasoning_parser is None


async def read_messages(state: ServerState, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
    asked: int | None,
    asked_field: str,
    find_constraint: Callable[[], Constraint | None],
    keep_special_tokens: bool,
) -> ChatRequest:
    """The request, with a prompt from the chat template. Raises ValueError, APIError naming the field.

    ``asked`` and ``asked_field`` are as for `prepare_request`. ``find_constraint`` gives the client's constraint.
    ``keep_special_tokens``: the output may hold special tokens, if the tool format needs them.
    """
    features = await _read_images(state, conversation)
    ids, plan, constraint = await _interpret(state, conversation, options.for_tenant, find_constraint)
    if plan is not None and plan.parser.needs_special_tokens and keep_special_tokens:
        params.skip_special_tokens = False
    if speaks_harmony(state.chat_options, _template(state, conversation)):
        return await _prepare_harmony(
            state,
            plan,
            params,
            partial(
                prepare_request, state, with_images(ids, features), params, options, asked, asked_field, constraint
            ),
            bool(conversation.continue_final_message),
        )
    prompt = with_images(ids, features)
    request = await prepare_request(state, prompt, params, options, asked, asked_field, constraint)
    inside = _ends_inside_reasoning(state, ids)
    if request.grammar is not None and state.engine.tokenizer is not None:
        token_id = state.engine.tokenizer.backend.token_to_id
        if plan is not None and plan.or_calls is not None:
            request.grammar = or_calls(request.grammar, plan.or_calls, token_id)
        if state.chat_options.reasoning_parser is not None:
            request.grammar = after_reasoning(request.grammar, inside, token_id)
    return ChatRequest(request, plan, inside)


async def _interpret(
    state: ServerState,
    conversation: Conversation,
    options: PromptOptions,
    find_constraint: Callable[[], Constraint | None],
) -> tuple[list[int], ToolPlan | None, Constraint | None]:
    """`interpret`, in a thread where it may take long: for a long chat, tools, a template of the request's own, which
    is to be compiled, and one that takes many steps."""
    from octavo.text.template_meter import Meter, metered

    size = sum(len(message["content"]) for message in conversation.messages)
    if size <= _LONG_CHAT and not conversation.tools and conversation.chat_template is None:
        with metered(Meter(steps=_QUICK_STEPS, size=_QUICK_BYTES)) as meter:
            try:
                return interpret(state, conversation, options, find_constraint)
            except (ValueError, APIError):
                if meter.why is None:
                    raise
    found: tuple[list[int], ToolPlan | None, Constraint | None] = await state.engine.run_in_thread(
        interpret, state, conversation, options, find_constraint
    )
    return found


async def _read_images(state: ServerState, conversation: Conversation) -> list[ImageFeatures]:
    images = images_of(conversation.messages)
    features = await state.images.read(images)
    if images:
        check_texts(conversation.messages, images, state.engine.input_processor.images.placeholder)
    return features


def with_images(ids: list[int], features: list[ImageFeatures]) -> Prompt:
    """A prompt with a placeholder for each image, and these."""
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": features}} if features else ids


async def count_prompt(
    state: ServerState,
    conversation: Conversation,
    options: PromptOptions,
    find_constraint: Callable[[], Constraint | None],
) -> list[int]:
    """Token ids of a conversation that is not to be answered, its images' included. Raises ValueError, APIError."""
    features = await _read_images(state, conversation)
    ids, _, _ = await state.engine.run_in_thread(interpret, state, conversation, options, find_constraint)
    return state.engine.input_processor.images.processor.expand(ids, features)[0] if features else ids


async def _prepare_harmony(
    state: ServerState,
    plan: ToolPlan | None,
    params: SamplingParams,
    prepare: Callable[[], Awaitable[EngineCoreRequest]],
    continues: bool,
) -> ChatRequest:
    assert state.engine.tokenizer is not None
    token_id = state.engine.tokenizer.backend.token_to_id
    params.skip_special_tokens = False  # they tell the parts of an answer
    if not params.ignore_eos:
        stops = {number for token in STOPS if (number := token_id(token)) is not None}
        known = {*state.engine.input_processor.eos_token_ids, *params.stop_token_ids}
        params.stop_token_ids = [*params.stop_token_ids, *sorted(stops - known)]
    request = await prepare()
    calls = plan.or_calls if plan is not None else None
    demanded = plan is not None and plan.constraint is not None
    if demanded and continues:
        raise bad_request("tool_choice demands a call, which cannot continue a final message; drop one", "tool_choice")
    if request.grammar is not None and not continues:
        request.grammar = harmony_grammar(None if demanded else request.grammar, calls, token_id)
    return ChatRequest(request, plan, False, harmony=True, continues=continues)


def interpret(
    state: ServerState,
    conversation: Conversation,
    options: PromptOptions,
    find_constraint: Callable[[], Constraint | None],
) -> tuple[list[int], ToolPlan | None, Constraint | None]:
    """The prompt's token ids, how tools are called, and the constraint on the answer. Raises ValueError, APIError."""
    constraint = find_constraint()
    apply_allowed_tools(conversation)
    plan = None
    if conversation.tools or conversation.tool_choice:
        plan = plan_tools(conversation, state.chat_options, _template(state, conversation))
    if plan is not None:
        assert state.engine.tokenizer is not None
        constraint = combine_constraints(constraint, plan, state.engine.tokenizer.backend.token_to_id)
    return _render(state, conversation, options), plan, constraint


def _ends_inside_reasoning(state: ServerState, ids: list[int]) -> bool:
    name, tokenizer = state.chat_options.reasoning_parser, state.engine.tokenizer
    if name is None or tokenizer is None:
        return False
    return begins_inside_reasoning(name, tokenizer.decode(ids[-_TAG_TOKENS:], skip_special_tokens=False))


def _render(state: ServerState, conversation: Conversation, options: PromptOptions) -> list[int]:
    """The conversation as token ids. Raises ValueError."""
    template, messages = _template(state, conversation), conversation.messages
    given = conversation.chat_template_kwargs or {}
    check_variables(given, "chat_template_kwargs")
    variables = {**state.chat_options.default_chat_template_kwargs, **given}
    harmony = speaks_harmony(state.chat_options, template)
    if (effort := conversation.reasoning_effort) is not None:
        variables.setdefault("reasoning_effort", nearest_effort(effort) if harmony else effort)
    tokenizer = state.engine.tokenizer
    assert tokenizer is not None
    no_calls = conversation.tool_choice == "none"
    tools = None if no_calls and state.chat_options.exclude_tools_when_tool_choice_none else conversation.tools
    if tools or any("tool_calls" in message for message in messages):
        calls = format_of(template, state.chat_options.tool_call_parser)
        if tools and not no_calls and calls.generic:
            messages, tools = inject_tool_prompt(messages, tools), None
        elif calls.arguments_as_text:
            messages = [with_arguments_as_text(message) for message in messages]
    apply = partial(
        tokenizer.apply_chat_template,
        tools=tools,
        documents=conversation.documents,
        add_generation_prompt=conversation.opens_answer,
        continue_final_message=bool(conversation.continue_final_message),
        chat_template=template,
        **variables,
    )
    messages = harmony_messages(messages) if harmony else for_template(messages, template)

    def text_of(messages: list[dict[str, Any]]) -> str:
        return apply(with_parts(messages, template, state.engine.input_processor.images.placeholder))

    try:
        text = rendered(messages, text_of)
    except TemplateLimitError as error:
        own = "chat_template" if conversation.chat_template is not None else None
        raise bad_request(error, own or ("chat_template_kwargs" if given else "messages")) from None
    ids = state.engine.input_processor.tokenize(
        text, options.add_special_tokens, options.truncate_prompt_tokens, options.cache_salt
    )
    earlier = conversation.earlier_ids
    if earlier and ids[:1] == earlier[:1] and ids[0] == tokenizer.bos_token_id:
        ids = ids[1:]
    return [*earlier, *ids] if earlier else ids


def _template(state: ServerState, conversation: Conversation) -> str:
    """The chat template of a request. Raises ValueError."""
    tokenizer = state.engine.tokenizer
    if tokenizer is None:
        raise bad_request(
            "messages need a tokenizer, but the engine runs without one (--skip-tokenizer-init)", "messages"
        )
    if conversation.chat_template is not None and not state.chat_options.trust_request_chat_template:
        raise bad_request(
            "chat_template in requests needs the server's --trust-request-chat-template; drop it", "chat_template"
        )
    template = conversation.chat_template or state.chat_options.chat_template
    return tokenizer.get_chat_template(template, tools=bool(conversation.tools))
