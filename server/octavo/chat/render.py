"""A conversation as token ids: for every dialect, /tokenize, batches and `LLM.chat`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.chat.answer import AnswerParser, CountCalls, Reading, message_of
from octavo.chat.boundaries import beginnings, positions
from octavo.chat.breakpoints import cuts
from octavo.chat.budgets import budget_of, closing_in, closing_of, make_budget
from octavo.chat.earlier_thoughts import earlier_thoughts_of
from octavo.chat.messages import Conversation, images_of
from octavo.chat.options import NONE, ChatOptions
from octavo.chat.reasoning import ReasoningParser
from octavo.chat.replay import Replay, Replayed, Spoken, follow, with_thoughts
from octavo.chat.result_images import with_result_images
from octavo.chat.spelled import SpelledMarkers
from octavo.chat.structured import MARKS, Constraint, Frame, after_frame, after_reasoning, or_calls
from octavo.chat.system_messages import rendered
from octavo.chat.thought_tags import ThoughtTags
from octavo.chat.thought_tokens import ThoughtTokens
from octavo.chat.thoughts import Thoughts, thoughts_of
from octavo.chat.tools.call_turns import PROBED, frame_of
from octavo.chat.tools.choice import format_of, own_format, with_arguments_as_text
from octavo.chat.tools.formats.row import Format, Json, Params
from octavo.chat.tools.formats.table import TOOL_FORMATS
from octavo.chat.tools.harmony import STOPS, harmony_grammar, harmony_messages, nearest_effort, speaks_harmony
from octavo.chat.tools.parsers import HarmonyParser, reader_of_marks
from octavo.chat.tools.parsers.harmony import MARKS as HARMONY_MARKS
from octavo.chat.tools.plan import ToolPlan, combine_constraints, plan_tools, with_allowed_tools
from octavo.chat.tools.prompt_fallback import tell_of_tools, with_calls_as_text, with_results_as_text
from octavo.errors import FieldError
from octavo.interface.outputs import CompletionOutput
from octavo.interface.sampling_params import SamplingParams
from octavo.interface.thoughts import ThoughtBudget
from octavo.text.chat_template import TemplateLimitError, check_variables
from octavo.text.content_format import with_parts
from octavo.text.messages import for_template

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

_TAG_TOKENS = 64  # at the end of a prompt that surely hold a tag and the space around it

_RECIPIENT = ">>>"  # in front of messages that name who is to read them

Tokenize = Callable[[str], list[int]]
_Text = tuple[str, Callable[[], list[str]]]  # a prompt, and what finds the texts with which it begins
_TextOf = Callable[[Conversation], _Text]


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
    tags: ThoughtTags | None = None  # around thoughts; None: these are not told from the answer
    inside_reasoning: bool = False  # the prompt ends inside the model's reasoning
    may_reason: bool = True  # the prompt ends where thoughts may begin, or inside them
    tags_are_special: bool = False  # tags are special tokens, which an answer's text must keep
    token_id: Callable[[str], int | None] = field(default=lambda _: None, repr=False)  # of a text that is one token
    find_boundaries: Callable[[], list[int]] = field(default=list, repr=False)  # see `octavo.chat.boundaries`
    marks: Format | None = None  # the row whose marks stand around answers, where there are any
    marker_ids: Mapping[str, int] = field(default_factory=dict, repr=False)  # markers that are tokens of their own
    decode: Callable[[Sequence[int]], str] = field(default=lambda _: "", repr=False)  # markers included
    encode: Tokenize = field(default=lambda _: [], repr=False)  # of a text within an answer
    count_calls: CountCalls | None = field(default=None, repr=False)  # of an answer that is complete
    boundaries: Sequence[int] = ()  # of these, where the model has a use for them
    cuts: Sequence[
        tuple[int, float]
    ] = ()  # characters of the text that are to be found again, and for how many seconds
    kept: Sequence[tuple[int, float]] = ()  # the same in tokens
    replayed: Replayed | None = None  # the text with answers as they were spoken
    num_messages: int = 0  # before the answer
    budget: ThoughtBudget | None = None  # of thoughts, where there may be any
    frame: Frame | None = None  # around the thoughts of an answer that is calls

    def with_boundaries(self) -> Rendered:
        """The same with its boundaries."""
        return replace(self, boundaries=self.find_boundaries())

    def prompt(self, images: Sequence[Any]) -> Any:
        """The prompt for the engine. ``images`` are those of the conversation, decoded or processed."""
        prompt: dict[str, Any] = {"prompt_token_ids": self.ids}
        if images:
            prompt["multi_modal_data"] = {"image": images}
        if self.boundaries:
            prompt["boundaries"] = self.boundaries
        return prompt if len(prompt) > 1 else self.ids

    @property
    def has_grammar(self) -> bool:
        """True if `grammar` may be one."""
        return self.constraint is not None or (self.plan is not None and self.plan.free is not None)

    def grammar(self) -> str | None:
        """The grammar of the whole output: thoughts, then the constrained text, or calls. Raises FieldError."""
        if self.constraint is None:
            return self._free_grammar()
        grammar = self.constraint.grammar(self.options.strict_json_schema)
        calls = self.plan.or_calls if self.plan is not None else None
        if self.harmony:
            demanded = self.plan is not None and self.plan.constraint is not None
            return grammar if self.continues else harmony_grammar(None if demanded else grammar, calls, self.token_id)
        if calls is not None and self.plan is not None and self.plan.constraint is not None:
            tags = self.tags.around if self.tags is not None else None
            frame = self.frame or Frame()
            return after_frame(calls, frame, self.may_reason, self.inside_reasoning, self.token_id, tags)
        if calls is not None:
            grammar = or_calls(grammar, calls, self.token_id)
        if self.tags is not None and self.may_reason:
            grammar = after_reasoning(grammar, self.inside_reasoning, self.token_id, self.tags.around)
        return grammar

    def _free_grammar(self) -> str | None:
        """The grammar of an answer that is free but for its calls; None: these are free, too."""
        plan = self.plan
        if plan is None or plan.free is None or (self.harmony and self.continues):
            return None
        marks = (*plan.format.marks, *(self.tags.around if self.tags is not None else ()))
        return plan.free.grammar(marks, plan.max_calls, self.token_id)

    def add_stop_tokens(self, params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
        """Add the tokens that end an answer in the model's format and that ``eos_token_ids`` lacks."""
        if self.harmony and not params.ignore_eos:
            stops = {number for token in STOPS if (number := self.token_id(token)) is not None}
            known = {*eos_token_ids, *params.stop_token_ids}
            params.stop_token_ids = [*params.stop_token_ids, *sorted(stops - known)]

    @property
    def needs_special_tokens(self) -> bool:
        """True if special tokens separate the parts of an answer."""
        calls = self.plan is not None and self.plan.forced is None and self.plan.format.special
        return self.harmony or calls or self.tags_are_special

    def message(self, completion: CompletionOutput, shows_marks: bool) -> dict[str, Any]:
        """An answer that is complete, as a message of OpenAI's API. ``shows_marks``: its text has special tokens."""
        if self.needs_special_tokens and not shows_marks:
            ids = completion.token_ids
            if completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str):
                ids = ids[:-1]  # the token that has ended it
            completion = replace(completion, text=self.decode(ids))
        return message_of(self.new_parser().parse(completion))

    @property
    def is_plain(self) -> bool:
        """True if all text of an answer is content."""
        return self.plan is None and not self.harmony and self.tags is None and self.marks is None

    @property
    def may_think(self) -> bool:
        """True if thoughts are told from answers."""
        return self.tags is not None or (self.harmony and self.options.reasoning_parser != NONE)

    def _thought_tokens(self) -> ThoughtTokens | None:
        if not self.may_think:
            return None
        tags = ((), ()) if self.tags is None else (self.tags.openings, self.tags.closings)
        openings, closings = ({self.marker_ids[tag] for tag in some if tag in self.marker_ids} for some in tags)
        row = self.plan.format if self.plan is not None else self.marks
        again = row is not None and bool(row.thoughts[0])
        if again and not openings:  # it is not seen in the tokens that they begin again
            closings = set()
        return ThoughtTokens(self.inside_reasoning, openings, closings, self.encode, again)

    def new_parser(self, show_reasoning: bool = True) -> AnswerParser:
        """Return a new parser for one answer."""
        spelled = SpelledMarkers(self.marker_ids, self.decode) if self.marker_ids else None
        splits = self.options.reasoning_parser != NONE
        reading = Reading(show_reasoning, splits, self.count_calls, spelled, self._thought_tokens())
        if self.harmony:
            names = self.plan.names if self.plan is not None else ()
            harmony = HarmonyParser(names, self.plan is not None, self.continues)
            return AnswerParser(None, harmony, self.plan, reading)
        calls = self.plan.new_parser if self.plan is not None else None
        reasoning = ReasoningParser(self.inside_reasoning, calls, self.tags) if self.tags is not None else None
        if calls is None and self.marks is not None:
            calls = partial(reader_of_marks, self.marks)
        return AnswerParser(reasoning, calls() if calls is not None else None, self.plan, reading)


