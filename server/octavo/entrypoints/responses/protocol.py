"""Request bodies of OpenAI's Responses API. Types are strict; validation and schema have one source, these types.

Fields of items, parts and tools that are not named here change nothing in the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from octavo.chat.messages import MAX_MESSAGES
from octavo.chat.tools.plan import MAX_TOOL_NAME, MAX_TOOLS
from octavo.entrypoints.errors import bad_request
from octavo.entrypoints.fields.blocks import OrId, OrText, known_types
from octavo.entrypoints.fields.prompt_cache import PromptCacheBreakpoint, PromptCacheOptions
from octavo.entrypoints.fields.unsupported import UnsupportedFields
from octavo.entrypoints.fields.values import (
    Count,
    Index,
    ModelBody,
    ReasoningEffort,
    Seed,
    TemplateVariables,
    Verbosity,
)

_MAX_METADATA = 16
Metadata = Annotated[dict[str, str], Field(max_length=_MAX_METADATA)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class TextPartParam(_Part):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class ImagePartParam(_Part):
    """An image of a message, or of what a call returned."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class RefusalPartParam(_Part):
    """An earlier answer's refusal."""

    type: Literal["refusal"]
    refusal: str


class ReasoningTextParam(_Part):
    """Text of reasoning, or of a summary of it."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


def _input_text(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


_Content = Annotated[
    Annotated[TextPartParam | ImagePartParam | RefusalPartParam, Field(discriminator="type")],
    known_types("input_text", "input_image", "output_text", "text", "refusal"),
]
_Output = Annotated[
    Annotated[TextPartParam | ImagePartParam, Field(discriminator="type")],
    known_types("input_text", "input_image", "output_text", "text"),
]


class MessageParam(_Part):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[list[_Content], OrText(_input_text)]
    id: str | None = None


class ReasoningParam(_Part):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningTextParam] | None = None
    content: list[ReasoningTextParam] | None = None
    encrypted_content: str | None = None


class FunctionCallParam(_Part):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None


class CustomCallParam(_Part):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None
    id: str | None = None


class CallOutputParam(_Part):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Annotated[list[_Output], OrText(_input_text)]
    id: str | None = None


class ToolSearchCallParam(_Part):
    """A search for tools in an earlier answer, which the client runs."""

    type: Literal["tool_search_call"]
    call_id: str | None = None
    arguments: Any = None
    id: str | None = None


class FunctionToolParam(_Part):
    """A function of the client."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTextParam(_Part):
    """Any text."""

    type: Literal["text"]


class CustomGrammarParam(_Part):
    """Text of a grammar. The model is told of it; it is not enforced."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomToolParam(_Part):
    """A tool of the client that takes a text."""

    type: Literal["custom"]
    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME)]
    description: str | None = None
    format: Annotated[CustomTextParam | CustomGrammarParam, Field(discriminator="type")] | None = None


_ClientTool = Annotated[
    Annotated[FunctionToolParam | CustomToolParam, Field(discriminator="type")], known_types("function", "custom")
]


class NamespaceToolParam(_Part):
    """Tools of the client under a name that they share, such as those of an MCP server that it talks to."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME)]
    description: str | None = None
    tools: Annotated[list[_ClientTool], Field(max_length=MAX_TOOLS)]


_HOSTED = (
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "image_generation",
)


class HostedToolParam(_Part):
    """A tool of OpenAI's servers that agents add to their own, left out beside those."""

    type: Literal[
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "image_generation",
    ]


class ToolSearchParam(_Part):
    """A search for further tools. One that the client runs is a function here; others are left out, as hosted tools."""

    type: Literal["tool_search"]
    execution: Literal["server", "client"] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


ToolParam = FunctionToolParam | CustomToolParam | NamespaceToolParam | ToolSearchParam | HostedToolParam
_Tools = Annotated[
    list[
        Annotated[
            Annotated[
                FunctionToolParam | CustomToolParam | NamespaceToolParam | ToolSearchParam | HostedToolParam,
                Field(discriminator="type"),
            ],
            known_types("function", "custom", "namespace", others=("tool_search", *_HOSTED)),
        ]
    ],
    Field(max_length=MAX_TOOLS),
]


class AdditionalToolsParam(_Part):
    """Tools that a conversation brings later."""

    type: Literal["additional_tools"]
    tools: _Tools
    id: str | None = None


