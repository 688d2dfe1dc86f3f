"""The bodies of requests: OpenAI's fields and vLLM's extra ones. Types are strict: ``true`` is not a number."""

from __future__ import annotations

import logging
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from octavo.entrypoints.openai.chat_messages import ROLES
from octavo.entrypoints.openai.errors import bad_request, shown
from octavo.entrypoints.state import REQUEST_ID

logger = logging.getLogger(__name__)

# Known fields that cannot change the text.
_HARMLESS = frozenset({
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "stream_interval",
})  # fmt: skip
# Known fields that would change the answer and are not built.
_REFUSED = frozenset({
    "audio", "modalities", "prediction", "web_search_options", "functions", "function_call", "logits_processors",
    "prompt_embeds", "kv_transfer_params", "thinking_token_budget", "mm_processor_kwargs", "vllm_xargs",
    "structural_tag",
})  # fmt: skip
_logged: set[str] = set()
_MAX_LOGGED = 1_000

MAX_PROMPTS = 1_024


def integral(value: Any) -> Any:
    """1.0 as 1: JSON has one kind of number, and some clients write integers so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_FromFloat = BeforeValidator(integral)  # stands behind the limits, or the schema would lose them


def integral_list(value: Any) -> Any:
    """The same for a list, which costs nothing when it holds integers already."""
    return list(map(integral, value)) if isinstance(value, list) and float in set(map(type, value)) else value


IntList = Annotated[list[int], BeforeValidator(integral_list)]


def _one_of_shapes(value: Any) -> Any:
    """A prompt: a text, token ids, or a list of either. Checked here, because a union's findings are unreadable."""
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
PromptField = Annotated[Any, BeforeValidator(_one_of_shapes), WithJsonSchema(_PROMPT_SCHEMA)]


def _strings(value: Any) -> Any:
    if value is None or isinstance(value, str) or (isinstance(value, list) and all(isinstance(s, str) for s in value)):
        return value
    raise ValueError(f"must be a string or a list of strings, got {shown(value)}")


_STOP_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
StopField = Annotated[Any, BeforeValidator(_strings), WithJsonSchema(_STOP_SCHEMA)]


_MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        },
                    },
                ]
            },
            "name": {"type": "string"},
            "tool_call_id": {"type": "string"},
        },
    },
}
MessagesField = Annotated[list[dict[str, Any]], WithJsonSchema(_MESSAGES_SCHEMA)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """What completions and chat completions share. A null means: as if it were not there."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]+$")], float] | None = None
    n: Annotated[int, Field(ge=1), _FromFloat] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), _FromFloat] | None = None
    stop: StopField = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1), _FromFloat] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop_token_ids: IntList | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1), BeforeValidator(integral_list)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0), _FromFloat] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), _FromFloat] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0), _FromFloat] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1), _FromFloat] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1_000)] | None = None
    request_id: Annotated[str, Field(pattern=f"^{REQUEST_ID}$")] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    length_penalty: float | None = None
    use_beam_search: bool | None = None
    # The form of the answer: one of these, see structured.py
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    # Which of our fields are those of SamplingParams, under the same name.
    SAMPLING: ClassVar[tuple[str, ...]] = (
        "frequency_penalty", "n", "presence_penalty", "seed", "stop", "temperature", "top_p", "top_k", "min_p",
        "repetition_penalty", "stop_token_ids", "bad_words", "allowed_token_ids", "include_stop_str_in_output",
        "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "prompt_logprobs",
    )  # fmt: skip

    def check(self) -> None:
        """What the types cannot say. Raises APIError."""
        self._check_extra_fields()
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only allowed with stream: true; drop it or stream", "stream_options")
        if self.use_beam_search:
            raise bad_request("use_beam_search is not supported; drop it", "use_beam_search")
        if self.length_penalty not in (None, 1.0):
            raise bad_request("length_penalty is only of use with beam search, which is not supported; drop it")

    def _check_extra_fields(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _HARMLESS:
                continue
            if name in _REFUSED:
                raise bad_request(f"{name} is not supported by this server; drop it", name)
            if name not in _logged and len(_logged) < _MAX_LOGGED:
                _logged.add(name)
                logger.warning("ignoring the unknown request field %r", name[:100])

    def sampling_fields(self) -> dict[str, Any]:
        """The SamplingParams fields that the request sets."""
        fields = {name: value for name in self.SAMPLING if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            fields["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return fields


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: PromptField
    max_tokens: Annotated[int, Field(ge=0), _FromFloat] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0), _FromFloat] | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1), _FromFloat] | None = None

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise bad_request("suffix is not supported: the model completes text, it does not fill in; drop it")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request(f"best_of must equal n ({self.n or 1}), got {self.best_of}: drop it and use n", "best_of")

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, list) and not isinstance(self.prompt[0], int):
            if len(self.prompt) > MAX_PROMPTS:
                raise bad_request(
                    f"prompt takes at most {MAX_PROMPTS} prompts a request, got {len(self.prompt)}; send more requests"
                )
            return self.prompt
        return [self.prompt]


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    messages: MessagesField
    max_tokens: Annotated[int, Field(ge=1), _FromFloat] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1), _FromFloat] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0), _FromFloat] | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true; set it or drop top_logprobs", "top_logprobs")


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise bad_request(f"logit_bias must have token ids as keys, got {shown(key)}", "logit_bias") from None
