"""Random checkpoints that read images, with the files that every engine wants: weights, tokenizer, processor, template.

``tiny`` ones are of a few layers, to compare tokens; ``smolvlm`` has the shape of SmolVLM-256M (a SigLIP tower of 93 M
weights at 512 x 512, 30 layers of width 576), to measure time: what a weight is does not change how long it takes. The
tokenizer is the embedded model's, with each family's marks of images added.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from octavo.bench.load import load_tokenizer

TEXT = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
TOWER = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 16,
}
SMOLVLM_TEXT = TEXT | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
SIGLIP_BASE = TOWER | {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
}
MARKS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    "<end_of_utterance>",
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<video>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}PLACEHOLDER"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As published files state them: where they are left out, vLLM gives some towers bytes instead of normalised pixels.
HALVES = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
UNLIKE = HALVES | {  # of each channel another one: CLIP's
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
CLIP = TOWER | {"model_type": "clip_vision_model", "projection_dim": 64}
SIGLIP = TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}
PINPOINTS = [[64, 128], [128, 64], [128, 128], [192, 64], [64, 192]]
LINE_BREAKS = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
# transformers saves weights of towers by other names than published checkpoints have, which vLLM wants.
PUBLISHED = {"vision_tower.": "vision_tower.vision_model."}


@dataclass(frozen=True)
class Checkpoint:
    """``settings`` of transformers' ``config_class``, given the ids of `MARKS`."""

    config_class: str
    settings: Callable[[dict[str, int]], dict[str, Any]]
    processor: str
    image_processor: dict[str, Any]
    processor_settings: dict[str, Any]
    placeholder: str = "<image>"
    dtype: str = "float32"
    names: dict[str, str] = field(default_factory=dict)  # of tokens, in tokenizer_config.json
    weights: dict[str, str] = field(default_factory=dict)  # beginnings of weights' names, and what they become
    words: tuple[str, ...] = ()  # tokens that the embedded model's tokenizer has in pieces, or writes in another way
    video_processor: str = ""  # that vLLM asks for, also where no videos are sent


def _placeholder(token: int) -> dict[str, int]:
    """By both of the names that configurations have had."""
    return {"image_token_id": token, "image_token_index": token}