class ToolSearchOutputParam(_Part):
    """Tools that a search of the client's has found."""

    type: Literal["tool_search_output"]
    tools: _Tools
    call_id: str | None = None
    id: str | None = None


class ItemReferenceParam(_Part):
    """An item of a stored response."""

    type: Literal["item_reference"]
    id: str


Item = (
    MessageParam
    | ReasoningParam
    | FunctionCallParam
    | CustomCallParam
    | CallOutputParam
    | ToolSearchCallParam
    | ToolSearchOutputParam
    | AdditionalToolsParam
)


def _with_type(value: Any) -> Any:
    """Messages may leave their type out."""
    return {"type": "message", **value} if isinstance(value, dict) and "role" in value else value


InputItem = Annotated[
    Annotated[
        MessageParam
        | ReasoningParam
        | FunctionCallParam
        | CustomCallParam
        | CallOutputParam
        | ToolSearchCallParam
        | ToolSearchOutputParam
        | AdditionalToolsParam
        | ItemReferenceParam,
        Field(discriminator="type"),
    ],
    known_types(
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "item_reference",
        others=("tool_search_call", "tool_search_output", "additional_tools"),
    ),
    BeforeValidator(_with_type),
]


def _user_message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


class ToolReferenceParam(_Part):
    """A tool by its name."""

    type: Literal["function", "custom"]
    name: str


class AllowedToolsParam(_Part):
    """Some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolReferenceParam], Field(min_length=1)]


class TextFormatParam(_Part):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormatParam(_Part):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormatParam(_Part):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextConfigParam(_Part):
    """The form of the answer."""

    format: (
        Annotated[TextFormatParam | JsonObjectFormatParam | JsonSchemaFormatParam, Field(discriminator="type")] | None
    ) = None
    verbosity: Verbosity | None = None


class ReasoningConfigParam(_Part):
    """The effort of reasoning. Asked for a summary, the server sends the whole reasoning in its place."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


_Include = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "message.output_text.logprobs",
]
_UNSUPPORTED = UnsupportedFields(
    {
        **dict.fromkeys(("prompt", "context_management", "moderation", "thread", "messages", "functions"), ()),
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "response_format", "reasoning_effort", "stop"), ()),
        **dict.fromkeys(("chat_template", "documents", "logit_bias", "structured_outputs"), ()),
        "enable_response_messages": (False,),
        "n": (1,),
        "logprobs": (False,),
    },
    {
        "messages": "input",
        "prompt": "instructions and input",
        "context_management": "truncation",
        "moderation": "/v1/decisions",
        "thread": "previous_response_id or conversation",
        "functions": "tools",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "structured_outputs": "text.format",
        "logprobs": "include",
    },
)


class ConversationParam(_Part):
    """A conversation by its id."""

    id: str


class InputTokensRequest(ModelBody):
    """POST /v1/responses/input_tokens"""

    UNSUPPORTED: ClassVar[UnsupportedFields] = _UNSUPPORTED

    input: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES), OrText(_user_message)]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[ConversationParam | None, OrId()] = None
    tools: _Tools | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[ToolReferenceParam | AllowedToolsParam, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfigParam | None = None
    text: TextConfigParam | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: TemplateVariables = None  # vLLM's

    def check(self) -> None:
        """Check what the types do not. Raises APIError."""
        super().check()
        if self.conversation is not None and self.previous_response_id is not None:
            raise bad_request(
                "conversation holds all items already; drop it or previous_response_id", "previous_response_id"
            )


class ResponsesRequest(InputTokensRequest):
    """POST /v1/responses"""

    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[_Include] | None = None
    top_logprobs: Index | None = None
    metadata: Metadata | None = None
    max_tool_calls: Count | None = None  # of built-in tools, of which there are none
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: str | None = None
    user: str | None = None
    # Open Responses'
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    # Not OpenAI's
    top_k: Index | None = None
    seed: Seed | None = None

    def check(self) -> None:
        """Check what the types do not. Raises APIError."""
        super().check()
        if self.background and self.store is False:
            raise bad_request("background needs store, since the response is fetched later; drop one", "background")

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities of so many tokens beside the sampled one; None: none are asked for."""
        asked = "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)
        return self.top_logprobs or 0 if asked else None

    def sampling_fields(self) -> dict[str, Any]:
        """The SamplingParams fields that the request sets."""
        names = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")
        return {name: value for name in names if (value := getattr(self, name)) is not None}
