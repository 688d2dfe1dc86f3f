"""Turn an image into the form that the engine core sees."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.interface.memory_file import MemoryFile

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from octavo.multimodal.pieces import Pieces


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """One image, processed.

    ``digest`` is the same for two images exactly when their pixels, their shape and the processor's parameters are.
    ``tensors`` are those of transformers' processor for this image alone that the encoder reads (pixel_values,
    image_grid_thw, ...).
    ``token_ids`` stand in the prompt in place of the one placeholder; ``is_embed``, a flag for each, says which of them
    the encoder's embeddings replace. ``file`` holds the tensors' numbers, each from the byte in ``places`` on, where
    another process has made them.
    """

    digest: str
    tensors: dict[str, np.ndarray]
    token_ids: tuple[int, ...]
    is_embed: tuple[bool, ...]
    file: MemoryFile | None = None
    places: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_embeds(self) -> int:
        """Number of embeddings that the encoder computes for the image."""
        return sum(self.is_embed)


@dataclass(eq=False)
class ImagePart:
    """An image in a message. ``where`` is its field, for errors; ``content`` an address, which may be a data: url, or
    base64 alone."""

    where: str
    content: str | Pieces
    is_base64: bool = False
    features: ImageFeatures | None = None  # once it has been read; the content is dropped then


def image_digest(parameters: Mapping[str, Any], image: Image) -> str:
    """SHA-256 over the processor's name and ``parameters``, and the image's mode, width, height and pixels: the shape
    is part of it, so that no other image with the same bytes has the same digest."""
    head = json.dumps([parameters, image.mode, image.width, image.height], sort_keys=True, default=str)
    digest = hashlib.sha256(head.encode() + b"\0")
    digest.update(image.tobytes())
    return digest.hexdigest()
