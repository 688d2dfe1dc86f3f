"""From a chat with pictures to tokens: as transformers' processor, template and model of the same checkpoint go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from support.hybrid_cases import QWEN3_5
from support.images import make_tokenizer
from support.small_sizes import SMALL
from support.vision import randomize

from octavo import LLM, SamplingParams

TEXT = SMALL | {"vocab_size": 400, "hidden_size": 64, "max_position_embeddings": 1024}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
QWEN_TOWER = {"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
PINPOINTS = [[28 * row, 28 * column] for row in (1, 2, 3) for column in (1, 2, 3)]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
QWEN3_SIZES = {
    "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 30},
    "patch_size": 16,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
HYBRID = {key: QWEN3_5[key] for key in QWEN3_5 if key not in SMALL} | {"num_hidden_layers": 4}
QWEN_NAMES = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}


@dataclass
class Family:
    """``module`` and ``name``: where transformers has the processor, and what its classes' names begin with.
    ``tokens``: special tokens by the attributes and the settings that name them. ``mark`` is in the template."""

    module: str
    name: str
    image_processor: str
    sizes: dict[str, Any]
    processor: dict[str, Any]
    settings: dict[str, Any]
    tokens: dict[str, str]
    mark: str
    config: str = ""  # what its config's name begins with, if that is another name


def qwen(module: str, name: str, patch: int, sizes: dict[str, Any], text: dict[str, Any], tower: Any) -> Family:
    rope = {"rope_type": "default", "rope_theta": 10000.0, **text.pop("rope")}
    settings = {
        "text_config": TEXT | text | {"rope_parameters": rope},
        "vision_config": QWEN_TOWER | {"patch_size": patch} | tower,
    }
    image_processor = "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil"
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    return Family(module, name, image_processor, sizes, {"video_processor": True}, settings, QWEN_NAMES, mark)


FAMILIES = {
    "llava": Family(
        "llava",
        "Llava",
        "clip.image_processing_pil_clip.CLIPImageProcessorPil",
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER | {"model_type": "clip_vision_model"}},
        {"image_token": "<image>"},
        "<image>",
    ),
    "llava-onevision": Family(
        "llava_onevision",
        "LlavaOnevision",
        "llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil",
        {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": PINPOINTS},
        {
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_4",
            "video_processor": True,
        },
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "image_grid_pinpoints": PINPOINTS,
            "vision_config": TOWER | {"model_type": "siglip_vision_model", "image_size": 28, "vision_use_head": False},
            "vision_aspect_ratio": "anyres_max_4",
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        {"image_token": "<image>"},
        "<image>",
    ),
    "idefics3": Family(
        "idefics3",
        "Idefics3",
        "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 168}, "max_image_size": {"longest_edge": 56}},
        {"image_seq_len": 4},
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER, "scale_factor": 2},
        {"image_token": "<image>"},
        "<image>",
    ),
    "gemma3": Family(
        "gemma3",
        "Gemma3",
        "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        {"size": {"height": 56, "width": 56}},
        {"image_seq_length": 4},
        {
            "text_config": TEXT
            | {
                "head_dim": 16,
                "sliding_window": 32,
                "query_pre_attn_scalar": 16,
                "num_hidden_layers": 6,
            },
            "vision_config": TOWER | {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        "<start_of_image>",
    ),
    "qwen2.5-vl": qwen(
        "qwen2_5_vl",
        "Qwen2_5_VL",
        14,
        {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 40},
        {"rope": {"mrope_section": [2, 3, 3]}},
        {"fullatt_block_indexes": [1, 3], "window_size": 56},
    ),
    "qwen3-vl": qwen(
        "qwen3_vl",
        "Qwen3VL",
        16,
        QWEN3_SIZES,
        {"head_dim": 16, "num_hidden_layers": 5, "rope": {"mrope_section": [3, 3, 2], "mrope_interleaved": True}},
        {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2]},
    ),
    "qwen3.5": replace(
        qwen(
            "qwen3_vl",
            "Qwen3VL",
            16,
            QWEN3_SIZES,
            HYBRID | {"rope": {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}},
            {"num_position_embeddings": 64},
        ),
        config="Qwen3_5",
    ),
}


def of_transformers(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"transformers.models.{module}"), name)


def save(family: Family, path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """transformers' model and processor of a checkpoint that is saved to ``path``."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer().backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=TEMPLATE.replace("MARK", family.mark),
    )
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in family.tokens.items()}
    for name, token in family.tokens.items():
        for alias in (name, name.replace("start", "bos").replace("end", "eos")):
            setattr(tokenizer, alias, token)
            setattr(tokenizer, f"{alias}_id", ids[name])
    image_processor = of_transformers(family.image_processor)(**family.sizes)
    options: dict[str, Any] = dict(family.processor)
    if options.get("video_processor"):  # transformers' own needs torchvision
        options["video_processor"] = SimpleNamespace(merge_size=2)
        monkeypatch.setattr(transformers.ProcessorMixin, "check_argument_for_proper_class", lambda *_, **__: None)
    kind = of_transformers(f"{family.module}.processing_{family.module}.{family.name}Processor")
    processor = kind(image_processor, tokenizer, chat_template=tokenizer.chat_template, **options)
    in_config = {f"{name}_id": number for name, number in ids.items()}
    in_config |= {f"{name}_index": number for name, number in ids.items()}
    config = getattr(transformers, f"{family.config or family.name}Config")(**family.settings, **in_config)
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(model, family.name)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if "video_processor" in options:
        image_processor.save_pretrained(path)
    else:
        processor.save_pretrained(path)
    return model, processor


def conversation(pictures: list[Image.Image], show: Callable[[Image.Image], dict[str, Any]]) -> list[dict[str, Any]]:
    """Pictures between words, and two more turns."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "look: "}]
    for number, picture in enumerate(pictures):
        parts += [show(picture), {"type": "text", "text": f" number {number}. "}]
    return [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and?"},
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_with_pictures_goes_as_in_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = save(FAMILIES[name], tmp_path, monkeypatch)
    llm = LLM(str(tmp_path), dtype="float32", quantization="none", max_model_len=512)
    rng = np.random.default_rng(0)
    for sizes in ([(60, 90)], [(200, 50), (33, 77)], [], [(5, 300)]):
        if name == "llava-onevision" and len(sizes) > 1:
            continue  # its template gives no tiles to several, its processor alone does, and so do we
        pictures = [Image.fromarray(rng.integers(0, 255, (h, w, 3), dtype=np.uint8)) for w, h in sizes]
        theirs = conversation(pictures, lambda picture: {"type": "image", "image": picture})
        inputs = processor.apply_chat_template(
            [theirs], tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="pt"
        )
        count = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
        ours = conversation(pictures, lambda picture: {"type": "image_pil", "image_pil": picture})
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = llm.chat(ours, greedy, use_tqdm=False)
        assert output.prompt_token_ids == tokens[:count].tolist(), sizes
        assert output.outputs[0].token_ids == tokens[count:].tolist(), sizes