def render(
    conversation: Conversation,
    options: ChatOptions,
    tokenizer: Tokenizer | None,
    tokenize: Tokenize,
    placeholder: Callable[[], str],
    find_constraint: Callable[[], Constraint | None] = no_constraint,
    replay: Replay | None = None,
) -> Rendered:
    """The prompt of a conversation, how its answers are constrained and how they are read. Raises ValueError, mostly
    FieldError.

    ``tokenize`` gives the ids of the prompt's text, ``placeholder`` the text that stands for an image,
    ``find_constraint`` the form of the answer that the client asks for, ``replay`` answers as they were spoken.
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
    thoughts = Thoughts(None, "none") if harmony else thoughts_of(template, options.thought_format)
    text_of = partial(
        _text, options=options, tokenizer=tokenizer, template=template, placeholder=placeholder, thoughts=thoughts
    )
    text, parts = text_of(conversation)
    replayed = None
    if replay is not None and (known := replay.known(conversation.messages)):
        conversation, (text, parts), replayed = _replayed(conversation, known, (text, parts), text_of)
        tokenize = replayed.tokenizing(tokenize)
    if harmony and continues and plan is not None and plan.constraint is not None:
        raise FieldError("tool_choice demands a call, which cannot continue a final message; drop one", "tool_choice")
    ids = _after_earlier(tokenize(text), conversation.earlier_ids, tokenizer.bos_token_id)
    if plan is not None and thoughts.tags is not None:
        plan.format = replace(plan.format, texts=plan.format.texts or thoughts.tags.texts)
    elif plan is not None and options.reasoning_parser == NONE:
        plan.format = replace(plan.format, thoughts=("", ""))
    images = images_of(conversation.messages)

    def find_boundaries() -> list[int]:
        if conversation.earlier_ids:
            return []
        return positions(parts(), ids, tokenize, tokenizer.all_special_ids)

    reasoning = _reasoning_of(thoughts, conversation, ids, tokenizer)
    form = plan, constraint, harmony, continues, *reasoning
    made = Rendered(ids, options, text, images, *form, token_id, find_boundaries)
    found = {marker: token_id(marker) for marker in _markers(made)}
    whole = {marker: number for marker, number in found.items() if number is not None}
    probe_text = partial(_probe_text, conversation, options, tokenizer, template, thoughts)
    demanded = plan is not None and plan.constraint is not None and plan.or_calls is not None and not harmony
    frame = frame_of(probe_text, plan.format) if demanded and plan is not None else None
    budget = _budget(replace(made, frame=frame), conversation, options, tokenizer, probe_text)
    return replace(
        made,
        replayed=replayed,
        num_messages=len(conversation.messages),
        budget=budget,
        frame=frame,
        marks=_marks(thoughts, template),
        cuts=_cuts(text, conversation, text_of),
        marker_ids=whole,
        decode=partial(tokenizer.decode, skip_special_tokens=False),
        encode=partial(tokenizer.encode, add_special_tokens=False),
    )


def _replayed(
    conversation: Conversation,
    known: Mapping[int, Sequence[Spoken]],
    plain: _Text,
    text_of: _TextOf,
) -> tuple[Conversation, _Text, Replayed]:
    """The prompt with answers as they were spoken, and its conversation: with the thoughts that the client left out, if
    that makes more of them what they were. ``plain``: the prompt of what it sent."""
    found = follow(plain[0], known)
    messages, keep = with_thoughts(conversation.messages, known), conversation.keep
    if len(found.answers) == len(known) or messages == conversation.messages:
        return conversation, plain, found
    if keep is not None and keep.marked is not None:
        marked = replace(keep.marked, messages=with_thoughts(keep.marked.messages, known))
        keep = replace(keep, marked=marked)
    whole = replace(conversation, messages=messages, keep=keep)
    with suppress(ValueError):
        text = text_of(whole)
        other = follow(text[0], known)
        if len(other.answers) > len(found.answers):
            return whole, text, other
    return conversation, plain, found


def _cuts(text: str, conversation: Conversation, text_of: _TextOf) -> list[tuple[int, float]]:
    """The places at which the client wants the prompt's beginning found again."""
    marked = conversation.keep.marked if conversation.keep is not None else None
    if marked is None or conversation.earlier_ids:
        return []
    copy = replace(conversation, messages=marked.messages, listed=marked.listed)
    with suppress(ValueError):  # of a template that takes no marks: then it is not said where they would be
        return cuts(text_of(copy)[0], text, marked.seconds)
    return []


