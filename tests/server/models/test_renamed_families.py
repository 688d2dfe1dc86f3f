"""Families that transformers does not have, or knows by other names: the logits of the same weights as a Llama."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.family_cases import SMALL
from support.paged import load, logits_of, model_config
from support.tiny_models import make_model

from octavo.loader.load_model import load_model

TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80], [7]]
INTERNLM2 = (
    ("model.embed_tokens.", "model.tok_embeddings."), ("self_attn.o_proj.", "attention.wo."),
    ("mlp.gate_proj.", "feed_forward.w1."), ("mlp.down_proj.", "feed_forward.w2."),
    ("mlp.up_proj.", "feed_forward.w3."), ("input_layernorm.", "attention_norm."),
    ("post_attention_layernorm.", "ffn_norm."), ("lm_head.", "output."),
)  # fmt: skip


def saved(settings: dict[str, Any], folder: Path, seed: int = 0) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    reference = make_model("LlamaConfig", settings, seed)
    reference.save_pretrained(folder / "llama")
    tensors = load_file(folder / "llama" / "model.safetensors")
    return reference, tensors, json.loads((folder / "llama" / "config.json").read_text())


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def internlm2(tensors: dict[str, torch.Tensor], kv_heads: int, size: int) -> dict[str, torch.Tensor]:
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


@pytest.mark.parametrize("bias", [False, True])
def test_internlm2(bias: bool, tmp_path: Path) -> None:
    reference, tensors, config = saved(SMALL | {"attention_bias": bias}, tmp_path)
    config |= {"architectures": ["InternLM2ForCausalLM"], "bias": bias}
    del config["attention_bias"]
    path = write(tmp_path / "internlm2", internlm2(tensors, 2, 12), config)
    for tokens, ours in zip(TOKENS, logits_of(load(path), TOKENS), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    packed = [
        logits_of(load_model(replace(model_config(p), quantization="int8")), TOKENS) for p in (path, tmp_path / "llama")
    ]
    assert all(torch.equal(a, b) for a, b in zip(*packed, strict=True)), "rows in another order are packed alike"


def test_internlm3(tmp_path: Path) -> None:
    reference, tensors, config = saved(SMALL | {"attention_bias": True, "mlp_bias": True, "head_dim": 20}, tmp_path)
    config |= {"architectures": ["InternLM3ForCausalLM"], "bias": True, "qkv_bias": True}
    del config["attention_bias"], config["mlp_bias"]
    path = write(tmp_path / "internlm3", tensors, config)
    for tokens, ours in zip(TOKENS, logits_of(load(path), TOKENS), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def test_qwen3_embedding_without_its_head(tmp_path: Path) -> None:
    """Qwen3-Embedding is stored without the prefix of a model with a head; as a decoder its head is the table."""
    reference = make_model("Qwen3Config", SMALL | {"head_dim": 16, "tie_word_embeddings": True})
    reference.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    reference.model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    with torch.inference_mode():
        expected = reference(torch.tensor(TOKENS[:1])).logits[0]
    torch.testing.assert_close(logits_of(load(tmp_path), TOKENS)[0], expected, rtol=0, atol=1e-3)
