"""Images in messages of programs: PIL images and data: urls, decoded here and now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.errors import FieldError
from octavo.multimodal.decode import decode
from octavo.multimodal.fetch import data_url_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

_OTHERS = ("video", "audio", "file")


@dataclass(frozen=True, eq=False)
class OfflineImage:
    """An image in a message. ``where`` is its field, for errors."""

    where: str
    image: Image


def offline_image(part: Any, where: str) -> OfflineImage:
    """The image of a part of a message. Raises FieldError for one that is none of text, image_url and image_pil."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_pil" and hasattr(part.get("image_pil"), "convert"):
        return OfflineImage(where, part["image_pil"])
    if kind == "image_url":
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        if isinstance(url, str):
            if url[:5].lower() != "data:":
                raise FieldError(
                    f"{where} is an address, and offline none is fetched: open it, and send the image as image_pil",
                    where,
                )
            try:
                return OfflineImage(where, decode(data_url_bytes(url)))
            except ValueError as error:
                raise FieldError(f"{where}: {error}", where) from None
    if isinstance(kind, str) and any(word in kind for word in _OTHERS):
        raise FieldError(f"{where} is of type {kind!r}, which no model reads here; send text and images", where)
    raise FieldError(f"{where} must be of type text, image_url or image_pil and hold it, got type {kind!r}", where)
