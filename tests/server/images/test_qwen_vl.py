"""Qwen3-VL from its files: PIL images, vectors of text and images, and config.json that contradicts itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.images import image_of, make_tokenizer
from support.vision import CASES

from octavo import LLM
from octavo.errors import ModelError
from octavo.interface.qwen_vision_config import qwen_vision_config

PLACEHOLDER = "<|image_pad|>"
SIZES = {"size": {"shortest_edge": 256, "longest_edge": 2048}, "patch_size": 4}  # 4 to 32 squares of 8 x 8 pixels


def picture(seed: int, width: int, height: int) -> Image.Image:
    return image_of("RGB", width, height, np.random.default_rng(seed))


def test_vectors_are_the_last_states_of_transformers(tmp_path: Path) -> None:
    """As Qwen3-VL-Embedding makes them, also of prompts that are cut inside an image."""
    tokenizer = make_tokenizer()
    (image,) = tokenizer.convert_tokens_to_ids([PLACEHOLDER])
    case = CASES["qwen3-vl"]
    case.settings = case.settings | {"image_token_id": image}
    reference = case.save(tmp_path)
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SIZES))
    sizes = {"max_model_len": 128, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    llm = LLM(str(tmp_path), dtype="float32", quantization="none", **sizes)
    images = [picture(1, 40, 50), picture(2, 90, 20), picture(3, 30, 30)]
    text = f"a{PLACEHOLDER}b"
    prompts: list[Any] = [
        {"prompt": text, "multi_modal_data": {"image": images[0]}},
        "only text",
        {"prompt": f"{text}c{PLACEHOLDER}", "multi_modal_data": {"image": images[1:]}},
        {"prompt": text, "multi_modal_data": {"image": images[0]}},
    ]
    outputs = llm.embed(prompts, use_tqdm=False)
    processor = llm._input.images.processor
    for prompt, output in zip(prompts, outputs, strict=True):
        seen = prompt.get("multi_modal_data", {"image": []})["image"] if isinstance(prompt, dict) else []
        features = [processor.process(one) for one in (seen if isinstance(seen, list) else [seen])]
        ids = torch.tensor([output.prompt_token_ids])
        more = {
            name: torch.cat([torch.from_numpy(np.array(one.tensors[name])) for one in features])
            for name in ("pixel_values", "image_grid_thw")
            if features
        }
        with torch.inference_mode():
            states = reference.model(input_ids=ids, mm_token_type_ids=(ids == image).int(), **more).last_hidden_state
        expected = torch.nn.functional.normalize(states[0, -1], dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="truncate_prompt_tokens would cut images"):
        llm.embed(prompts[0], truncate_prompt_tokens=4, use_tqdm=False)


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda vision: vision.update(values)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("qwen2.5-vl", _set(model_type="qwen3_vl"), "vision_config.model_type must be qwen2_5_vl_vision"),
        ("qwen2.5-vl", _set(out_hidden_size=64), "out_hidden_size .64. must be the language model's hidden_size .48."),
        ("qwen2-vl", _set(hidden_size=64), "hidden_size .64. must be the language model's hidden_size .48."),
        ("qwen2.5-vl", _set(num_heads=16), "a width of 32 must be a multiple of 4 times num_heads"),
        ("qwen2.5-vl", _set(window_size=4), "window_size .4. must be at least 8"),
        ("qwen2.5-vl", _set(fullatt_block_indexes=3), "fullatt_block_indexes must be a list"),
        ("qwen3-vl", _set(num_position_embeddings=35), "num_position_embeddings must be a square"),
        ("qwen3-vl", _set(deepstack_visual_indexes=[4]), "deepstack_visual_indexes must be different layers below"),
        ("qwen3-vl", _set(depth=9, deepstack_visual_indexes=[0, 1, 2, 3]), "must be fewer than the language model's 4"),
        ("qwen3-vl", _set(patch_size=0), "patch_size must be a positive integer"),
        ("qwen3.5", _set(model_type="qwen3_vl"), "vision_config.model_type must be qwen3_5_vision"),
        ("qwen3.5", _set(deepstack_visual_indexes=[0]), "deepstack_visual_indexes must be empty"),
        ("qwen3.5", _set(num_position_embeddings=35), "num_position_embeddings must be a square"),
    ],
)
def test_contradictions_are_refused_in_a_line(
    case: str, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    settings = CASES[case].settings
    vision = dict(settings["vision_config"])
    change(vision)
    kind = {"qwen2-vl": "qwen2_vl", "qwen2.5-vl": "qwen2_5_vl", "qwen3-vl": "qwen3_vl", "qwen3.5": "qwen3_5"}[case]
    with pytest.raises(ModelError, match=message) as refusal:
        qwen_vision_config({**settings["text_config"], "vision_config": vision}, "config.json", kind)
    assert "\n" not in str(refusal.value)


def test_files_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    case = CASES["qwen2.5-vl"]
    case.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tokenizer = make_tokenizer()
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SIZES | {"patch_size": 14}))
    with pytest.raises(ModelError, match=r"patch_size must be 4, as config.json has it, got 14"):
        LLM(str(tmp_path), max_model_len=64)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SIZES))
    config["text_config"]["rope_parameters"]["mrope_section"] = [1, 1, 1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="mrope_section must be three numbers of pairs that sum to 6"):
        LLM(str(tmp_path), max_model_len=64)
