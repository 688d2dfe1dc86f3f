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
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip
TOWER = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 64,
    "patch_size": 16,
}  # fmt: skip
SMOLVLM_TEXT = TEXT | {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3,
}  # fmt: skip
SIGLIP_BASE = TOWER | {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 512,
}  # fmt: skip
MARKS = (
    "<image>", "<fake_token_around_image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)), "<end_of_utterance>",
    "<start_of_image>", "<image_soft_token>", "<end_of_image>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}PLACEHOLDER"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


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
    video_processor: str = ""  # that vLLM asks for, also where no videos are sent


def _idefics3(text: dict[str, Any], tower: dict[str, Any], scale: int, dtype: str = "float32") -> Checkpoint:
    side = tower["image_size"]
    return Checkpoint(
        "Idefics3Config",
        lambda ids: {
            "text_config": text, "vision_config": tower, "scale_factor": scale, "image_token_id": ids["<image>"],
        },
        "Idefics3",
        # An image that is smaller than a tile is enlarged to one: no image has several.
        HALVES | {"size": {"longest_edge": side}, "max_image_size": {"longest_edge": side}, "resample": 1},
        {"image_seq_len": (side // tower["patch_size"] // scale) ** 2}, dtype=dtype,
    )  # fmt: skip


def _qwen(kind: str, sections: list[int], tower: dict[str, Any], patch: int, processor: str) -> Checkpoint:
    text = {key: value for key, value in TEXT.items() if key != "model_type"} | {
        "head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
    }  # fmt: skip
    marks = {
        "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }  # fmt: skip
    vision = {
        "depth": 3, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 128,
        "patch_size": patch,
    }  # fmt: skip
    square = (2 * patch) ** 2  # pixels of an embedding
    return Checkpoint(
        f"{kind}Config",
        lambda ids: {
            "text_config": text, "vision_config": vision | tower, **{name: ids[mark] for name, mark in marks.items()},
        },
        kind,
        {
            "image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "merge_size": 2,
            "temporal_patch_size": 2, "size": {"shortest_edge": square, "longest_edge": 64 * square},
        },
        {}, "<|vision_start|><|image_pad|><|vision_end|>",
        names={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}, video_processor=processor,
    )  # fmt: skip


CHECKPOINTS = {
    "tiny-idefics3": _idefics3(TEXT, TOWER, 2),
    "tiny-llava": Checkpoint(
        "LlavaConfig",
        lambda ids: {
            "text_config": TEXT, "vision_config": TOWER | {"model_type": "clip_vision_model", "projection_dim": 64},
            "image_token_index": ids["<image>"], "image_token_id": ids["<image>"],
        },
        "Llava", {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}},
        {"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "tiny-gemma3": Checkpoint(
        "Gemma3Config",
        lambda ids: {
            "text_config": {key: value for key, value in TEXT.items() if key != "model_type"} | {
                "head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 6, "sliding_window": 64,
            },
            "vision_config": TOWER | {"model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4,
            "image_token_id": ids["<image_soft_token>"], "image_token_index": ids["<image_soft_token>"],
            "boi_token_index": ids["<start_of_image>"], "eoi_token_index": ids["<end_of_image>"],
        },
        "Gemma3", HALVES | {"size": {"height": 64, "width": 64}, "resample": 2}, {"image_seq_length": 4},
        "<start_of_image>",
        names={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "tiny-qwen2.5-vl": _qwen(
        "Qwen2_5_VL", [4, 6, 6], {"window_size": 56, "fullatt_block_indexes": [2]}, 14, "Qwen2VLVideoProcessor"
    ),
    "tiny-qwen3-vl": _qwen(
        "Qwen3VL", [6, 5, 5], {"num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1]}, 16,
        "Qwen3VLVideoProcessor",
    ),
    "smolvlm": _idefics3(SMOLVLM_TEXT, SIGLIP_BASE, 4, "bfloat16"),
}  # fmt: skip
FORMAT = 3  # one more, and what was made before is made anew


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
    backend.save(str(folder / "tokenizer.json"))
    ids = {mark: backend.token_to_id(mark) for mark in MARKS}
    settings = made.settings(ids)
    settings["text_config"] = settings["text_config"] | {
        "vocab_size": -(-backend.get_vocab_size() // 64) * 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, made.config_class)(**settings)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # states keep their size, and the likeliest token is well ahead of the next
                scale = 4.0 if "lm_head" in name or "embed_tokens" in name else 1.0
                parameter.normal_(0, scale * parameter[0].numel() ** -0.5)
    for part in (config.text_config, config.vision_config):
        part.dtype = made.dtype
    model.to(getattr(torch, made.dtype)).save_pretrained(folder)
    template = TEMPLATE.replace("PLACEHOLDER", made.placeholder)
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **tokens,
            "extra_special_tokens": made.names, **made.names,
        },
        "preprocessor_config.json": {
            "image_processor_type": f"{made.processor}ImageProcessor", **made.image_processor,
        },
        "processor_config.json": {"processor_class": f"{made.processor}Processor", **made.processor_settings},
    }  # fmt: skip
    if made.video_processor:
        files["video_preprocessor_config.json"] = {"video_processor_type": made.video_processor}
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=1) + "\n")