def _marks(thoughts: Thoughts, template: str) -> Format | None:
    """The row whose marks stand around answers."""
    if (tags := thoughts.tags) is not None:
        rows = (TOOL_FORMATS[name] for name in tags.names if name in TOOL_FORMATS)
        if row := next((row for row in rows if row.thoughts[0]), None):  # thoughts may come again, behind text
            return replace(row, texts=row.texts or tags.texts, thoughts=tags.around if row.suffix else row.thoughts)
        if tags.texts:
            return Format("text", Json(), texts=tags.texts)
    found = own_format(template) if _RECIPIENT in template else None
    return found.row if found is not None and found.row.begun else None


def _markers(rendered: Rendered) -> set[str]:
    """The texts that tell calls and thoughts from other text."""
    if rendered.harmony:
        return set(HARMONY_MARKS)
    found = {*rendered.tags.openings, *rendered.tags.closings} if rendered.tags is not None else set[str]()
    if rendered.plan is not None and rendered.plan.forced is None:
        row = rendered.plan.format
        ends = (row.arguments.value_end,) if isinstance(row.arguments, Params) else ()
        found |= {*row.markers, *row.marks, *row.section, row.call, row.call_end, *ends}
    return found - {""}


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
    thoughts: Thoughts,
) -> tuple[str, Callable[[], list[str]]]:
    """The prompt's text, and what finds the texts with which it begins (`beginnings`)."""
    given = conversation.chat_template_kwargs or {}
    check_variables(given, "chat_template_kwargs")
    harmony, effort = speaks_harmony(options, template), conversation.reasoning_effort
    effort = nearest_effort(effort) if harmony and effort is not None else effort
    implied, wished = thoughts.switches.variables(conversation.thinking, effort)
    earlier = earlier_thoughts_of(template, options.thought_format)
    kept = earlier.variables(options.preserve_reasoning, conversation.keeps_thoughts)
    variables = {**kept, **implied, **options.default_chat_template_kwargs, **wished, **given}
    messages, tools = _with_tools(conversation, options, template)
    messages = harmony_messages(messages) if harmony else for_template(messages, template)

    def write(is_part: bool, messages: list[dict[str, Any]]) -> str:
        return tokenizer.apply_chat_template(
            with_parts(messages, template, placeholder()),
            tools=tools,
            documents=conversation.documents,
            add_generation_prompt=not is_part and conversation.opens_answer,
            continue_final_message=not is_part and bool(conversation.continue_final_message),
            chat_template=template,
            **variables,
        )

    def text_of(messages: list[dict[str, Any]], is_part: bool = False) -> str:
        return with_result_images(messages, partial(write, is_part), placeholder())

    try:
        text = rendered(messages, text_of)
    except TemplateLimitError as error:
        own = "chat_template" if conversation.chat_template is not None else None
        raise FieldError(str(error), own or ("chat_template_kwargs" if given else "messages")) from None
    part_of = partial(text_of, is_part=True)
    refuses_thoughts = conversation.thinking is False or (conversation.thinking is None and effort == "none")
    if refuses_thoughts and thoughts.tags is not None and thoughts.switches.off is None and conversation.opens_answer:
        text += thoughts.tags.ended(text)  # the template cannot switch them off
    return text, lambda: beginnings(messages, text, lambda part: rendered(part, part_of))


