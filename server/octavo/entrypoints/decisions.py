"""POST /v1/decisions, OpenAI's: questions about one input, answered by the probabilities of what the model would say.

The input is read once: the first question's read leaves it in the prefix cache, and those of the others find it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Union, get_type_hints
from uuid import uuid4

from msgspec import UNSET, UnsetType, defstruct
from pydantic import BaseModel, ConfigDict, WithJsonSchema

from octavo.chat.decisions.answers import (
    ChoiceAnswer,
    Decision,
    Notes,
    PredicateAnswer,
    RefusalAnswer,
    ScoreAnswer,
)
from octavo.chat.decisions.asking import Asking, Ways
from octavo.chat.decisions.prompts import QuestionPrompt, Renderer, num_shared, prompt_for_engine, read_params
from octavo.chat.decisions.questions import (
    ITEMS,
    KINDS,
    MAX_OPTIONS,
    MAX_QUESTIONS,
    MIN_OPTIONS,
    ROLES,
    Question,
    read_input,
    read_questions,
)
from octavo.chat.decisions.reads import Read, Reads, named_logprobs
from octavo.chat.messages import Conversation, check_texts, image_of
from octavo.chat.render import Rendered
from octavo.entrypoints.admission import check_queue
from octavo.entrypoints.dialect import CheckedRequest, Dialect, Prepared
from octavo.entrypoints.errors import bad_request
from octavo.entrypoints.fields.unsupported import UnsupportedFields
from octavo.entrypoints.fields.values import ModelBody
from octavo.entrypoints.generation.chat import render_chat
from octavo.entrypoints.generation.context import in_words_of, naming
from octavo.entrypoints.generation.run import Generation, PromptOptions
from octavo.entrypoints.lora.served import current_adapter
from octavo.entrypoints.operation import answering
from octavo.entrypoints.state import ServerState
from octavo.interface.lora import Adapter
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.outputs import RequestOutput
from octavo.multimodal.items import ImageFeatures, ImagePart

_STRING: dict[str, Any] = {"type": "string"}
_NAME: dict[str, Any] = {"type": ["string", "null"]}
_FILLED = {"type": "string", "minLength": 1}
_OBJECT = {"type": "object"}


def _typed(kind: Any, *required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object of a type."""
    types = {"const": kind} if isinstance(kind, str) else {"enum": list(kind)}
    return {"type": "object", "required": ["type", *required], "properties": {"type": types, **properties}}


_PARTS = {
    "anyOf": [
        _typed(("input_text", "output_text", "text"), "text", text=_STRING),
        _typed("input_image", "image_url", image_url=_STRING),
        _typed("input_json", "data", data={"anyOf": [_OBJECT, {"type": "array", "items": _OBJECT}]}),
        _typed("refusal", "refusal", refusal=_STRING),
    ]
}
_CONTENT = {"anyOf": [_STRING, {"type": "array", "items": _PARTS}]}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"type": {"const": "message"}, "role": {"enum": list(ROLES)}, "content": _CONTENT},
}
_CALL = {"call_id": _STRING, "name": _STRING, "namespace": _NAME}
_ITEM = {
    "anyOf": [
        _MESSAGE,
        _typed("function_call", "call_id", "name", "arguments", **_CALL, arguments=_STRING),
        _typed("custom_tool_call", "call_id", "name", "input", **_CALL, input=_STRING),
        _typed(ITEMS[3:], "call_id", "output", call_id=_STRING, output=_CONTENT),
    ]
}
_ASKED = {"name": _NAME, "instructions": {"anyOf": [_FILLED, {"type": "array", "items": _PARTS, "minItems": 1}]}}


