"""Images in messages of programs: PIL images and data: urls, decoded here and now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.multimodal.decode import decode
from octavo.multimodal.fetch import data_url_bytes
from octavo.text.content_format import PARTS
from octavo.text.messages import read_messages

if TYPE_CHECKING:
    from PIL.Image import Image

_OTHERS = ("video", "audio", "file")


def messages_with_images(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[Image]]:
    """The messages for `octavo.text.content_format.with_parts`, as the server reads them, and their images in order.
    Raises ValueError that names the message, or the part that is none of text, image_url and image_pil."""
    found = read_messages(messages, _image)
    return found, [part for message in found for part in message.get(PARTS, ()) if not isinstance(part, str)]


def _image(part: Any, where: str) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_pil" and hasattr(part.get("image_pil"), "convert"):
        return part["image_pil"]
    if kind == "image_url":
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        if isinstance(url, str):
            if url[:5].lower() != "data:":
                raise ValueError(
                    f"{where} is an address, and offline none is fetched: open it, and send the image as image_pil"
                )
            try:
                return decode(data_url_bytes(url))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
    if isinstance(kind, str) and any(word in kind for word in _OTHERS):
        raise ValueError(f"{where} is of type {kind!r}, which no model reads here; send text and images")
    raise ValueError(f"{where} must be of type text, image_url or image_pil and hold it, got type {kind!r}")
