"""The conversation of a chat request, and the checks of its messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.chat.breakpoints import Keep
from octavo.errors import FieldError
from octavo.multimodal.items import ImagePart
from octavo.multimodal.pieces import Pieces
from octavo.text.content_format import PARTS
from octavo.text.messages import ReadImage, read_messages
from octavo.text.shown import shown

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES = 10_000

_IMAGES = ("image_url", "input_image")
_OTHER_MEDIA = ("video", "video_url", "input_video", "audio", "audio_url", "input_audio", "file", "input_file")


@dataclass(frozen=True)
class FieldNames:
    """Names of tools' fields in errors; the defaults are those of chat completions."""

    function: str = "function."  # between tools.{i} and the fields of a function
    parameters: str = "parameters"
    choice: str = "tool_choice.function.name"
    allowed: str = "tool_choice.allowed_tools"
    required: str = "required"  # the tool_choice that demands a call
    tools: Sequence[str] = ()  # paths of the tools, where they are not tools.{i}

    def tool(self, index: int) -> str:
        """The path of a tool."""
        return self.tools[index] if self.tools else f"tools.{index}"

    def of_function(self, index: int, name: str) -> str:
        """The path of a field of a tool's function."""
        return f"{self.tool(index)}.{self.function}{self.parameters if name == 'parameters' else name}"


@dataclass
class Conversation:
    """A chat request as the chat template and the tool parser need it, in any dialect."""

    messages: list[dict[str, Any]]  # as check_messages returns them
    tools: list[dict[str, Any]] | None = None  # as OpenAI writes them, unchecked
    tool_choice: Any = None  # likewise
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    earlier_ids: list[int] = field(default_factory=list)  # tokens before those of the messages
    thinking: bool | None = None  # the client wants the model to think, or not to; None: it does not say
    budget: int | None = None  # tokens that the model may think; None: no limit
    budget_field: str = "thinking_token_budget"  # that asks for it
    budget_is_hint: bool = False  # clients send it to every model: where nothing can hold it, there is no limit
    keeps_thoughts: bool | None = (
        None  # the client wants thoughts of earlier turns in the prompt, or not; None: as above
    )
    listed: list[dict[str, Any]] | None = None  # the tools that the prompt lists; None: all. Messages tell of others
    fields: FieldNames = FieldNames()
    keep: Keep | None = None  # what of the prompt the client wants found again

    @property
    def opens_answer(self) -> bool:
        """True if the template opens a new message for the answer; by default unless the last one is continued."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


def image_of(part: Any, where: str) -> ImagePart | None:
    """The image of a part of a message over HTTP; None for what is no image. Raises FieldError."""
    if isinstance(part, ImagePart):  # of a dialect that names it in its own way
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _OTHER_MEDIA:
        name = kind.removeprefix("input_").removesuffix("_url")
        raise FieldError(f"{where}.type {shown(kind)} is not supported: no model reads {name} here", f"{where}.type")
    if kind not in _IMAGES:
        return None
    where = f"{where}.image_url"
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str | Pieces):
        raise FieldError(f"{where} must be a url, or an object with one, got {shown(given)}", where)
    detail = given.get("detail") if isinstance(given, dict) else part.get("detail")
    if detail not in (None, "auto", "low", "high", "original"):
        raise FieldError(f"{where}.detail must be auto, low or high, got {shown(detail)}", f"{where}.detail")
    return ImagePart(where, url)


def check_messages(messages: Sequence[Mapping[str, Any]], read_image: ReadImage = image_of) -> list[dict[str, Any]]:
    """The messages as `read_messages` makes them. Raises FieldError naming the message."""
    if not messages:
        raise FieldError("messages must not be empty: send at least one", "messages")
    if len(messages) > MAX_MESSAGES:
        raise FieldError(f"messages takes at most {MAX_MESSAGES}, got {len(messages)}", "messages")
    for at, message in enumerate(messages):
        if (role := message.get("role")) not in ROLES:
            field = f"messages.{at}.role"
            raise FieldError(f"{field} must be one of {', '.join(ROLES)}, got {shown(role)}", field)
    read = read_messages(messages, read_image)
    if not read:
        raise FieldError("messages hold a line for billing and nothing else: send at least one message", "messages")
    return read


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The images of checked messages, in order."""
    return [part for message in messages for part in message.get(PARTS, ()) if not isinstance(part, str)]


def check_texts(messages: list[dict[str, Any]], images: Sequence[Any], placeholder: str) -> None:
    """Raises FieldError for a text that holds an image's placeholder where there are images too: nobody could tell
    which of them is one."""
    if not images or not placeholder:
        return
    for message in messages:
        if placeholder in message["content"]:
            own = images_of([message])
            words = (own or images)[0].where.split(".")
            field = "prompt" if words[0] == "images" else f"{words[0]}.{words[1]}.content" if own else words[0]
            raise FieldError(
                f"{field} has the text {placeholder}, which stands for an image; write it in another way", field
            )
