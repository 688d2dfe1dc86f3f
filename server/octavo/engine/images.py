"""Images of a prompt: from PIL to what the engine core takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from octavo.interface.architectures import SEES_IMAGES_WHOLE
from octavo.interface.engine_config import EngineConfig
from octavo.interface.images import HostTensor, ImageItem

if TYPE_CHECKING:
    from octavo.multimodal.items import ImageFeatures
    from octavo.multimodal.processors.base import ImageProcessor
    from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_ASKED = '"multi_modal_data" must be {"image": a PIL image, or a list of them}'


class ImageInputs:
    """Turn images into a model's inputs. Raises ValueError, which names the model, if it reads none."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        """Raises ConfigError for ``mm_processor_kwargs`` that the model's processor does not have, and ModelError for
        files of it that contradict the model. Without such files text is answered, and images are refused."""
        self._config, self._tokenizer, self._missing = config, tokenizer, None
        model = config.model
        if not model.reads_images or tokenizer is None:
            return
        from octavo.multimodal.processors.settings import why_no_settings

        self._missing = why_no_settings(model.files.path)
        if self._missing:
            logger.warning("images are refused: %s", self._missing)
        else:
            _ = self.processor

    @cached_property
    def processor(self) -> ImageProcessor:
        """The checkpoint's own."""
        model = self._config.model
        if model.language_model_only:
            raise ValueError("images are not read with language_model_only; send text alone")
        if model.max_images == 0:
            raise ValueError('prompt has images, and limit_mm_per_prompt is {"image": 0}; send text alone')
        if not model.reads_images:
            raise ValueError(f"prompt has images, and the model {model.model} takes text only; send text alone")
        if self._tokenizer is None:
            raise ValueError("images need a tokenizer, and the engine runs without one (skip_tokenizer_init)")
        if self._missing:
            raise ValueError(f"images are not read: {self._missing}")
        from octavo.multimodal.processors import image_processor

        found = image_processor(model.files.path, model.hf_config, self._tokenizer, model.mm_processor_kwargs)
        assert found is not None, "every model that reads images has a processor"
        return found

    @property
    def placeholder(self) -> str:
        """The text of the token that stands for an image; '' for a model that reads none."""
        if self._tokenizer is None or not self._config.model.reads_images:
            return ""
        return self._tokenizer.convert_ids_to_tokens([self.processor.placeholder])[0] or ""

    def check(self, count: int) -> None:
        """Raise ValueError where the model does not read images, or not so many in a prompt."""
        most = self._config.model.max_images
        if self.processor is not None and most is not None and count > most:
            raise ValueError(
                f"prompt has {count} images, and at most {most} are taken (limit_mm_per_prompt); send fewer"
            )

    def process(self, data: Any) -> list[ImageFeatures]:
        """The images of a prompt's ``multi_modal_data``: from PIL, or processed already."""
        from octavo.multimodal.decode import turned
        from octavo.multimodal.items import ImageFeatures

        if not isinstance(data, dict):
            raise ValueError(f"{_ASKED}, got {type(data).__name__}")
        if others := sorted(set(data) - {"image"}):
            raise ValueError(f"multi_modal_data has {', '.join(others)}, which no model reads here; {_ASKED}")
        images = data["image"] if isinstance(data["image"], (list, tuple)) else [data["image"]]
        for image in images:
            is_image = hasattr(image, "convert") and hasattr(image, "size")
            if not is_image and not isinstance(image, ImageFeatures):
                raise ValueError(f"{_ASKED}, got {type(image).__name__}")
        self.check(len(images))
        return [
            image if isinstance(image, ImageFeatures) else self.processor.process(turned(image)) for image in images
        ]

    def expanded(self, ids: Sequence[int], count: int, features: Sequence[ImageFeatures]) -> int:
        """The number that the first ``count`` of ``ids`` become with images in the place of their placeholders."""
        if not features:
            return count
        begun = ids[:count]
        return len(self.processor.expand(begun, features[: begun.count(self.processor.placeholder)])[0])

    def place(self, ids: Sequence[int], features: Sequence[ImageFeatures]) -> tuple[list[int], list[ImageItem]]:
        """The prompt with each placeholder replaced by its image's tokens, and where they lie."""
        expanded, offsets = self.processor.expand(ids, features)
        whole = self._config.model.architecture in SEES_IMAGES_WHOLE
        items = []
        for offset, image in zip(offsets, features, strict=True):
            for part in self.processor.parts(image):
                tensors = {name: HostTensor.of(array, part.places.get(name)) for name, array in part.tensors.items()}
                grid = self.processor.grid(part)
                items.append(ImageItem(part.digest, offset, list(part.is_embed), tensors, grid, whole, part.file))
                offset += len(part.is_embed)
        return expanded, items
