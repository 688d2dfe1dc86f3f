"""Common parts of every family's image processor: pixels for the encoder, tokens for the prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.errors import ModelError
from octavo.multimodal.items import ImageFeatures, image_digest
from octavo.multimodal.processors import pixels
from octavo.multimodal.processors.settings import Settings, read_settings

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from PIL.Image import Image

    from octavo.text.tokenizer import Tokenizer

Expansion = tuple[tuple[int, ...], tuple[bool, ...]]  # token ids, and which of them are embeddings

COMMON: Mapping[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
}


class ImageProcessor(ABC):
    """One checkpoint's processor. Immutable once made; holds plain numbers, so that processes can be given it."""

    defaults: ClassVar[Mapping[str, Any]]  # of the family's image processor, where files say nothing
    placeholder: int  # the token that stands for an image in a prompt

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.resample = int(settings.image["resample"])
        self.parameters = {"processor": type(self).__name__, **settings.image}

    @cached_property
    def table(self) -> np.ndarray:
        """Return the value of each byte, see `pixels.value_table`."""
        image = self.settings.image
        normalize = bool(image["do_normalize"])
        return pixels.value_table(
            image["rescale_factor"] if image["do_rescale"] else None,
            image["image_mean"] if normalize else None,
            image["image_std"] if normalize else None,
        )

    @classmethod
    def from_checkpoint(
        cls,
        model_path: str | Path,
        hf_config: Mapping[str, Any],
        tokenizer: Tokenizer,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> ImageProcessor:
        """The processor that the files in ``model_path`` describe. ``hf_config`` is config.json;
        ``mm_processor_kwargs`` replace settings of the image processor. Raises ModelError or ConfigError."""
        return cls(read_settings(model_path, hf_config, cls.defaults, mm_processor_kwargs), tokenizer)

    def process(self, image: Image) -> ImageFeatures:
        """An image of any mode, already turned as its EXIF data say. Raises ValueError for one that the model cannot
        take."""
        if not image.width or not image.height:
            raise ValueError(f"image is {image.width} x {image.height} pixels; it must have some")
        rgb = pixels.to_rgb(image)
        tensors = self.tensors(rgb)
        token_ids, is_embed = self.expansion(rgb.width, rgb.height)
        return ImageFeatures(image_digest(self.parameters, rgb), tensors, token_ids, is_embed)

    @abstractmethod
    def tensors(self, rgb: Image) -> dict[str, np.ndarray]:
        """The encoder's input of one image in mode RGB, as transformers' processor gives it for that image alone."""

    @abstractmethod
    def outline(self, width: int, height: int) -> dict[str, np.ndarray]:
        """Return the shape of the result of `tensors` for an image of that many pixels, filled with zeros that take no
        memory."""

    @abstractmethod
    def expansion(self, width: int, height: int) -> Expansion:
        """Return the tokens that replace the placeholder of an image of that many pixels."""

    def parts(self, image: ImageFeatures) -> list[ImageFeatures]:
        """The pieces of an image that the encoder takes one by one; their tokens follow each other."""
        return [image]

    def grid(self, image: ImageFeatures) -> tuple[int, int, int] | None:
        """Embeddings in time, height and width, of families whose positions have these; None: of others."""
        return None

    @property
    @abstractmethod
    def largest_image(self) -> tuple[int, int]:
        """(width, height) of an image that takes as many embeddings as any."""

    def max_tokens(self) -> int:
        """Embeddings of the image that takes most."""
        return sum(self.expansion(*self.largest_image)[1])

    def expand(self, prompt_token_ids: Sequence[int], features: Sequence[ImageFeatures]) -> tuple[list[int], list[int]]:
        """The prompt with each placeholder replaced by its image's tokens, and where each image's tokens begin. Raises
        ValueError when there are not as many placeholders as images."""
        ids: list[int] = []
        offsets: list[int] = []
        found = prompt_token_ids.count(self.placeholder)
        if found != len(features):
            raise ValueError(
                f"prompt has {found} image placeholders (token {self.placeholder}), and {len(features)} images came "
                "with it; put one placeholder for each image"
            )
        for token in prompt_token_ids:
            if token != self.placeholder:
                ids.append(token)
                continue
            image = features[len(offsets)]
            offsets.append(self.insert(ids, image))
        return self.joined(ids, offsets)

    def insert(self, ids: list[int], image: ImageFeatures) -> int:
        """Append an image's tokens, and what stands around them; returns where they begin."""
        offset = len(ids)
        ids += image.token_ids
        return offset

    def joined(self, ids: list[int], offsets: list[int]) -> tuple[list[int], list[int]]:
        """A chance to tokenise again what meets at the edges of images."""
        return ids, offsets


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the model cannot do without. Raises ModelError."""
    found = tokenizer.convert_tokens_to_ids([token])[0]
    if found is None:
        raise ModelError(f"the tokenizer has no token {token}, which stands for images; fetch the model again")
    return found


def placeholder_id(settings: Settings, tokenizer: Tokenizer, token: str) -> int:
    """config.json's id of the token that stands for an image; else that of ``token``."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(settings.model.get(name), int):
            return int(settings.model[name])
    return token_id(tokenizer, token)


def between(tokenizer: Tokenizer, before: str, text: str, after: str) -> tuple[int, ...]:
    """Token ids of ``text`` where it stands between two special tokens."""
    ids = tokenizer.encode(before + text + after, add_special_tokens=False)
    first, last = (len(tokenizer.encode(edge, add_special_tokens=False)) if edge else 0 for edge in (before, after))
    return tuple(ids[first : len(ids) - last])


def no_pixels(*shape: int) -> np.ndarray:
    """Zeros that share the memory of one: float32 ``shape``."""
    import numpy as np

    return np.broadcast_to(np.float32(0), shape)


def repeated(token: int, count: int) -> Expansion:
    """Placeholders of embeddings alone, repeated."""
    return (token,) * count, (True,) * count
