"""Tiny random models that read images, made by transformers, and what their processors would make of some images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from support.hybrid_cases import QWEN3_5, QWEN3_5_MOE
from support.small_sizes import SMALL, rope

from octavo import LLM, SamplingParams
from octavo.interface.images import HostTensor, ImageItem
from octavo.interface.outputs import RequestOutput
from octavo.interface.tiles import tiling
from octavo.interface.vision_config import LLAVA_TOWERS, vision_config

IMAGE = 300  # the placeholder
AROUND = 301  # a token that stands between those of an image and is none
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
SIGLIP = CLIP | {"model_type": "siglip_vision_model"}
LANGUAGE = SMALL | {"max_position_embeddings": 512}  # images take many
TEXT = LANGUAGE | {"model_type": "llama"}


@dataclass
class TestImage:
    """One image: the tensors of transformers' processor, and the tokens that it takes."""

    tensors: dict[str, np.ndarray]
    token_ids: list[int]
    whole: bool = False
    grid: tuple[int, int, int] | None = None  # of its embeddings

    @property
    def digest(self) -> str:
        return sha256(b"".join(array.tobytes() for array in self.tensors.values())).hexdigest()

    def item(self, offset: int) -> ImageItem:
        tensors = {name: HostTensor.of(array) for name, array in self.tensors.items()}
        is_embed = [token == IMAGE for token in self.token_ids]
        return ImageItem(self.digest, offset, is_embed, tensors, self.grid, self.whole)


Prompt = list["int | TestImage"]  # tokens and images in their order


@dataclass
class Case:
    """``make_image`` takes a random generator."""

    config_class: str
    settings: dict[str, Any]
    make_image: Callable[[np.random.Generator], TestImage]
    whole: bool = False  # images are computed in one step
    apart: bool = False  # transformers takes images without a token between them for one
    state_blocks: int = 0  # of 4 tokens, that a sequence's state takes

    @property
    def architecture(self) -> str:
        return self.config_class.replace("Config", "ForConditionalGeneration")

    def save(self, path: Path, seed: int = 0) -> Any:
        """The reference model, saved to ``path``."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config_class)(**self.settings)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        randomize(model, self.config_class)
        model.save_pretrained(path)
        return model


def randomize(model: Any, family: str) -> None:
    """Draw weights large enough that every part of the model counts."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            less = "Gemma" in family or ("Qwen3_5" in family and "linear_attn" not in name)
            low = -0.5 if less and "language_model" in name else 0.5
            if parameter.ndim == 1 and "norm" in name and name.endswith("weight"):
                parameter.uniform_(low, low + 1.0)
            else:
                parameter.normal_(0, 0.15 if parameter.ndim > 1 else 0.1)


def _square(count: int, side: int = 32, **how: Any) -> Callable[[np.random.Generator], TestImage]:
    def make(rng: np.random.Generator) -> TestImage:
        return TestImage({"pixel_values": rng.standard_normal((1, 3, side, side), np.float32)}, [IMAGE] * count, **how)

    return make


def _tiles(rng: np.random.Generator) -> TestImage:
    """Three tiles of 4 embeddings, with tokens around them."""
    pixels = rng.standard_normal((1, 3, 3, 32, 32), np.float32)
    return TestImage({"pixel_values": pixels}, [AROUND, *[IMAGE] * 4] * 3 + [AROUND])


def _marked(rng: np.random.Generator) -> TestImage:
    """Four embeddings between two marks, without which neighbours would see each other."""
    made = _square(4)(rng)
    return TestImage(made.tensors, [AROUND, *made.token_ids, AROUND], whole=True)


