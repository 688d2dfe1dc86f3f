"""Image processors by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.multimodal.processors.base import ImageProcessor
from octavo.multimodal.processors.gemma3 import Gemma3Processor
from octavo.multimodal.processors.idefics3 import Idefics3Processor
from octavo.multimodal.processors.llava import LlavaProcessor
from octavo.multimodal.processors.llava_next import LlavaNextProcessor, LlavaOnevisionProcessor
from octavo.multimodal.processors.pixtral import PixtralProcessor
from octavo.multimodal.processors.qwen_vl import QwenVLProcessor

if TYPE_CHECKING:
    from pathlib import Path

    from octavo.text.tokenizer import Tokenizer

PROCESSORS: Mapping[str, type[ImageProcessor]] = {
    "Gemma3ForConditionalGeneration": Gemma3Processor,
    "Idefics3ForConditionalGeneration": Idefics3Processor,
    "LlavaForConditionalGeneration": LlavaProcessor,
    "LlavaNextForConditionalGeneration": LlavaNextProcessor,
    "LlavaOnevisionForConditionalGeneration": LlavaOnevisionProcessor,
    "Mistral3ForConditionalGeneration": PixtralProcessor,
    "Qwen2VLForConditionalGeneration": QwenVLProcessor,
    "Qwen2_5_VLForConditionalGeneration": QwenVLProcessor,
    "Qwen3VLForConditionalGeneration": QwenVLProcessor,
    "Qwen3VLMoeForConditionalGeneration": QwenVLProcessor,
    "Qwen3_5ForConditionalGeneration": QwenVLProcessor,
    "Qwen3_5MoeForConditionalGeneration": QwenVLProcessor,
    "SmolVLMForConditionalGeneration": Idefics3Processor,
}


def image_processor(
    model_path: str | Path,
    hf_config: Mapping[str, Any],
    tokenizer: Tokenizer,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
) -> ImageProcessor | None:
    """The processor of a checkpoint, None for an architecture that reads no images here. ``hf_config`` is config.json.
    Raises ModelError or ConfigError."""
    architecture = (hf_config.get("architectures") or [""])[0]
    kind = PROCESSORS.get(architecture)
    if architecture == "LlavaForConditionalGeneration" and _vision_type(hf_config) == "pixtral":
        kind = PixtralProcessor  # Pixtral 12B is a LLaVA around another encoder
    return None if kind is None else kind.from_checkpoint(model_path, hf_config, tokenizer, mm_processor_kwargs)


def _vision_type(hf_config: Mapping[str, Any]) -> Any:
    vision = hf_config.get("vision_config")
    return vision.get("model_type") if isinstance(vision, Mapping) else None
