"""Checkpoints that read images answer text without a flag, with the logits of transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.hybrid_cases import QWEN3_5, QWEN3_5_MOE
from support.paged import load, logits_of
from support.small_sizes import SMALL, rope
from support.tiny_models import VOCAB_SIZE

from octavo import LLM, SamplingParams
from octavo.interface.architectures import IMAGE_READERS

TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80, *range(20, 60)], [7]]
TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
SIGLIP = PIXTRAL | {"model_type": "siglip_vision_model"}
GEMMA3 = SMALL | {"head_dim": 16, "sliding_window": 19, "num_hidden_layers": 6, "query_pre_attn_scalar": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        {"text_config": SMALL | rope("default", mrope_section=[2, 2, 2]), "vision_config": TOWER},
    ),
    "qwen3-vl": (
        "Qwen3VLConfig",
        {
            "text_config": SMALL | {"head_dim": 16} | rope("default", mrope_section=[4, 2, 2]),
            "vision_config": TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoeConfig",
        {
            "text_config": SMALL
            | {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 20}
            | rope("default", mrope_section=[4, 2, 2]),
            "vision_config": TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
    ),
    "mistral3": (
        "Mistral3Config",
        {
            "text_config": SMALL | {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
            "vision_config": PIXTRAL,
            "tie_word_embeddings": False,
        },
    ),
    "ministral3": (  # whose queries grow: twice within the longer of the texts
        "Mistral3Config",
        {
            "text_config": SMALL
            | {"model_type": "ministral3", "head_dim": 16}
            | rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=20,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.3,
            ),
            "vision_config": PIXTRAL,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": ("Gemma3Config", {"text_config": GEMMA3, "vision_config": SIGLIP, "mm_tokens_per_image": 4}),
    "gemma4": (
        "Gemma4Config",
        {
            "text_config": SMALL
            | {
                "head_dim": 16,
                "global_head_dim": 32,
                "sliding_window": 19,
                "num_hidden_layers": 7,
                "num_kv_shared_layers": 1,
                "hidden_size_per_layer_input": 12,
                "vocab_size_per_layer_input": VOCAB_SIZE,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 8,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
            },
        },
    ),
}
for case, config_class, text in (
    ("qwen3.5", "Qwen3_5Config", QWEN3_5),
    ("qwen3.5-moe", "Qwen3_5MoeConfig", QWEN3_5_MOE),
):
    CASES[case] = (
        config_class,
        {
            "text_config": text | rope("default", mrope_section=[2, 1, 1], partial_rotary_factor=0.25),
            "vision_config": TOWER | {"num_position_embeddings": 16},
        },
    )
# Of layers that guess tokens, which transformers does not have
LEFT_OUT = dict.fromkeys(("qwen3.5", "qwen3.5-moe"), "mtp.norm.weight")
# As transformers 5 and as older releases save them: the end of a name is the same.
OLDER = {
    "qwen2.5-vl": [("model.language_model.", "model."), ("model.visual.", "visual.")],
    "mistral3": [("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")],
    "gemma3": [("model.language_model.", "language_model.model.")],
}
RELEASED_TRANSPOSED = {"qwen3-vl-moe"}


@pytest.mark.parametrize("case", CASES)
def test_text_is_that_of_transformers(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config_class, settings = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**settings)
    reference = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.ndim > 1 and ("language_model" in name or "lm_head" in name):
                parameter.normal_(0, 0.15)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for released, names in enumerate(([], OLDER.get(case, []))):
        renamed = {}
        for name, tensor in tensors.items():
            for new, old in names:
                name = old + name.removeprefix(new) if name.startswith(new) else name
            # The released files of Qwen3-VL's experts hold inputs before outputs.
            turned = case in RELEASED_TRANSPOSED and released and ".experts." in name
            renamed[name] = tensor.transpose(1, 2).contiguous() if turned else tensor
        if case in LEFT_OUT:
            renamed[LEFT_OUT[case]] = torch.ones(48)
        save_file(renamed, tmp_path / "model.safetensors")
        with caplog.at_level(logging.INFO, "octavo"):
            caplog.clear()
            model = load(tmp_path)
        told = sum("runs as a text model" in record.message for record in caplog.records)
        assert told == (model.config.architecture not in IMAGE_READERS)
        for tokens, ours in zip(TOKENS, logits_of(model, TOKENS), strict=True):
            with torch.inference_mode():
                expected = reference(input_ids=torch.tensor([tokens])).logits[0]
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item()))


def test_rope_of_qwen2_5_vl_in_its_older_words(tmp_path: Path) -> None:
    """config.json of transformers 4 has the fields of the language model outside, and rope_scaling of type mrope."""
    config_class, settings = CASES["qwen2.5-vl"]
    config = getattr(transformers, config_class)(**settings)
    torch.manual_seed(0)
    reference = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    text = said.pop("text_config")
    del text["rope_parameters"], text["model_type"]
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(said | text))
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor(TOKENS[:1])).logits[0]
    torch.testing.assert_close(logits_of(load(tmp_path), TOKENS)[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [20, 64])
def test_queries_that_grow_are_planned_recorded_and_cut_as_any_others(length: int, tmp_path: Path) -> None:
    """Of Ministral 3; within its original context nothing grows, and no table is held."""
    config_class, settings = CASES["ministral3"]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**settings)
    transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    model = load(tmp_path)
    at_once, cut = logits_of(model, TOKENS), logits_of(model, TOKENS, 7, 16, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(at_once, cut, strict=True))
    llm = LLM(str(tmp_path), max_model_len=length, skip_tokenizer_init=True, num_gpu_blocks_override=16)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": TOKENS[0][: length - 8]}], params)
    assert output.error is None and len(output.outputs[0].token_ids) == 4
    runner = llm.engine.executor.worker.runner  # type: ignore[attr-defined]
    assert runner.device_runner.recorded_steps.can_record
