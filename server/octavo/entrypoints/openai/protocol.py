"""Request bodies: OpenAI's fields and vLLM's extra ones. Types are strict: ``true`` is not a number.

Validation and schema have one source: pydantic derives both from the type, or the type names both side by side.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from octavo.chat.messages import Conversation
from octavo.entrypoints.errors import bad_request, shown
from octavo.entrypoints.fields import schemas
from octavo.entrypoints.fields.blocks import OrText
from octavo.entrypoints.fields.prompt_cache import PromptCacheOptions
from octavo.entrypoints.fields.shapes import SHAPES, Shapes
from octavo.entrypoints.fields.unsupported import CHAT, COMPLETION, UnsupportedFields
from octavo.entrypoints.fields.values import (
    Count,
    FromFloat,
    Index,
    MessagesField,
    ModelBody,
    Priority,
    ReasoningEffort,
    Seed,
    StopField,
    TemplateVariables,
    TokenIds,
    Truncation,
    TruncationSide,
    Verbosity,
    integral_list,
    prompts_in,
    with_verbosity,
)
from octavo.entrypoints.generation.run import PromptOptions, TokenLimit
from octavo.entrypoints.state import REQUEST_ID
from octavo.interface import sampling_params as limits

MAX_PROMPTS = 1_024


NO_LIMIT = -1  # llama.cpp's: as many tokens as fit


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError(f"must be at least 1, or {NO_LIMIT} for as many tokens as fit, got 0")
    return value


LimitOrZero = Annotated[int, Field(ge=NO_LIMIT, le=limits.MAX_INT), FromFloat]
Limit = Annotated[
    int,
    Field(ge=NO_LIMIT, le=limits.MAX_INT, json_schema_extra={"not": {"const": 0}}),
    AfterValidator(_not_zero),
    FromFloat,
]


def _only(*values: Any) -> Any:
    """A type of these values and null."""

    def check(value: Any) -> Any:
        if value is None or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values):
            return value
        raise ValueError(
            f"must be {' or '.join(map(shown, values))}, got {shown(value)}: other values are not supported"
        )

    return Annotated[Any, BeforeValidator(check), WithJsonSchema({"enum": [None, *values]})]


def _check_prompt(value: Any) -> Any:
    """A prompt: a string, token ids, or a list of either. Checked by hand, since errors for a union are unreadable."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        if not value:
            raise ValueError("must not be an empty list")
        kinds = set(map(type, value))
        if kinds == {int} or kinds == {str}:
            return value
        if kinds <= {int, float} and set(map(type, value := integral_list(value))) == {int}:
            return value
        if kinds == {list}:
            value = [integral_list(ids) for ids in value]
            if all(set(map(type, ids)) <= {int} for ids in value):
                return value
    raise ValueError(f"must be a string, a list of strings, a list of token ids or a list of those, got {shown(value)}")


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
        },
    ]
}
PromptField = Annotated[Any, BeforeValidator(_check_prompt), WithJsonSchema(_PROMPT_SCHEMA)]


BadWord = Annotated[str, Field(max_length=limits.MAX_STOP_LENGTH, pattern=r"[^\s\x1c-\x1f\x85]")]  # one shows
BadWords = Annotated[list[BadWord], Field(max_length=limits.MAX_BAD_WORDS)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=limits.MAX_LOGIT_BIAS),
]


def _or_none(ids: list[int]) -> list[int] | None:
    """None for an empty list, which some clients send for what is not set."""
    return ids or None


NamedTokens = Annotated[TokenIds, Field(max_length=limits.MAX_LOGPROB_TOKEN_IDS), AfterValidator(_or_none)]


class StreamOptions(BaseModel):
    """Options of streams."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class PredictionPart(BaseModel):
    """A part of a predicted text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