def _budget(
    made: Rendered,
    conversation: Conversation,
    options: ChatOptions,
    tokenizer: Tokenizer,
    text_of: Callable[[list[dict[str, Any]]], str],
) -> ThoughtBudget | None:
    """The limit of thoughts that a request asks for; None where the prompt has ended them. Raises FieldError."""
    asked = budget_of(conversation)
    if asked is None or (made.tags is not None and not made.may_reason):
        return None
    num_tokens, is_hint = asked
    closing = ""
    if made.tags is not None:
        calls = made.frame.thoughts[1] if made.frame is not None and made.frame.thoughts is not None else ""
        closing = options.reasoning_budget_message + (closing_in(made.tags, calls) or closing_of(made.tags, text_of))
    encode = partial(tokenizer.encode, add_special_tokens=False)
    try:
        return make_budget(num_tokens, made.tags, made.inside_reasoning, closing, encode)
    except ValueError as error:
        if is_hint:
            return None
        raise FieldError(f"{conversation.budget_field} {error}", conversation.budget_field) from None


def _probe_text(
    conversation: Conversation,
    options: ChatOptions,
    tokenizer: Tokenizer,
    template: str,
    thoughts: Thoughts,
    messages: list[dict[str, Any]],
) -> str:
    """The text of other messages, with the switches of the conversation; a prompt where the user's is the last."""
    answered = messages[-1]["role"] == "assistant"
    parameters = {"type": "object", "properties": {}, "required": []}
    tools = [{"type": "function", "function": {"name": PROBED, "description": "", "parameters": parameters}}]
    changes: Any = {"listed": None, "tool_choice": None, "documents": None, "continue_final_message": None}
    probe = replace(conversation, messages=messages, tools=tools, add_generation_prompt=not answered, **changes)
    return _text(probe, options, tokenizer, template, str, thoughts)[0]


