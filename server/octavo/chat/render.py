"""A conversation as token ids: for every dialect, /tokenize, batches and `LLM.chat`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.chat.answer import AnswerParser
from octavo.chat.boundaries import beginnings, positions
from octavo.chat.messages import Conversation, images_of
from octavo.chat.options import ChatOptions
from octavo.chat.reasoning import ReasoningParser, begins_inside_reasoning
from octavo.chat.structured import Constraint, after_reasoning, calls_alone, or_calls
from octavo.chat.system_messages import rendered
from octavo.chat.tools.choice import format_of, with_arguments_as_text
from octavo.chat.tools.harmony import STOPS, harmony_grammar, harmony_messages, nearest_effort, speaks_harmony
from octavo.chat.tools.parsers import HarmonyParser
from octavo.chat.tools.plan import ToolPlan, combine_constraints, plan_tools, with_allowed_tools
from octavo.chat.tools.prompt_fallback import tell_of_tools, with_calls_as_text, with_results_as_text
from octavo.errors import FieldError
from octavo.interface.sampling_params import SamplingParams
from octavo.text.chat_template import TemplateLimitError, check_variables
from octavo.text.content_format import with_parts
from octavo.text.messages import for_template

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

_TAG_TOKENS = 12  # at the end of a prompt that surely hold a tag and the space around it

Tokenize = Callable[[str], list[int]]


def no_constraint() -> None:
    """The client asks for no form of the answer."""


@dataclass(frozen=True)
class Rendered:
    """A conversation that is ready for the engine: its prompt, and how its answers are constrained and read."""

    ids: list[int]  # with one placeholder for each image
    options: ChatOptions
    text: str | None = None  # None: of no chat template
    images: Sequence[Any] = ()  # in order
    plan: ToolPlan | None = None
    constraint: Constraint | None = None
    harmony: bool = False  # answers are in the format of gpt-oss
    continues: bool = False  # the prompt ends inside the answer
    inside_reasoning: bool = False  # the prompt ends inside the model's reasoning
    token_id: Callable[[str], int | None] = field(default=lambda _: None, repr=False)  # of a text that is one token
    find_boundaries: Callable[[], list[int]] = field(default=list, repr=False)  # see `octavo.chat.boundaries`
    boundaries: Sequence[int] = ()  # of these, where the model has a use for them

    def with_boundaries(self) -> Rendered:
        """The same with its boundaries."""
        return replace(self, boundaries=self.find_boundaries())

    def prompt(self, images: Sequence[Any]) -> Any:
        """The prompt for the engine. ``images`` are those of the conversation, decoded or processed."""
        if images:
            return {"prompt_token_ids": self.ids, "multi_modal_data": {"image": images}}
        return {"prompt_token_ids": self.ids, "boundaries": self.boundaries} if self.boundaries else self.ids

    def grammar(self) -> str | None:
        """The grammar of the whole output: thoughts, then the constrained text, or calls. Raises FieldError."""
        if self.constraint is None:
            return None
        grammar = self.constraint.grammar(self.options.strict_json_schema)
        calls = self.plan.or_calls if self.plan is not None else None
        if self.harmony:
            demanded = self.plan is not None and self.plan.constraint is not None
            return grammar if self.continues else harmony_grammar(None if demanded else grammar, calls, self.token_id)
        if calls is not None:
            demanded = self.plan is not None and self.plan.constraint is not None
            grammar = calls_alone(calls, self.token_id) if demanded else or_calls(grammar, calls, self.token_id)
        if calls is not None and self.plan is not None and self.plan.inside_thoughts:
            return after_reasoning(grammar, True, self.token_id, self.plan.format.thoughts)
        if self.options.reasoning_parser is not None:
            grammar = after_reasoning(grammar, self.inside_reasoning, self.token_id)
        return grammar

    def add_stop_tokens(self, params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
        """Add the tokens that end an answer in the model's format and that ``eos_token_ids`` lacks."""
        if self.harmony and not params.ignore_eos:
            stops = {number for token in STOPS if (number := self.token_id(token)) is not None}
            known = {*eos_token_ids, *params.stop_token_ids}
            params.stop_token_ids = [*params.stop_token_ids, *sorted(stops - known)]

    @property
    def needs_special_tokens(self) -> bool:
        """True if special tokens separate the parts of an answer."""
        return self.harmony or (self.plan is not None and self.plan.forced is None and self.plan.format.special)

    @property
    def is_plain(self) -> bool:
        """True if all text of an answer is content."""
        return self.plan is None and not self.harmony and self.options.reasoning_parser is None

    def new_parser(self, show_reasoning: bool = True) -> AnswerParser:
        """Return a new parser for one answer."""
        if self.harmony:
            names = self.plan.names if self.plan is not None else ()
            harmony = HarmonyParser(names, self.plan is not None, self.continues)
            return AnswerParser(None, harmony, self.plan, show_reasoning)
        calls = self.plan.new_parser if self.plan is not None else None
        reasoning = ReasoningParser(self.inside_reasoning, calls) if self.options.reasoning_parser else None
        return AnswerParser(reasoning, calls() if calls is not None else None, self.plan, show_reasoning)


