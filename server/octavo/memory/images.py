"""Device memory that images take beside weights: the largest one in the encoder, and the embeddings that are kept."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from octavo.errors import ConfigError
from octavo.interface.architectures import M_ROPE, SEES_IMAGES_WHOLE
from octavo.interface.engine_config import EngineConfig, ModelConfig, SchedulerConfig, num_sampled_rows
from octavo.interface.kv_cache_spec import DTYPE_BYTES
from octavo.interface.qwen_vision_config import qwen_vision_config
from octavo.interface.vision_config import MOST_PATCHES, tower_table
from octavo.multimodal.processors import image_processor
from octavo.multimodal.processors.settings import why_no_settings

if TYPE_CHECKING:
    import numpy as np

    from octavo.text.tokenizer import Tokenizer

# Embeddings that are kept at least: images of running prompts, and those that come again. vLLM keeps as many as a step
# has tokens, which on a CPU are few.
ENCODER_CACHE_TOKENS = 8192
_TRIES = 8  # to find out how large an image fits a prompt


@dataclass(frozen=True, eq=False)
class LargestImage:
    """The image that takes most of those that fit a prompt. ``tensors``: as its processor gives them, all 0."""

    width: int  # pixels, before the processor has changed that
    height: int
    num_tokens: int
    num_embeds: int
    tensors: Mapping[str, np.ndarray]


class _AnyTokenizer:
    """A tokenizer of which only lengths matter."""

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [0] * len(tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * (1 + len(text) // 8)


def largest_image(config: EngineConfig) -> LargestImage | None:
    """None: no images are read, or refused for want of the files that say how. Raises ModelError and ConfigError for
    what these files, or mm_processor_kwargs, say of images."""
    if not config.model.reads_images or why_no_settings(config.model.files.path) is not None:
        return None
    model = config.model
    described = json.dumps([model.hf_config, model.mm_processor_kwargs], default=str, sort_keys=True)
    return _largest(str(model.files.path), described, config.scheduler.max_model_len)


@lru_cache(maxsize=64)
def _largest(path: str, described: str, max_model_len: int) -> LargestImage:
    hf_config, kwargs = json.loads(described)
    processor = image_processor(path, hf_config, cast("Tokenizer", _AnyTokenizer()), kwargs)
    assert processor is not None, "every model that reads images has a processor"
    size, (low, high) = processor.largest_image, (0.0, 1.0)
    width, height = size
    if sum(processor.expansion(width, height)[1]) > max_model_len:
        for _ in range(_TRIES):  # the smallest that does not fit
            scale = (low + high) / 2
            width, height = (max(1, math.ceil(side * scale)) for side in size)
            fits = sum(processor.expansion(width, height)[1]) <= max_model_len
            low, high = (scale, high) if fits else (low, scale)
        width, height = (max(1, math.ceil(side * high)) for side in size)
    _, is_embed = processor.expansion(width, height)
    return LargestImage(
        width, height, len(is_embed), min(sum(is_embed), max_model_len), processor.outline(width, height)
    )


def with_images(config: EngineConfig, scheduler: SchedulerConfig) -> SchedulerConfig:
    """``scheduler``, whose max_num_batched_tokens is known, with what images need. Raises ConfigError where the largest
    one has no room in the encoder cache, or not in a step of which it has to be a part as a whole."""
    if not config.model.reads_images:
        return scheduler
    largest, asked = largest_image(config), scheduler.mm_encoder_cache_tokens
    least = largest.num_embeds if largest is not None else 1
    if asked is not None and largest is not None and asked < least:
        raise ConfigError(
            f"mm_encoder_cache_tokens ({asked}) must hold the largest image ({largest.width} x {largest.height} "
            f"pixels), which has {least} embeddings: give at least {least}, or make images smaller by "
            "mm_processor_kwargs"
        )
    scheduler = replace(scheduler, mm_encoder_cache_tokens=asked or max(ENCODER_CACHE_TOKENS, least))
    if config.model.architecture not in SEES_IMAGES_WHOLE:
        return scheduler
    return scheduler if largest is None else _with_whole_images(config, scheduler, largest.num_tokens)


def _with_whole_images(config: EngineConfig, scheduler: SchedulerConfig, tokens: int) -> SchedulerConfig:
    """The scheduler's settings with room in a step for an image of ``tokens`` tokens. Raises ConfigError."""
    rows = num_sampled_rows(scheduler.max_num_seqs, config.speculative.num_speculative_tokens)
    least, budget, none = rows + tokens, scheduler.max_num_batched_tokens, 'limit_mm_per_prompt {"image": 0}'
    if config.scheduler.max_num_batched_tokens and budget < least:
        raise ConfigError(
            f"max_num_batched_tokens ({budget}) is too small for images, whose {tokens} tokens are computed in one "
            f"step beside {rows} others: give at least {least}, a smaller max_num_seqs, or {none}"
        )
    if 0 < scheduler.long_prefill_token_threshold < tokens:
        raise ConfigError(
            f"long_prefill_token_threshold ({scheduler.long_prefill_token_threshold}) is too small for images, whose "
            f"{tokens} tokens are computed in one step: give 0, at least {tokens}, or {none}"
        )
    return replace(scheduler, max_num_batched_tokens=max(budget, least))