def _patches(rng: np.random.Generator) -> TestImage:
    """Of any size: squares of 2 x 2 patches become an embedding each."""
    rows, columns = (2 * int(number) for number in rng.integers(1, 6, 2))
    tensors = {
        "pixel_values": rng.standard_normal((rows * columns, 3 * 2 * 4 * 4), np.float32),
        "image_grid_thw": np.array([[1, rows, columns]]),
    }
    return TestImage(tensors, [IMAGE] * (rows * columns // 4), grid=(1, rows // 2, columns // 2))


QWEN_TOWER = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 4,
}
QWEN_TEXT = LANGUAGE | {"num_hidden_layers": 4, "use_sliding_window": False}
QWEN3_TEXT = LANGUAGE | {"head_dim": 16, "num_hidden_layers": 4} | rope("default", mrope_section=[4, 2, 2])
QWEN3_TOWER = QWEN_TOWER | {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}


QWEN3_5_MORE = {"max_position_embeddings": 512} | rope("default", mrope_section=[3, 3, 2], partial_rotary_factor=0.5)
QWEN3_5_TOWER = QWEN_TOWER | {"num_position_embeddings": 36}


def _any_size(cell: int) -> Callable[[np.random.Generator], TestImage]:
    """Of unlike sizes, a token at the end of each row of embeddings."""

    def make(rng: np.random.Generator) -> TestImage:
        rows, columns = rng.integers(1, 5, 2).tolist()
        pixels = rng.standard_normal((1, 3, rows * cell, columns * cell), np.float32)
        sizes = np.array([[rows * cell, columns * cell]], np.int64)
        return TestImage({"pixel_values": pixels, "image_sizes": sizes}, ([IMAGE] * columns + [AROUND]) * rows)

    return make


def _tiled(config_class: str, settings: dict[str, Any]) -> Callable[[np.random.Generator], TestImage]:
    """Of unlike shapes, some of them padded in their tiles, some with more patches than are kept."""

    def make(rng: np.random.Generator) -> TestImage:
        height, width = rng.integers(5, 120, 2).tolist()
        tower = vision_config(settings, "test", LLAVA_TOWERS)
        tiles = tiling(settings, "test", tower, config_class == "LlavaOnevisionConfig")
        rows, columns = tiles.grid(height, width)
        pixels = rng.standard_normal((1, 1 + rows * columns, 3, 32, 32), np.float32)
        count = tower.side**2 + tiles.count(height, width)
        sizes = np.array([[height, width]], np.int64)
        return TestImage({"pixel_values": pixels, "image_sizes": sizes}, [IMAGE] * count)

    return make


PIXTRAL = {"model_type": "pixtral", **{key: CLIP[key] for key in CLIP if key != "model_type"}}
MISTRAL = LANGUAGE | {"model_type": "mistral", "head_dim": 16, "sliding_window": None}
LLAVA_NEXT = {
    "text_config": MISTRAL | {"sliding_window": 19},
    "vision_config": CLIP | {"patch_size": 16},
    "image_token_index": IMAGE,
    "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
}
ONEVISION = {
    "text_config": LANGUAGE | {"model_type": "qwen2"},
    "vision_config": SIGLIP | {"patch_size": 16},
    "image_token_index": IMAGE,
    "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64], [96, 32]],
    "vision_aspect_ratio": "anyres_max_2",
}
IDEFICS3 = {
    "text_config": TEXT,
    "image_token_id": IMAGE,
    "scale_factor": 2,
    "vision_config": {key: value for key, value in CLIP.items() if key != "model_type"},
}
CASES: dict[str, Case] = {
    "llava": Case("LlavaConfig", {"text_config": TEXT, "vision_config": CLIP, "image_token_index": IMAGE}, _square(16)),
    "llava-siglip": Case(
        "LlavaConfig",
        {
            "text_config": TEXT,
            "vision_config": SIGLIP,
            "image_token_index": IMAGE,
            "vision_feature_layer": [-1, -2],
            "vision_feature_select_strategy": "full",
            "multimodal_projector_bias": False,
        },
        _square(16),
    ),
    "gemma3": Case(
        "Gemma3Config",
        {
            "text_config": LANGUAGE
            | {
                "head_dim": 16,
                "sliding_window": 7,
                "num_hidden_layers": 6,
                "query_pre_attn_scalar": 16,
            },
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_id": IMAGE,
        },
        _marked,
        whole=True,
    ),
    "idefics3": Case("Idefics3Config", IDEFICS3, _tiles),
    "qwen2-vl": Case(
        "Qwen2VLConfig",
        {
            "text_config": QWEN_TEXT | rope("default", mrope_section=[1, 2, 3]),
            "image_token_id": IMAGE,
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 48,
                "mlp_ratio": 2,
                "num_heads": 2,
                "patch_size": 4,
            },
        },
        _patches,
        apart=True,
    ),
    "qwen2.5-vl": Case(
        "Qwen2_5_VLConfig",
        {
            "text_config": QWEN_TEXT | rope("default", mrope_section=[2, 2, 2]),
            "image_token_id": IMAGE,
            "vision_config": QWEN_TOWER | {"window_size": 16, "fullatt_block_indexes": [1, 3]},
        },
        _patches,
        apart=True,
    ),
    "qwen3-vl": Case(
        "Qwen3VLConfig",
        {"text_config": QWEN3_TEXT, "vision_config": QWEN3_TOWER, "image_token_id": IMAGE},
        _patches,
        apart=True,
    ),
    "qwen3-vl-moe": Case(
        "Qwen3VLMoeConfig",
        {
            "text_config": QWEN3_TEXT | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
            "vision_config": QWEN3_TOWER,
            "image_token_id": IMAGE,
        },
        _patches,
        apart=True,
    ),
    "qwen3.5": Case(
        "Qwen3_5Config",
        {"text_config": QWEN3_5 | QWEN3_5_MORE, "vision_config": QWEN3_5_TOWER, "image_token_id": IMAGE},
        _patches,
        apart=True,
        state_blocks=18,
    ),
    "qwen3.5-moe": Case(
        "Qwen3_5MoeConfig",
        {"text_config": QWEN3_5_MOE | QWEN3_5_MORE, "vision_config": QWEN3_5_TOWER, "image_token_id": IMAGE},
        _patches,
        apart=True,
        state_blocks=18,
    ),
    "smolvlm": Case("SmolVLMConfig", IDEFICS3, _tiles),
    "pixtral": Case(
        "LlavaConfig",
        {
            "text_config": MISTRAL,
            "vision_config": PIXTRAL | {"hidden_act": "silu"},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        _any_size(8),
    ),
    "mistral3": Case(
        "Mistral3Config",
        {
            "text_config": MISTRAL,
            "vision_config": PIXTRAL,
            "image_token_index": IMAGE,
            "vision_feature_layer": -2,
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
        },
        _any_size(16),
    ),
    "llava-next": Case("LlavaNextConfig", LLAVA_NEXT, _tiled("LlavaNextConfig", LLAVA_NEXT)),
    "llava-onevision": Case("LlavaOnevisionConfig", ONEVISION, _tiled("LlavaOnevisionConfig", ONEVISION)),
}


def reference_logits(model: Any, prompt: Prompt) -> torch.Tensor:
    """Of transformers: float32 [T, vocabulary]."""
    ids = tokens_of(prompt)
    images = [part for part in prompt if isinstance(part, TestImage)]
    inputs: dict[str, torch.Tensor] = {}
    tiles_apart = type(model).__name__.startswith("LlavaNext") or type(model).__name__.startswith("LlavaOnevision")
    for name in images[0].tensors if images else ():
        parts = [torch.from_numpy(image.tensors[name]) for image in images]
        axis = 1 if parts[0].ndim > 4 else 0
        if name == "pixel_values" and parts[0].ndim > 2 and (axis == 0 or tiles_apart):
            parts, axis = _padded(parts), 0
        inputs[name] = torch.cat(parts, dim=axis)
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), **inputs, **_more(model, ids)).logits[0]
    return logits


