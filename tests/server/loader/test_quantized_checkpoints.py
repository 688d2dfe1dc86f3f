"""Quantised checkpoints of every format are read as their own tools read them, or refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paged import load, logits_of, model_config
from support.quantized_files import Writer, awq, compressed, fp8, gptq, mxfp4, nvfp4, quantize_checkpoint
from support.tiny_models import FAMILIES, make_model

from octavo.interface.engine_config import ModelConfig
from octavo.loader.load_model import load_model
from octavo.loader.weight_bytes import model_without_memory, stored_types, weight_size
from octavo_kernels.dense import unpack_dense

SEQUENCES = [[3 + (7 * i + j) % 300 for i in range(100)] for j in range(4)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that are no multiples of 64: 96 and 160 columns, 96, 48 and 160 rows."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    make_model("LlamaConfig", FAMILIES["llama"][1] | sizes).save_pretrained(folder)
    return folder


def config_of(folder: Path, quantization: str | None = None, dtype: str = "float32", **hf: Any) -> ModelConfig:
    return replace(model_config(folder, dtype, **hf), quantization=quantization)


def kl(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Mean over positions, in nats."""
    p, q = torch.cat(theirs).log_softmax(-1), torch.cat(ours).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
GPTQ_V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
GROUP = {"num_bits": 4, "strategy": "group", "group_size": 32}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BY_BLOCK = FP8 | {"weight_block_size": [64, 64]}
MODELOPT = {"quant_method": "modelopt"}
# name -> writer, description
FORMATS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "awq in groups of 32": (awq(32), AWQ | {"group_size": 32}),
    "awq in whole rows": (awq(-1), AWQ | {"group_size": -1}),
    "awq with zeros of 8": (awq(32, symmetric=True), AWQ | {"group_size": 32}),
    "gptq": (gptq(), GPTQ),
    "gptq with zeros as they are": (gptq(version=2), GPTQ_V2),
    "gptq that says 1 and is 2": (gptq(version=2), GPTQ),
    "gptq asymmetric": (gptq(symmetric=False), GPTQ | {"sym": False}),
    "gptq asymmetric that says 1 and is 2": (gptq(symmetric=False, version=2), GPTQ | {"sym": False}),
    "gptq in whole rows": (gptq(group=-1, symmetric=False), GPTQ | {"sym": False, "group_size": -1}),
    "gptq with act order": (gptq(act_order=True), GPTQ | {"desc_act": True}),
    "gptq 8 bit": (gptq(8), GPTQ | {"bits": 8}),
    "gptq 8 bit asymmetric, act order": (
        gptq(8, symmetric=False, act_order=True),
        GPTQ | {"bits": 8, "desc_act": True, "sym": False},
    ),
    "W4A16": compressed("pack-quantized", **GROUP),
    "W4A16 asymmetric": compressed("pack-quantized", **GROUP, symmetric=False),
    "W4A16 with act order": compressed("pack-quantized", act_order=True, **GROUP),
    "W4A16 by row": compressed("pack-quantized", num_bits=4, strategy="channel"),
    "W8A16": compressed("pack-quantized", num_bits=8, strategy="group", group_size=32),
    "W8A8": compressed("int-quantized", num_bits=8, strategy="channel"),
    "W8A8 by tensor": compressed("int-quantized", num_bits=8, strategy="tensor"),
    "W8A8 asymmetric": compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
    "FP8 by tensor": compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "FP8 by row": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "compressed MXFP4": (
        mxfp4("weight_packed", "weight_scale", by_block=False),
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)[1],
    ),
    "compressed NVFP4": (
        nvfp4("weight_packed", "weight_global_scale", reciprocal=True),
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)[1],
    ),
    "autofp8": (fp8(), FP8 | {"activation_scheme": "static"}),
    "fp8 in blocks": (fp8("block", (64, 64), "weight_scale_inv"), BY_BLOCK),
    "fbgemm": (fp8("row"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "modelopt fp8": (fp8(), MODELOPT | {"quant_algo": "FP8"}),
    "modelopt nvfp4": (nvfp4(), MODELOPT | {"quant_algo": "NVFP4"}),
    "mxfp4": (mxfp4(), {"quant_method": "mxfp4"}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_format(name: str, llama: Path, tmp_path: Path) -> None:
    write, description = FORMATS[name]
    folder = quantize_checkpoint(llama, tmp_path, write, description)
    ours, expected = load_model(config_of(folder, "none")), load(folder / "values")
    for layer, theirs in zip(ours.linear_layers(), expected.linear_layers(), strict=True):
        assert torch.equal(unpack_dense(layer.method.weight), unpack_dense(theirs.method.weight)), layer
    assert kl(logits_of(ours, SEQUENCES), logits_of(expected, SEQUENCES)) == 0.0


@pytest.mark.parametrize("name", FORMATS)
def test_by_default_a_cpu_computes_on_the_codes(name: str, llama: Path, tmp_path: Path) -> None:
    write, description = FORMATS[name]
    folder = quantize_checkpoint(llama, tmp_path, write, description)
    config = config_of(folder)
    model = load_model(config)
    assert model.is_quantized
    assert kl(logits_of(model, SEQUENCES), logits_of(load(folder / "values"), SEQUENCES)) <= 5e-3
    told = weight_size(model_without_memory(config, "cpu"), stored_types(config)).nbytes
    assert model.num_weight_bytes() <= told <= 1.1 * model.num_weight_bytes()
