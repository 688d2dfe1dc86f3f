"""Request bodies of Anthropic's Messages API. Types are strict; validation and schema have one source, these types.

Fields of blocks and tools that are not named here change nothing in the answer.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from octavo.chat.messages import MAX_MESSAGES
from octavo.chat.tools.plan import MAX_TOOL_NAME, MAX_TOOLS
from octavo.entrypoints.errors import shown
from octavo.entrypoints.fields.blocks import OrText, known_types
from octavo.entrypoints.fields.unsupported import UnsupportedFields
from octavo.entrypoints.fields.values import Count, ImageText, Index, ModelBody, Seed
from octavo.interface import sampling_params as limits


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class CacheControlParam(_Part):
    """A wish that the prompt up to the end of this block be found again for ``ttl`` after each use."""

    type: Annotated[Literal["ephemeral"], known_types("ephemeral")]
    ttl: Literal["5m", "1h"] | None = None


CacheControl = CacheControlParam | None


class TextBlockParam(_Part):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None


class ThinkingBlockParam(_Part):
    """Reasoning of an earlier answer. ``signature`` holds it sealed, where the client saw no text."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlockParam(_Part):
    """Reasoning that cannot be read."""

    type: Literal["redacted_thinking"]


class ToolUseBlockParam(_Part):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None


class ToolReferenceBlockParam(_Part):
    """A tool that a search of the client's has found."""

    type: Literal["tool_reference"]
    tool_name: str


class Base64SourceParam(_Part):
    """An image's bytes."""

    type: Literal["base64"]
    media_type: str
    data: ImageText


class UrlSourceParam(_Part):
    """The URL of an image."""

    type: Literal["url"]
    url: str


class ImageBlockParam(_Part):
    """An image."""

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64SourceParam | UrlSourceParam, Field(discriminator="type")], known_types("base64", "url")
    ]
    cache_control: CacheControl = None


_Result = Annotated[
    Annotated[TextBlockParam | ImageBlockParam | ToolReferenceBlockParam, Field(discriminator="type")],
    known_types("text", "image", others=("tool_reference",)),
]
Texts = Annotated[list[Annotated[TextBlockParam, known_types("text")]], OrText()]


class ToolResultBlockParam(_Part):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[_Result], OrText()] | None = None
    cache_control: CacheControl = None


_UserBlock = Annotated[
    Annotated[TextBlockParam | ImageBlockParam | ToolResultBlockParam, Field(discriminator="type")],
    known_types("text", "image", "tool_result"),
]
_AssistantBlock = Annotated[
    Annotated[
        TextBlockParam | ThinkingBlockParam | RedactedThinkingBlockParam | ToolUseBlockParam,
        Field(discriminator="type"),
    ],
    known_types("text", "thinking", "redacted_thinking", "tool_use"),
]


class UserMessage(_Part):
    """A message of the user, and results of tools."""

    role: Literal["user"]
    content: Annotated[list[_UserBlock], OrText()]


class AssistantMessage(_Part):
    """An earlier answer, or, as the last message, the beginning of the one asked for."""

    role: Literal["assistant"]
    content: Annotated[list[_AssistantBlock], OrText()]


_HOSTED = "web_search|web_fetch|code_execution|tool_search_tool_(?:regex|bm25)"


class ToolParam(_Part):
    """A tool of the client."""

    type: Annotated[Literal["custom"] | None, known_types("custom")] = None
    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None  # the model is told of it where a search has found it
    cache_control: CacheControl = None


class HostedToolParam(_Part):
    """A tool that Anthropic's servers run, left out beside tools of the client."""

    type: Annotated[str, Field(pattern=f"^({_HOSTED})_[0-9]+$")]
    name: str


def _kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "hosted" if isinstance(kind, str) and re.fullmatch(f"({_HOSTED})_[0-9]+", kind) else "client"


AnyTool = Annotated[
    Annotated[ToolParam, Tag("client")] | Annotated[HostedToolParam, Tag("hosted")], Discriminator(_kind)
]


class ToolNameParam(_Part):
    """A tool of the request."""

    type: Literal["tool_reference"]
    name: str


class ToolDefinitionParam(_Part):
    """A tool that the request's ``tools`` do not have."""

    type: Literal["tool_definition"]
    definition: ToolParam


class ToolAdditionBlockParam(_Part):
    """A tool that can be called from here on."""

    type: Literal["tool_addition"]
    tool: Annotated[
        Annotated[ToolNameParam | ToolDefinitionParam, Field(discriminator="type")],
        known_types("tool_reference", "tool_definition"),
    ]


class ToolRemovalBlockParam(_Part):
    """A tool that cannot be called any more."""

    type: Literal["tool_removal"]
    tool: Annotated[ToolNameParam, known_types("tool_reference")]


_SystemBlock = Annotated[
    Annotated[TextBlockParam | ToolAdditionBlockParam | ToolRemovalBlockParam, Field(discriminator="type")],
    known_types("text", "tool_addition", "tool_removal"),
]
Effort = Literal["low", "medium", "high", "xhigh", "max"]


class TurnConfig(_Part):
    """Options that instructions between messages set for the turn that they stand in."""

    effort: Effort | None = None


class SystemMessage(_Part):
    """Instructions between other messages. ``clear_at``: their text goes when the user says something again."""

    role: Literal["system"]
    content: Annotated[list[_SystemBlock], OrText()] = Field(default_factory=list)
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: TurnConfig | None = None


InputMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class ChoiceMode(_Part):
    """A mode that allows, demands or forbids calls of tools."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class ChoiceTool(_Part):
    """The tool to call."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(_Part):
    """Lets the model reason first, where its chat template has such a switch, for at most as many tokens.

    With "between_tools" it does not: what it says between calls is text.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(_Part):
    """The JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(_Part):
    """Effort and form of the answer."""

    effort: Effort | None = None
    format: JsonFormat | None = None


class ThinkingTurns(_Part):
    """A number of turns with reasoning, the last ones."""

    type: Literal["thinking_turns"]
    value: Count


class AllTurns(_Part):
    """All turns."""

    type: Literal["all"]


def _known_edit(kind: Any) -> Any:
    if not isinstance(kind, str) or kind.startswith("clear_thinking_"):
        return kind
    raise ValueError(
        f"must be clear_tool_uses_20250919 or clear_thinking_20251015, got {shown(kind)}: other edits are not supported"
    )


class ClearThinking(_Part):
    """Drops the reasoning of earlier turns where the chat template has a variable for that and more turns have some
    than ``keep`` says (one). "all": none is dropped, as without this edit."""

    type: Annotated[str, Field(pattern="^clear_thinking_"), BeforeValidator(_known_edit)]
    keep: Literal["all"] | Annotated[AllTurns | ThinkingTurns, Field(discriminator="type")] | None = None

    @property
    def num_turns(self) -> int | None:
        """The number of turns that keep their reasoning; None: all."""
        return 1 if self.keep is None else self.keep.value if isinstance(self.keep, ThinkingTurns) else None


class InputTokens(_Part):
    """A number of tokens of the prompt."""

    type: Literal["input_tokens"]
    value: Index


class ToolUses(_Part):
    """A number of calls."""

    type: Literal["tool_uses"]
    value: Index


class ClearToolUses(_Part):
    """Clears old results of tools: where the prompt is longer than ``trigger`` (100,000 tokens), of all calls but the
    last ones (``keep``: 3), and only where that saves ``clear_at_least``."""

    type: Annotated[str, Field(pattern="^clear_tool_uses_[0-9]+$")]
    trigger: Annotated[InputTokens | ToolUses, Field(discriminator="type")] | None = None
    keep: ToolUses | None = None
    clear_at_least: InputTokens | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None  # of the tools with these names


def _edit_kind(edit: Any) -> str:
    kind = edit.get("type") if isinstance(edit, dict) else getattr(edit, "type", None)
    return "tool_uses" if isinstance(kind, str) and kind.startswith("clear_tool_uses_") else "thoughts"


AnyEdit = Annotated[
    Annotated[ClearToolUses, Tag("tool_uses")] | Annotated[ClearThinking, Tag("thoughts")], Discriminator(_edit_kind)
]


class ContextManagement(_Part):
    """Edits of a long conversation."""

    edits: list[AnyEdit] | None = None

    @property
    def tool_edit(self) -> ClearToolUses | None:
        """The edit of results of tools, if there is one."""
        return next((edit for edit in self.edits or () if isinstance(edit, ClearToolUses)), None)

    @property
    def thoughts_edit(self) -> ClearThinking | None:
        """The edit of earlier reasoning, if there is one."""
        return next((edit for edit in self.edits or () if isinstance(edit, ClearThinking)), None)

    @property
    def clears(self) -> bool:
        """True if an edit may clear something."""
        edit = self.thoughts_edit
        return self.tool_edit is not None or (edit is not None and edit.num_turns is not None)


# Where a body holds images in base64, for `read_body`.
_CONTENT = ("messages", None, "content", None)
IMAGES = ((*_CONTENT, "source", "data"), (*_CONTENT, "content", None, "source", "data"))

_STOP = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_LENGTH)]
_UNSUPPORTED = UnsupportedFields(
    {
        **dict.fromkeys(
            ("container", "mcp_servers", "fallbacks", "thread", "response_format", "functions", "stop"), ()
        ),
        **dict.fromkeys(("max_completion_tokens", "reasoning_effort", "reasoning", "prompt", "instructions"), ()),
        **dict.fromkeys(("chat_template", "chat_template_kwargs", "documents", "logit_bias", "structured_outputs"), ()),
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), (0,)),
        "n": (1,),
        "logprobs": (False,),
        "speed": ("standard",),
    },
    {
        "stop": "stop_sequences",
        "max_completion_tokens": "max_tokens",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "reasoning": "thinking",
        "prompt": "messages",
        "instructions": "system",
        "functions": "tools",
        "thread": "messages, with the whole conversation",
    },
)


class CountTokensRequest(ModelBody):
    """POST /v1/messages/count_tokens"""

    UNSUPPORTED: ClassVar[UnsupportedFields] = _UNSUPPORTED

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Texts | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[ChoiceMode | ChoiceTool, Field(discriminator="type")] | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # the older place of output_config.format
    context_management: ContextManagement | None = None
    cache_control: CacheControl = None  # of the whole prompt


class DiagnosticsParam(_Part):
    """Asks why the cache did not have more of the prompt: the message before is named, or null at the first turn."""

    previous_message_id: str | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages"""

    CLAMPED: ClassVar[frozenset[str]] = frozenset({"max_tokens"})

    max_tokens: Index  # 0: the prompt is computed, so that the cache has it, and the answer is empty
    diagnostics: DiagnosticsParam | None = None
    stop_sequences: Annotated[list[_STOP], Field(max_length=limits.MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Index | None = None
    # Not Anthropic's
    seed: Seed | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """The SamplingParams fields that the request sets."""
        given = {
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
        }
        return {name: value for name, value in given.items() if value is not None}