def _padded(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """With zeros behind every dimension, as transformers batches images of unlike sizes or numbers of tiles."""
    largest = [max(lengths) for lengths in zip(*(part.shape for part in parts), strict=True)]
    padded = [part.new_zeros(largest) for part in parts]
    for whole, part in zip(padded, parts, strict=True):
        whole[tuple(slice(length) for length in part.shape)] = part
    return padded


def _more(model: Any, ids: list[int]) -> dict[str, torch.Tensor]:
    kinds = torch.tensor([[int(token == IMAGE) for token in ids]])
    name = type(model).__name__
    if name.startswith("Gemma3"):
        return {"token_type_ids": kinds}
    return {"mm_token_type_ids": kinds} if name.startswith("Qwen") else {}


def tokens_of(prompt: Prompt) -> list[int]:
    """With what images take."""
    return [token for part in prompt for token in (part.token_ids if isinstance(part, TestImage) else [part])]


def items_of(prompt: Prompt) -> list[ImageItem]:
    """Its images, where they lie."""
    items, offset = [], 0
    for part in prompt:
        if isinstance(part, TestImage):
            items.append(part.item(offset))
        offset += len(part.token_ids) if isinstance(part, TestImage) else 1
    return items


def answer(llm: LLM, prompts: list[Prompt], **params: Any) -> list[RequestOutput]:
    """Of our engine, all at once."""
    asked = SamplingParams(temperature=0.0, ignore_eos=True, **params)
    requests = []
    for prompt in prompts:
        request = llm._input.process(llm._new_id(), {"prompt_token_ids": tokens_of(prompt)}, asked)
        request.mm_items = items_of(prompt)
        requests.append(request)
    return llm._run(requests, [None] * len(prompts), False)


def greedy(model: Any, prompt: Prompt, count: int) -> list[int]:
    """The tokens that transformers goes on with."""
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(reference_logits(model, [*prompt, *tokens])[-1].argmax()))
    return tokens
