"""Images in the results of tools, for chat templates that show images in messages of the user alone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from octavo.chat.messages import images_of
from octavo.errors import FieldError
from octavo.text.chat_template import ChatTemplateError, TemplateLimitError
from octavo.text.content_format import PARTS, joined

_RESULTS = ("tool", "function")
_BEGIN, _END = "<tool_response>", "</tool_response>"


def with_result_images(
    messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str], placeholder: str
) -> str:
    """The prompt that ``render`` makes of the messages. If images of results are not in it, each as ``placeholder``,
    they go into the user's turn behind the results; if the template refuses that, into the results' texts. Raises its
    ChatTemplateError, and FieldError naming an image that the template shows nowhere."""
    images = images_of([message for message in messages if message["role"] in _RESULTS])
    if not images:
        return render(messages)
    count, refusal = len(images_of(messages)), None
    for form in (messages, _moved(messages), _spelled(messages, placeholder)):
        try:
            text = render(form)
        except TemplateLimitError:
            raise
        except ChatTemplateError as error:
            refusal = error if form is messages else refusal
        else:
            if text.count(placeholder) == count:
                return text
    if refusal is not None:
        raise refusal
    where = images[0].where
    raise FieldError(
        f"{where} is an image in a tool's result, and the chat template shows none there; send it in a message of the "
        "user",
        where,
    )


def _moved(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    waiting: list[Any] = []
    for message in [*messages, None]:
        if message is not None and message["role"] in _RESULTS:
            if images := images_of([message]):
                waiting += [_BEGIN, *images, _END]
                message = {key: value for key, value in message.items() if key != PARTS}
        elif waiting:
            shown = {"role": "user", "content": "\n".join(p for p in waiting if isinstance(p, str)), PARTS: waiting}
            waiting = []
            if message is not None and message["role"] == "user":
                message = joined(shown, message)
            else:
                found.append(shown)
        if message is not None:
            found.append(message)
    return found


def _spelled(messages: Sequence[dict[str, Any]], placeholder: str) -> list[dict[str, Any]]:
    found = []
    for message in messages:
        if message["role"] in _RESULTS and PARTS in message:
            texts = [part if isinstance(part, str) else placeholder for part in message[PARTS]]
            kept = {key: value for key, value in message.items() if key != PARTS}
            message = {**kept, "content": "\n".join(texts)}
        found.append(message)
    return found