class PredictedOutput(BaseModel):
    """The text that an answer repeats in large part."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["content"]
    content: Annotated[list[PredictionPart], OrText()]

    @property
    def text(self) -> str:
        """All parts together."""
        return "".join(part.text for part in self.content)


class GenerationRequest(Shapes, ModelBody):
    """The fields that completions and chat completions share."""

    NEEDS: ClassVar[dict[str, tuple[str, bool | None]]] = {
        "stream_options": ("stream", True),
        "truncation_side": ("truncate_prompt_tokens", None),
    }

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    n: Count | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Seed | None = None
    stop: StopField = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_INT), FromFloat] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=limits.MAX_STOP_TOKEN_IDS)] | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Index | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation = None
    truncation_side: TruncationSide | None = None
    prompt_logprobs: Index | None = None
    logprob_token_ids: NamedTokens | None = None  # in place of the most likely ones
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1_000)] | None = None
    request_id: Annotated[str, Field(pattern=f"^{REQUEST_ID}$")] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    length_penalty: _only(1) = None  # type: ignore[valid-type]  # of beam search, as the next one
    use_beam_search: _only(False) = None  # type: ignore[valid-type]
    # The form of the output: one of these, see response_format.py
    response_format: Annotated[dict[str, Any] | None, WithJsonSchema(schemas.RESPONSE_FORMAT)] = None
    structured_outputs: Annotated[dict[str, Any] | None, WithJsonSchema(schemas.STRUCTURED_OUTPUTS)] = None
    guided_json: Annotated[Any, WithJsonSchema(schemas.or_null("json"))] = None
    guided_regex: Annotated[Any, WithJsonSchema(schemas.or_null("regex"))] = None
    guided_choice: Annotated[Any, WithJsonSchema(schemas.or_null("choice"))] = None
    guided_grammar: Annotated[Any, WithJsonSchema(schemas.or_null("grammar"))] = None
    json_schema: Annotated[Any, WithJsonSchema(schemas.or_null("json"))] = None  # llama.cpp's and SGLang's
    regex: Annotated[Any, WithJsonSchema(schemas.or_null("regex"))] = None  # SGLang's

    # The fields of SamplingParams, with the same names.
    SAMPLING: ClassVar[tuple[str, ...]] = (
        "frequency_penalty",
        "n",
        "presence_penalty",
        "seed",
        "stop",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop_token_ids",
        "bad_words",
        "allowed_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "prompt_logprobs",
        "logprob_token_ids",
        *SHAPES,
    )

    def sampling_fields(self) -> dict[str, Any]:
        """The SamplingParams fields that the request sets."""
        fields = {name: value for name in self.SAMPLING if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            fields["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        return fields

    def prompt_options(self, add_special_tokens: bool) -> PromptOptions:
        """Return the options of the prompt; ``add_special_tokens`` is the route's default."""
        given = self.add_special_tokens
        return PromptOptions(
            self.priority or 0,
            self.cache_salt,
            add_special_tokens if given is None else given,
            self.truncate_prompt_tokens,
            self.truncation_side or "left",
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    UNSUPPORTED: ClassVar[UnsupportedFields] = COMPLETION
    NEEDS: ClassVar[dict[str, tuple[str, bool | None]]] = GenerationRequest.NEEDS | {
        "logprob_token_ids": ("logprobs", None)
    }

    prompt: PromptField
    max_tokens: LimitOrZero | None = None
    echo: bool | None = None
    logprobs: Index | None = None
    suffix: str | None = None  # what follows the text that is asked for: infilling
    best_of: Annotated[Count | None, WithJsonSchema({"enum": [None, 1], "description": "Or the same as n."})] = None

    def check(self) -> None:
        """Check what the types do not. Raises APIError."""
        super().check()
        if self.best_of not in (None, 1, self.n):
            raise bad_request(f"best_of must be 1, or the same as n, got {self.best_of}: drop it and use n", "best_of")
        if self.suffix and self.echo:
            raise bad_request("echo is not possible with suffix: the text comes between the two; drop echo", "echo")
        if self.logprob_token_ids and self.echo and self.max_tokens == 0:
            message = (
                "logprob_token_ids is of new tokens, and max_tokens 0 asks for none; drop it, or use prompt_logprobs"
            )
            raise bad_request(message, "logprob_token_ids")

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a string or token ids. Raises APIError."""
        return prompts_in(self.prompt, "prompt", MAX_PROMPTS)


_BUDGETS = ("thinking_token_budget", "reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens")


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    UNSUPPORTED: ClassVar[UnsupportedFields] = CHAT
    NEEDS: ClassVar[dict[str, tuple[str, bool | None]]] = GenerationRequest.NEEDS | dict.fromkeys(
        ("top_logprobs", "logprob_token_ids"), ("logprobs", True)
    )

    messages: MessagesField
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Index | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: Limit | None = None
    reasoning_budget: Limit | None = None  # the same in llama.cpp's words, as the next two
    reasoning_budget_tokens: Limit | None = None
    thinking_budget_tokens: Limit | None = None
    tools: Annotated[list[dict[str, Any]] | None, WithJsonSchema(schemas.TOOLS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(schemas.TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    prediction: PredictedOutput | None = None
    verbosity: Verbosity | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    def token_limit(self) -> TokenLimit:
        """The limit of the answer."""
        field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        value: int | None = getattr(self, field)
        return TokenLimit(None if value == NO_LIMIT else value, field)

    def conversation(self, messages: list[dict[str, Any]]) -> Conversation:
        """The fields that the chat template and the tool parser read; ``messages`` are the checked ones."""
        return Conversation(
            messages,
            self.tools,
            self.tool_choice,
            self.parallel_tool_calls,
            self.documents,
            self.reasoning_effort,
            self.chat_template,
            with_verbosity(self.verbosity, self.chat_template_kwargs),
            self.add_generation_prompt,
            self.continue_final_message,
            **self._budget(),
        )

    def _budget(self) -> dict[str, Any]:
        """The limit of thoughts, with the field that gives it. Raises APIError for two that differ."""
        given = {name: value for name in _BUDGETS if (value := getattr(self, name)) is not None}
        if len(set(given.values())) > 1:
            first, second = list(given)[:2]
            raise bad_request(f"{second} must be as {first}, where both are given; drop one", second)
        return {"budget": next(iter(given.values())), "budget_field": next(iter(given))} if given else {}