def _with_tools(
    conversation: Conversation, options: ChatOptions, template: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools as the template takes them: a template that knows no tools gets them in the messages."""
    messages, no_calls = conversation.messages, conversation.tool_choice == "none"
    tools = conversation.tools if conversation.listed is None else conversation.listed or None
    tools = None if no_calls and options.exclude_tools_when_tool_choice_none else tools
    if tools or any("tool_calls" in message for message in messages):
        calls = format_of(template, options.call_format)
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


def _reasoning_of(
    thoughts: Thoughts, conversation: Conversation, ids: list[int], tokenizer: Tokenizer
) -> tuple[ThoughtTags | None, bool, bool, bool]:
    """The tags around thoughts; whether the prompt ends inside them; whether it ends where they may begin; whether
    tags are special tokens."""
    tags = thoughts.tags
    if tags is None:
        return None, False, False, False
    prompt_end = tokenizer.decode(ids[-_TAG_TOKENS:], skip_special_tokens=False)
    inside = thoughts.inside(prompt_end)
    if conversation.continue_final_message:
        begun = conversation.messages[-1]["content"]
        inside = inside or begun.rfind(tags.opening) > begun.rfind(tags.closing)
    may_reason = inside or not (conversation.continue_final_message or tags.closed_by(prompt_end))
    special = tokenizer.all_special_ids
    marks = [mark for tag in tags.around for mark in MARKS.findall(tag)]
    return tags, inside, may_reason, any(tokenizer.backend.token_to_id(mark) in special for mark in marks)
