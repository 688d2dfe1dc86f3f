"""Checkpoints of InternLM, which transformers does not have: those of a Llama by other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import make_model
from transformers import PreTrainedModel

INTERNLM2 = (
    ("model.embed_tokens.", "model.tok_embeddings."),
    ("self_attn.o_proj.", "attention.wo."),
    ("mlp.gate_proj.", "feed_forward.w1."),
    ("mlp.down_proj.", "feed_forward.w2."),
    ("mlp.up_proj.", "feed_forward.w3."),
    ("input_layernorm.", "attention_norm."),
    ("post_attention_layernorm.", "ffn_norm."),
    ("lm_head.", "output."),
)


def _internlm2_names(tensors: dict[str, torch.Tensor], kv_heads: int, size: int) -> dict[str, torch.Tensor]:
    """Queries that share a key, that key and its value, one such group after the other."""
    renamed = {}
    for name, tensor in tensors.items():
        if ".self_attn.q_proj." in name:
            heads = [
                tensors[name.replace("q_proj", f"{part}_proj")].unflatten(0, (kv_heads, -1, size)) for part in "qkv"
            ]
            name = name.replace("self_attn.q_proj", "attention.wqkv")
            tensor = torch.cat(heads, dim=1).flatten(0, 2).contiguous()
        elif ".self_attn.k_proj." in name or ".self_attn.v_proj." in name:
            continue
        for ours, theirs in INTERNLM2:
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    return renamed


def save_internlm2(folder: Path, settings: dict[str, Any], bias: bool = False) -> PreTrainedModel:
    """Write an InternLM 2 and return the same model as a Llama."""
    reference, tensors, config = _save_llama(folder, settings | {"attention_bias": bias})
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    save_file(_internlm2_names(tensors, kv_heads, config["hidden_size"] // heads), folder / "model.safetensors")
    del config["attention_bias"]
    _write_config(folder, config | {"architectures": ["InternLM2ForCausalLM"], "bias": bias})
    return reference


def save_internlm3(folder: Path, settings: dict[str, Any]) -> PreTrainedModel:
    """Write an InternLM 3 with biases and return the same model as a Llama."""
    reference, _, config = _save_llama(folder, settings | {"attention_bias": True, "mlp_bias": True})
    del config["attention_bias"], config["mlp_bias"]
    _write_config(folder, config | {"architectures": ["InternLM3ForCausalLM"], "bias": True, "qkv_bias": True})
    return reference


def _save_llama(
    folder: Path, settings: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, torch.Tensor], dict[str, Any]]:
    reference = make_model("LlamaConfig", settings)
    reference.save_pretrained(folder)
    return reference, load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