def render(
    conversation: Conversation,
    options: ChatOptions,
    tokenizer: Tokenizer | None,
    tokenize: Tokenize,
    placeholder: Callable[[], str],
    find_constraint: Callable[[], Constraint | None] = no_constraint,
) -> Rendered:
    """The prompt of a conversation, how its answers are constrained and how they are read. Raises ValueError, mostly
    FieldError.

    ``tokenize`` gives the ids of the prompt's text, ``placeholder`` the text that stands for an image,
    ``find_constraint`` the form of the answer that the client asks for.
    """
    constraint = find_constraint()
    if tokenizer is None:
        raise FieldError(
            "messages need a tokenizer, but the engine runs without one (--skip-tokenizer-init)", "messages"
        )
    conversation, token_id = with_allowed_tools(conversation), tokenizer.backend.token_to_id
    template = _template(conversation, options, tokenizer)
    plan = None
    if conversation.tools or conversation.tool_choice is not None:
        plan = plan_tools(conversation, options, template)
    if plan is not None:
        constraint = combine_constraints(constraint, plan, token_id)
    harmony, continues = speaks_harmony(options, template), bool(conversation.continue_final_message)
    text, parts = _text(conversation, options, tokenizer, template, placeholder)
    if harmony and continues and plan is not None and plan.constraint is not None:
        raise FieldError("tool_choice demands a call, which cannot continue a final message; drop one", "tool_choice")
    ids = _after_earlier(tokenize(text), conversation.earlier_ids, tokenizer.bos_token_id)
    inside = not harmony and _ends_inside_reasoning(ids, options, tokenizer)
    if plan is not None and plan.format.thoughts[0]:
        plan.inside_thoughts = text.rstrip().endswith(plan.format.thoughts[0].rstrip())
    images = images_of(conversation.messages)

    def find_boundaries() -> list[int]:
        if images or conversation.earlier_ids:
            return []
        return positions(parts(), ids, tokenize, tokenizer.all_special_ids)

    form = plan, constraint, harmony, continues, inside
    return Rendered(ids, options, text, images, *form, token_id, find_boundaries)


def _template(conversation: Conversation, options: ChatOptions, tokenizer: Tokenizer) -> str:
    if conversation.chat_template is not None and not options.trust_request_chat_template:
        raise FieldError(
            "chat_template in requests needs the server's --trust-request-chat-template; drop it", "chat_template"
        )
    template = conversation.chat_template or options.chat_template
    return tokenizer.get_chat_template(template, tools=bool(conversation.tools))


def _text(
    conversation: Conversation,
    options: ChatOptions,
    tokenizer: Tokenizer,
    template: str,
    placeholder: Callable[[], str],
) -> tuple[str, Callable[[], list[str]]]:
    """The prompt's text, and what finds the texts with which it begins (`beginnings`)."""
    given = conversation.chat_template_kwargs or {}
    check_variables(given, "chat_template_kwargs")
    variables = {**options.default_chat_template_kwargs, **given}
    harmony = speaks_harmony(options, template)
    if (effort := conversation.reasoning_effort) is not None:
        variables.setdefault("reasoning_effort", nearest_effort(effort) if harmony else effort)
    messages, tools = _with_tools(conversation, options, template)
    messages = harmony_messages(messages) if harmony else for_template(messages, template)

    def text_of(messages: list[dict[str, Any]], is_part: bool = False) -> str:
        return tokenizer.apply_chat_template(
            with_parts(messages, template, placeholder()),
            tools=tools,
            documents=conversation.documents,
            add_generation_prompt=not is_part and conversation.opens_answer,
            continue_final_message=not is_part and bool(conversation.continue_final_message),
            chat_template=template,
            **variables,
        )

    try:
        text = rendered(messages, text_of)
    except TemplateLimitError as error:
        own = "chat_template" if conversation.chat_template is not None else None
        raise FieldError(str(error), own or ("chat_template_kwargs" if given else "messages")) from None
    part_of = partial(text_of, is_part=True)
    return text, lambda: beginnings(messages, text, lambda part: rendered(part, part_of))


def _with_tools(
    conversation: Conversation, options: ChatOptions, template: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools as the template takes them: a template that knows no tools gets them in the messages."""
    messages, no_calls = conversation.messages, conversation.tool_choice == "none"
    tools = conversation.tools if conversation.listed is None else conversation.listed or None
    tools = None if no_calls and options.exclude_tools_when_tool_choice_none else tools
    if tools or any("tool_calls" in message for message in messages):
        calls = format_of(template, options.tool_call_parser)
        tell = bool(tools) and not no_calls and not calls.told
        if not calls.writes and (tell or calls.told):
            messages = with_calls_as_text(messages, calls.row)
        if calls.arguments_as_text:
            messages = [with_arguments_as_text(message) for message in messages]
        if calls.needs_none:
            messages = [
                {**message, "content": message["content"] or None} if message.get("tool_calls") else message
                for message in messages
            ]
        if tell and tools:
            messages = messages if calls.writes else with_results_as_text(messages)
            return tell_of_tools(messages, tools, calls.row, results=not calls.writes), None
    return messages, tools


def _after_earlier(ids: list[int], earlier: list[int], bos_token_id: int | None) -> list[int]:
    """The ids behind those of an earlier conversation, of which only one begins with the text's first token."""
    if earlier and ids[:1] == earlier[:1] and ids[0] == bos_token_id:
        ids = ids[1:]
    return [*earlier, *ids] if earlier else ids


def _ends_inside_reasoning(ids: list[int], options: ChatOptions, tokenizer: Tokenizer) -> bool:
    name = options.reasoning_parser
    if name is None:
        return False
    return begins_inside_reasoning(name, tokenizer.decode(ids[-_TAG_TOKENS:], skip_special_tokens=False))
