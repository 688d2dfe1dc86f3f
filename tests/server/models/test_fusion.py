"""Which linear layers are handed rows that the operation before them has quantised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paged import logits_of, model_config
from support.tiny_models import make_model

import octavo_kernels
from octavo.loader.load_model import load_model
from octavo_kernels.quant import QuantizedRows


def test_norms_and_gates_quantise_for_the_layer_that_follows(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, gated = octavo_kernels.quantized_linear, octavo_kernels.gated_linear_quantize
    seen: list[str] = []

    def counted_linear(x: Any, *arguments: Any) -> torch.Tensor:
        seen.append("rows" if isinstance(x, QuantizedRows) else "tensor")
        return linear(x, *arguments)

    def counted_gated(x: Any, *arguments: Any) -> QuantizedRows:
        seen.append("gated")
        return gated(x, *arguments)

    monkeypatch.setattr(octavo_kernels, "quantized_linear", counted_linear)
    monkeypatch.setattr(octavo_kernels, "gated_linear_quantize", counted_gated)

    def of_a_layer(path: Path) -> list[str]:
        seen.clear()
        logits_of(load_model(replace(model_config(path), quantization="int8")), [[5, 17, 200]])
        assert len(seen) == 3 * 4 + 1 and seen[:4] * 3 == seen[:12]
        return seen[:4]

    for family in ("llama", "mistral", "qwen2", "qwen3"):
        assert of_a_layer(tiny_checkpoints[family]) == ["rows", "tensor", "gated", "rows"], family
    assert of_a_layer(tiny_checkpoints["opt"]) == ["tensor"] * 4
    settings = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    make_model("LlamaConfig", settings | {"intermediate_size": 112, "hidden_act": "gelu"}).save_pretrained(tmp_path)
    assert of_a_layer(tmp_path) == ["rows", "tensor", "rows", "tensor"]