def _idefics3(text: dict[str, Any], tower: dict[str, Any], scale: int, dtype: str = "float32") -> Checkpoint:
    side = tower["image_size"]
    return Checkpoint(
        "Idefics3Config",
        lambda ids: {
            "text_config": text,
            "vision_config": tower,
            "scale_factor": scale,
            "image_token_id": ids["<image>"],
        },
        "Idefics3",
        # An image that is smaller than a tile is enlarged to one: no image has several.
        HALVES | {"size": {"longest_edge": side}, "max_image_size": {"longest_edge": side}, "resample": 1},
        {"image_seq_len": (side // tower["patch_size"] // scale) ** 2},
        dtype=dtype,
    )


def _qwen(kind: str, rope: dict[str, Any], tower: dict[str, Any], patch: int, processor: str) -> Checkpoint:
    text = {key: value for key, value in TEXT.items() if key != "model_type"} | {
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
    }
    marks = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    vision = {
        "depth": 3,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "out_hidden_size": 128,
        "patch_size": patch,
    }
    square = (2 * patch) ** 2  # pixels of an embedding
    return Checkpoint(
        f"{kind}Config",
        lambda ids: {
            "text_config": text,
            "vision_config": vision | tower,
            **{name: ids[mark] for name, mark in marks.items()},
        },
        kind,
        UNLIKE
        | {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": patch,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": square, "longest_edge": 64 * square},
        },
        {},
        "<|vision_start|><|image_pad|><|vision_end|>",
        names={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        video_processor=processor,
    )


def _pixtral(config_class: str, settings: dict[str, Any]) -> Checkpoint:
    text = TEXT | {"model_type": "mistral", "head_dim": 32, "sliding_window": None}
    tower = TOWER | {"model_type": "pixtral", "head_dim": 32, "image_size": 256}
    return Checkpoint(
        config_class,
        lambda ids: {"text_config": text, "vision_config": tower, **settings, **_placeholder(ids["[IMG]"])},
        "Pixtral",
        UNLIKE | {"size": {"longest_edge": 256}, "patch_size": {"height": 16, "width": 16}},
        {"patch_size": 16, "spatial_merge_size": settings.get("spatial_merge_size", 1)},
        "[IMG]",
    )


CHECKPOINTS = {
    "tiny-idefics3": _idefics3(TEXT, TOWER, 2),
    "tiny-llava": Checkpoint(
        "LlavaConfig",
        lambda ids: {"text_config": TEXT, "vision_config": CLIP, **_placeholder(ids["<image>"])},
        "Llava",
        UNLIKE | {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}},
        {"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        weights=PUBLISHED,
    ),
    "tiny-llava-next": Checkpoint(
        "LlavaNextConfig",
        lambda ids: {
            "text_config": TEXT,
            "vision_config": CLIP,
            "image_grid_pinpoints": PINPOINTS,
            **_placeholder(ids["<image>"]),
        },
        "LlavaNext",
        UNLIKE
        | {
            "size": {"shortest_edge": 64},
            "crop_size": {"height": 64, "width": 64},
            "image_grid_pinpoints": PINPOINTS,
        },
        {"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        weights=PUBLISHED,
    ),
    "tiny-llava-onevision": Checkpoint(
        "LlavaOnevisionConfig",
        lambda ids: {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": SIGLIP,
            "image_grid_pinpoints": [*PINPOINTS, [256, 256]],
            "vision_aspect_ratio": "anyres_max_9",
            "vision_feature_layer": -1,
            "video_token_index": ids["<video>"],
            **_placeholder(ids["<image>"]),
        },
        "LlavaOnevision",
        HALVES | {"size": {"height": 64, "width": 64}, "image_grid_pinpoints": [*PINPOINTS, [256, 256]]},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
        video_processor="LlavaOnevisionVideoProcessor",
        weights=PUBLISHED,
    ),
    "tiny-pixtral": _pixtral("LlavaConfig", {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
    "tiny-mistral3": _pixtral(
        "Mistral3Config", {"vision_feature_layer": -1, "spatial_merge_size": 2, "tie_word_embeddings": False}
    ),
    "tiny-gemma3": Checkpoint(
        "Gemma3Config",
        lambda ids: {
            "text_config": {key: value for key, value in TEXT.items() if key != "model_type"}
            | {
                "head_dim": 32,
                "query_pre_attn_scalar": 32,
                "num_hidden_layers": 6,
                "sliding_window": 64,
            },
            # One token: vLLM's attention for CPUs lets no token of an image see those behind it, as they do in Gemma 3.
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 1,
            **_placeholder(ids["<image_soft_token>"]),
            "boi_token_index": ids["<start_of_image>"],
            "eoi_token_index": ids["<end_of_image>"],
        },
        "Gemma3",
        HALVES | {"size": {"height": 64, "width": 64}, "resample": 2},
        {"image_seq_length": 1},
        "<start_of_image>",
        names={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        weights=PUBLISHED,
        words=LINE_BREAKS,
    ),
    "tiny-qwen2.5-vl": _qwen(
        "Qwen2_5_VL",
        {"mrope_section": [4, 6, 6]},
        {"window_size": 56, "fullatt_block_indexes": [2]},
        14,
        "Qwen2VLVideoProcessor",
    ),
    "tiny-qwen3-vl": _qwen(
        "Qwen3VL",
        {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
        {"num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1]},
        16,
        "Qwen3VLVideoProcessor",
    ),
    "smolvlm": _idefics3(SMOLVLM_TEXT, SIGLIP_BASE, 4, "bfloat16"),
}
FORMAT = 4  # one more, and what was made before is made anew


def checkpoint(name: str, root: Path) -> Path:
    """The folder of a checkpoint, made if it is not there."""
    folder = root / f"{name}-{FORMAT}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _make(CHECKPOINTS[name], part)
        part.rename(folder)
    return folder


def _make(made: Checkpoint, folder: Path) -> None:
    import torch
    import transformers

    backend = load_tokenizer(None).backend
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    backend.add_tokens([AddedToken(word, normalized=False) for word in made.words])
    backend.save(str(folder / "tokenizer.json"))
    ids = {mark: backend.token_to_id(mark) for mark in MARKS}
    settings = made.settings(ids)
    settings["text_config"] = settings["text_config"] | {
        "vocab_size": -(-backend.get_vocab_size() // 64) * 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    torch.manual_seed(0)
    config = getattr(transformers, made.config_class)(**settings)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    _randomize(model)
    for part in (config.text_config, config.vision_config):
        part.dtype = made.dtype
    model.to(getattr(torch, made.dtype)).save_pretrained(folder)
    _rename(folder / "model.safetensors", made.weights)
    template = TEMPLATE.replace("PLACEHOLDER", made.placeholder)
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": template,
            **tokens,
            "extra_special_tokens": made.names,
            **made.names,
        },
        "preprocessor_config.json": {
            "image_processor_type": f"{made.processor}ImageProcessor",
            **made.image_processor,
        },
        "processor_config.json": {"processor_class": f"{made.processor}Processor", **made.processor_settings},
    }
    if made.video_processor:
        files["video_preprocessor_config.json"] = {"video_processor_type": made.video_processor}
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=1) + "\n")


def _randomize(model: Any) -> None:
    """States keep their size, and the likeliest token is well ahead of the next. Embeddings that are the head, too, are
    small beside what layers add to them: otherwise the likeliest token is the last one again, whatever the image."""
    import torch

    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                logits = "lm_head" in name or "embed_tokens" in name
                scale = (0.25 if tied else 4.0) if logits else 1.0
                parameter.normal_(0, scale * parameter[0].numel() ** -0.5)
            elif tied and name.endswith("language_model.norm.weight"):
                parameter += 15.0  # to 1 + weight, as Gemma has it: logits are as large as those of others


def _rename(file: Path, beginnings: dict[str, str]) -> None:
    """Weights whose names have one of ``beginnings`` get the other one instead."""
    from safetensors.torch import load_file, save_file

    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for old, new in beginnings.items():
        weights = {new + name.removeprefix(old) if name.startswith(old) else name: weights[name] for name in weights}
    save_file(weights, file, {"format": "pt"})
