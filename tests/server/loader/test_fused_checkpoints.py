"""Quantised checkpoints whose modules hold several weights, or rows in another order, mean what their tools read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_cases import FAMILY_CASES
from support.paged import load, logits_of, model_config
from support.quantized_files import Writer, awq, fp8, gptq, quantize_checkpoint
from support.tiny_models import make_model

from octavo.loader.load_model import load_model

TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80], [7]]
SIZES = {"hidden_size": 64, "intermediate_size": 96}
FORMATS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "awq": (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "gptq": (gptq(4, 32, act_order=True), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}),
    "fp8": (fp8("tensor"), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
}
MODULES = {"phi3": "_proj", "glm4": "_proj", "cohere": "_proj", "gpt-neox": "query_key_value", "falcon-40b": "dense"}


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("case", MODULES)
def test_values_are_those_of_the_plain_checkpoint(case: str, format_: str, tmp_path: Path) -> None:
    config_class, settings = FAMILY_CASES[case]
    make_model(config_class, settings | SIZES).save_pretrained(tmp_path / "plain")
    writer, description = FORMATS[format_]
    writers: dict[str, Writer | None] = {MODULES[case]: writer}
    folder = quantize_checkpoint(tmp_path / "plain", tmp_path / "quantised", writers, description)
    exact = logits_of(load(folder / "values"), TOKENS)
    for ours, expected in zip(logits_of(load(folder), TOKENS), exact, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    packed = logits_of(load_model(replace(model_config(folder), quantization=None)), TOKENS)
    for ours, expected in zip(packed, exact, strict=True):
        spread = expected.std()
        assert (ours - expected).square().mean().sqrt() < 0.1 * spread
