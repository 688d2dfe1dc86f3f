"""Images in messages of programs: PIL images and data: urls, decoded here and now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.multimodal.decode import decode
from octavo.multimodal.fetch import data_url_bytes
from octavo.text.content_format import PARTS

if TYPE_CHECKING:
    from PIL.Image import Image

_OTHERS = ("video", "audio", "file")


def messages_with_images(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[Image]]:
    """The messages for `octavo.text.content_format.with_parts`, and their images in order. Raises ValueError that names
    the part that is none of text, image_url and image_pil."""
    found, images = [], []
    for at, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list) or not any(
            isinstance(p, Mapping) and p.get("type") != "text" for p in content
        ):
            found.append(dict(message))
            continue
        parts = [
            part if isinstance(part, str) else _part(part, f"messages.{at}.content.{i}")
            for i, part in enumerate(content)
        ]
        images += [part for part in parts if not isinstance(part, str)]
        text = "\n".join(part for part in parts if isinstance(part, str))
        found.append({**message, "content": text, PARTS: parts})
    return found, images


def _part(part: Any, where: str) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
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
