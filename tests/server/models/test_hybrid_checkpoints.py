"""Quantised checkpoints of hybrid models, which leave parts of recurrent layers in 16 bits: the very values that they
stand for, and nearly their logits where codes are multiplied."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_cases import FAMILY_CASES
from support.paged import load, logits_of, model_config
from support.quantized_files import Writer, awq, compressed, fp8, gptq, quantize_checkpoint
from support.tiny_models import make_model

from octavo.loader.load_model import load_model

TOKENS = [[3 + (7 * i + j) % 300 for i in range(60)] for j in range(3)]
# Every token takes all experts, so that no rounding chooses one.
SETTINGS = FAMILY_CASES["qwen3.5-moe-all-experts"][1] | {
    "hidden_size": 64,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
W4A16 = {"num_bits": 4, "strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}
FORMATS: dict[str, tuple[Writer, dict[str, Any], str]] = {  # and where a description lists what is plain
    "W4A16": (*compressed("pack-quantized", **W4A16), "ignore"),
    "awq": (
        awq(32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        "modules_to_not_convert",
    ),
    "gptq": (gptq(), GPTQ, "modules_to_not_convert"),
    "fp8": (fp8("block", (64, 64), "weight_scale_inv"), FP8, "modules_to_not_convert"),
}
PLAIN = {"all": ["linear_attn"], "gates": ["in_proj_a", "in_proj_b", "in_proj_z"], "rates": ["in_proj_a", "in_proj_b"]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As in trained models a layer adds little to what it gets, and scores are no larger than elsewhere: or what is
    rounded in the first layer would grow."""
    folder, model = tmp_path_factory.mktemp("hybrid"), make_model("Qwen3_5MoeTextConfig", SETTINGS)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "out_proj" in parameter_name or "o_proj" in parameter_name or "down_proj" in parameter_name:
                parameter.mul_(0.2)
            elif "q_norm" in parameter_name or "k_norm" in parameter_name:
                parameter.sub_(1.0)  # which the model adds
    model.save_pretrained(folder)
    return folder


def kl(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    p, q = torch.cat(theirs).log_softmax(-1), torch.cat(ours).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


@pytest.mark.parametrize("name", ["W4A16", "fp8"])
def test_multipliers_of_falcon_h1_go_into_scales(name: str, tmp_path: Path) -> None:
    write, description, _ = FORMATS[name]
    config_class, settings = FAMILY_CASES["falcon-h1"]
    wide = {"hidden_size": 64, "intermediate_size": 128, "mamba_d_ssm": 64, "mamba_n_heads": 4}
    make_model(config_class, settings | wide).save_pretrained(tmp_path / "source")
    folder = quantize_checkpoint(tmp_path / "source", tmp_path / "out", {"_proj": write}, description)
    expected = logits_of(load(folder / "values"), TOKENS)
    for found, wanted in zip(logits_of(load(folder), TOKENS), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    packed = logits_of(load_model(replace(model_config(folder), quantization=None)), TOKENS)
    assert kl(packed, expected) <= (3e-2 if name == "fp8" else 1e-2)


@pytest.mark.parametrize(
    ("name", "plain"), [("W4A16", "all"), ("W4A16", "gates"), ("awq", "rates"), ("gptq", "gates"), ("fp8", "all")]
)
def test_parts_of_recurrent_layers_may_be_plain(name: str, plain: str, source: Path, tmp_path: Path) -> None:
    write, description, field = FORMATS[name]
    writers: dict[str, Writer | None] = {**dict.fromkeys(PLAIN[plain]), "_proj": write}
    listed = [f"model.layers.{layer}.linear_attn.{part}" for layer in range(1, 4) for part in PLAIN[plain]]
    if plain == "all":
        listed = [f"model.layers.{layer}.linear_attn" for layer in range(1, 4)]
    folder = quantize_checkpoint(source, tmp_path, writers, description | {field: listed})
    expected = logits_of(load(folder / "values"), TOKENS)
    assert all(map(torch.equal, logits_of(load(folder), TOKENS), expected)), "the values of the same weights"
    packed = load_model(replace(model_config(folder), quantization=None))
    found = logits_of(packed, TOKENS)
    # So small a model loses more than a trained one: 6e-3 of 4 bits, and 2e-2 of FP8, which 8 bits round once more.
    assert kl(found, expected) <= (3e-2 if name == "fp8" else 1e-2)
    assert any(kind.startswith("int") for kind in packed.weight_bytes_by_kind())
