"""Checkpoints of nothing but 0, with weights as formats store them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.pretended_engines import Tensors


def zeros_of(config: dict[str, Any], write: Callable[[int, int], Tensors]) -> Tensors:
    """A Qwen3 checkpoint of nothing but 0, each linear weight [N, K] as ``write`` (N, K) stores it."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    sizes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden, "self_attn.q_norm": head}
    found = {"embed_tokens.weight": torch.zeros(config["vocab_size"], hidden), "norm.weight": torch.zeros(hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, size in (norms | {"self_attn.k_norm": head}).items():
            found[f"layers.{layer}.{name}.weight"] = torch.zeros(size)
        for name, size in sizes.items():
            found |= {f"layers.{layer}.{name}.{leaf}": tensor for leaf, tensor in write(*size).items()}
    return {f"model.{name}": t.bfloat16() if t.dtype == torch.float32 else t for name, t in found.items()}


def awq(rows: int, columns: int) -> Tensors:
    groups, words = columns // 128, rows // 8
    return {
        "qweight": torch.zeros(columns, words, dtype=torch.int32),
        "scales": torch.zeros(groups, rows).half(),
        "qzeros": torch.zeros(groups, words, dtype=torch.int32),
    }


def fp8_in_blocks(rows: int, columns: int) -> Tensors:
    scales = torch.ones(rows // 128, columns // 128, dtype=torch.float16)
    return {"weight": torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), "weight_scale_inv": scales}


def plain(rows: int, columns: int) -> Tensors:
    return {"weight": torch.zeros(rows, columns, dtype=torch.bfloat16)}