def encoder_cache_bytes(config: EngineConfig) -> int:
    """The bytes of the embeddings that are kept; 0: no images are read."""
    tokens = config.scheduler.mm_encoder_cache_tokens
    if not tokens or largest_image(config) is None:
        return 0
    model = config.model
    return tokens * model.hidden_size * DTYPE_BYTES[model.dtype] * (1 + num_deep(model))


def recorded_bytes(config: EngineConfig) -> int:
    """The bytes that a CPU's recorded steps keep of images, see `RecordedImages`; 0: no images are read."""
    if largest_image(config) is None:
        return 0
    model = config.model
    row = model.hidden_size * DTYPE_BYTES[model.dtype] * (1 + num_deep(model))
    return config.scheduler.max_num_batched_tokens * row


def num_deep(model: ModelConfig) -> int:
    """Embeddings of a placeholder beside its own, for layers behind the first (DeepStack)."""
    return _tower(model).deep


def encoder_bytes(config: EngineConfig) -> int:
    """The approximate bytes that the largest image takes in the encoder; 0: no images are read."""
    largest = largest_image(config)
    if largest is None:
        return 0
    model, tower = config.model, _tower(config.model)
    size, pixels = DTYPE_BYTES[model.dtype], largest.tensors["pixel_values"]
    numbers = math.prod(pixels.shape)
    patches = len(pixels) if pixels.ndim == 2 else numbers // (pixels.shape[-3] * tower.patch**2)
    at_a_time = patches
    if pixels.ndim > 4:  # tiles
        tile = patches // pixels.shape[1]
        at_a_time = min(patches, max(1, MOST_PATCHES // max(tile, 1)) * tile)
    row = at_a_time * tower.width * size
    beside = sum(array.nbytes for array in largest.tensors.values()) if config.device == "cpu" else 0  # as they came
    put = numbers * (4 if size == 4 else 4 + size)  # as the processor made them, and in the model's dtype
    cut = 3 * numbers * size + row  # patches out of pixels
    activation = _ACTIVATION.get(tower.act, 2) * at_a_time * tower.inner * size
    embeds = largest.num_embeds * model.hidden_size * size
    # A layer's input and sum are beside what it computes, and what earlier ones have left.
    kept = (tower.features - 1) * row + tower.deep * embeds + tower.turns * patches
    kept += (patches - at_a_time) * tower.width * tower.features * size
    layer = numbers * size + 3 * row + max(tower.attention * row, activation) + kept
    return int(1.02 * (beside + max(put, cut, layer, 3 * row + kept + 2 * embeds)))


_ACTIVATION = {"quick_gelu": 3, "silu": 3}  # tensors as wide as an MLP that are there with it; of others two
_QWEN = {
    "Qwen2VL": "qwen2_vl",
    "Qwen2_5_VL": "qwen2_5_vl",
    "Qwen3VL": "qwen3_vl",
    "Qwen3VLMoe": "qwen3_vl",
    "Qwen3_5": "qwen3_5",
    "Qwen3_5Moe": "qwen3_5",
}


@dataclass(frozen=True)
class _Tower:
    width: int
    inner: int
    patch: int
    act: str
    deep: int = 0
    features: int = 1  # states of layers that are kept until the last one is there
    attention: int = 7  # rows' widths: queries, keys and values, all of them beside each other, what was attended to
    turns: int = 0  # bytes of a patch, by which its queries and keys are turned


def _tower(model: ModelConfig) -> _Tower:
    """Sizes of the vision tower, from config.json."""
    if model.architecture in M_ROPE:
        kind = _QWEN[model.architecture.removesuffix("ForConditionalGeneration")]
        qwen = qwen_vision_config(model.hf_config, model.model, kind)
        return _Tower(
            qwen.width, qwen.inner, qwen.patch, qwen.act, len(qwen.deep_layers), 1, 4, 4 * qwen.width // qwen.num_heads
        )
    table, layer = tower_table(model.hf_config), model.hf_config.get("vision_feature_layer")
    width, patch = int(table["hidden_size"]), int(table["patch_size"])
    inner, features = int(table["intermediate_size"]), len(layer) if isinstance(layer, list) else 1
    attention = 9 if table.get("model_type") == "pixtral" else 7  # of which queries and keys are turned first
    return _Tower(width, inner, patch, str(table["hidden_act"]), features=features, attention=attention)