def _options(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": MIN_OPTIONS, "maxItems": MAX_OPTIONS}


_CHOICE = {"value": {"anyOf": [_FILLED, {"type": "boolean"}]}, "description": _NAME}
_LEVEL = {"label": _FILLED, "description": _NAME}
_CHOICES = _options({"type": "object", "required": ["value"], "properties": _CHOICE})
_LEVELS = _options({"type": "object", "required": ["label"], "properties": _LEVEL})
_QUESTION = {
    "anyOf": [
        _typed(KINDS[0], "instructions", **_ASKED),
        _typed(KINDS[1], "instructions", "choices", **_ASKED, choices=_CHOICES),
        _typed(KINDS[2], "instructions", "levels", **_ASKED, levels=_LEVELS),
    ]
}
_INPUT_SCHEMA = {"anyOf": [_STRING, {"type": "array", "items": _ITEM, "minItems": 1}]}
_QUESTIONS_SCHEMA = {"type": "array", "items": _QUESTION, "minItems": 1, "maxItems": MAX_QUESTIONS}
_IMAGES = (
    ("input", None, "content", None, "image_url"),
    ("input", None, "output", None, "image_url"),
    ("questions", None, "instructions", None, "image_url"),
)


class DecisionsOptions(BaseModel):
    """Octavo's own. ``debias``: each question is asked again with its options reversed; ``diagnostics``: the answer
    says what the model would have said."""

    model_config = ConfigDict(strict=True, extra="forbid")

    debias: bool = False
    diagnostics: bool = False


class DecisionsRequest(ModelBody):
    """Input and questions are checked by `octavo.chat.decisions.questions`, as those of `LLM.decide`."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = UnsupportedFields(
        {
            **dict.fromkeys(("messages", "instructions", "tools", "temperature", "reasoning"), ()),
            **dict.fromkeys(("state", "prompt_format_version", "logit_bias", "chat_template"), ()),
            "stream": (False,),
        },
        {"messages": "input", "state": "input"},
    )

    input: Annotated[Any, WithJsonSchema(_INPUT_SCHEMA)]
    questions: Annotated[Any, WithJsonSchema(_QUESTIONS_SCHEMA)]
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    octavo: DecisionsOptions | None = None

    def ways(self, state: ServerState) -> Ways:
        """The way in which questions are asked and answered."""
        asked = self.octavo or DecisionsOptions()
        return Ways(
            asked.debias,
            asked.diagnostics,
            self.octavo is not None,
            state.args.decisions_min_mass,
            state.temperatures,
        )


@dataclass
class PreparedDecision(Prepared[DecisionsRequest]):
    """Questions that are ready for the engine. ``request``: of a read."""

    asking: Asking
    reads: Reads
    request: Callable[[Read], EngineCoreRequest]
    outputs: list[RequestOutput] = field(default_factory=list)


async def _prepare(checked: CheckedRequest[DecisionsRequest]) -> PreparedDecision:
    state, body = checked.state, checked.body

    def read() -> tuple[list[Question], list[dict[str, Any]]]:
        return read_questions(body.questions, image_of), read_input(body.input, image_of)

    questions, messages = await state.engine.run_in_thread(read)
    asking = Asking(questions, body.ways(state))
    body.input = body.questions = None  # images are not kept as long as the answer takes
    images = [await _read_images(state, messages, question) for question in questions]
    options, adapter = PromptOptions(add_special_tokens=False).for_tenant, current_adapter.get()
    tokenizer = state.engine.tokenizer
    if tokenizer is None:
        raise bad_request(
            "decisions need a tokenizer, but the engine runs without one (--skip-tokenizer-init)", "input"
        )
    renderer = Renderer(
        lambda conversation: _render(state, conversation, options),
        lambda text: state.engine.input_processor.tokenize(text, False, None, options.cache_salt),
        tokenizer,
        lambda at: _naming(asking.number(at)),
    )

    def prepare() -> PreparedDecision:
        with naming({"messages": "input"}):
            prompts = renderer.prompts(messages, asking.put)
        request = _Requests(state, asking, prompts, images, options, adapter)
        reads = Reads([prompt.labels for prompt in prompts])
        requests = [request(read) for read in reads.first()]  # all are checked before the first runs
        return PreparedDecision(checked, requests, asking, reads, request)

    prepared: PreparedDecision = await state.engine.run_in_thread(prepare)
    return prepared


async def _read_images(
    state: ServerState, messages: Sequence[dict[str, Any]], question: Question
) -> list[ImageFeatures]:
    """Read the images of the input and of a question; those of the input are read once."""
    contents = [*(message["content"] for message in messages), question.instructions]
    parts = [part for content in contents for part in content if isinstance(part, ImagePart)]
    return await state.images.read(parts) if parts else []


def _render(state: ServerState, conversation: Conversation, options: PromptOptions) -> Rendered:
    rendered = render_chat(state, conversation, options)
    if rendered.images:
        check_texts(conversation.messages, rendered.images, state.engine.input_processor.images.placeholder)
    return rendered


def _naming(at: int) -> AbstractContextManager[None]:
    where = f"questions.{at}"
    return in_words_of(where, f"{where}: input and question have")


class _Requests:
    """Makes the requests of reads."""

    def __init__(
        self,
        state: ServerState,
        asking: Asking,
        prompts: Sequence[QuestionPrompt],
        images: Sequence[Sequence[ImageFeatures]],
        options: PromptOptions,
        adapter: Adapter | None,
    ) -> None:
        self._process = state.engine.input_processor.process
        self._prompts, self._images, self._options, self._adapter = prompts, images, options, adapter
        self._shared, self._number = num_shared(prompts), asking.number

    def __call__(self, read: Read) -> EngineCoreRequest:
        """Raises APIError naming the question."""
        prompt, number = self._prompts[read.question], self._number(read.question)
        whole = prompt_for_engine(prompt, [*prompt.ids, *read.path], self._images[number], self._shared)
        salt = self._options.cache_salt
        with _naming(number):
            params = read_params(read.token_ids)
            return self._process(uuid4().hex, whole, params, cache_salt=salt, adapter=self._adapter)


async def _run(prepared: PreparedDecision) -> list[RequestOutput]:
    """Run the reads: the first question's alone, since it reads what all of them share, then the others. At most half
    of the sequences that run at a time are theirs. Raises APIError."""
    state = prepared.state
    most = max(1, state.engine.config.scheduler.max_num_seqs // 2)
    check_queue(state, min(most, len(prepared.requests)))
    waiting = list(zip(prepared.reads.first(), prepared.requests, strict=True))
    size = 1
    while waiting:
        wave, waiting = waiting[:size], waiting[size:]
        size = most
        with Generation(state, [one for _, one in wave], [None] * len(wave), admit=False) as generation:
            await generation.start()
            outputs = await generation.final_outputs()
        prepared.outputs += outputs
        for (read, _), output in zip(wave, outputs, strict=True):
            more = prepared.reads.take(read, *named_logprobs(output))
            waiting += [(next_read, prepared.request(next_read)) for next_read in more]
    return prepared.outputs


async def _whole(prepared: PreparedDecision, outputs: list[RequestOutput]) -> Decision:
    prepared.state.metrics.record_questions(len(prepared.asking.questions))
    return prepared.asking.decide(prepared.reads, prepared.answering_name, outputs)


def _tagged(answer: type[Any]) -> Any:
    """Make a type for /openapi.json, which the answer's ``type`` tells from the others."""
    hints = get_type_hints(answer)
    kind = answer(**dict.fromkeys(name for name in hints if name != "type")).type
    members = [(name, hint) for name, hint in hints.items() if name != "type"]
    return defstruct(answer.__name__, members, tag_field="type", tag=kind)


_ANSWERS: Any = Union[tuple(map(_tagged, (PredicateAnswer, ChoiceAnswer, ScoreAnswer, RefusalAnswer)))]  # noqa: UP007
_FIELDS: Any = [*(get_type_hints(Decision) | {"answers": list[_ANSWERS]}).items()]
DECISION = defstruct("Decision", [*_FIELDS, ("octavo", Notes | UnsetType, UNSET)])
DECISIONS = Dialect("create_decision", DecisionsRequest, _prepare, _whole, images=_IMAGES, run=_run)
OPERATIONS = (answering("/v1/decisions", DECISIONS, "Answer questions by probabilities", DECISION),)
