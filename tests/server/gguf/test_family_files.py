"""Files of families other than Llama, laid out as llama.cpp's converter does: the logits of transformers.

The layouts were held against llama.cpp itself: its greedy tokens of these files are those of transformers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from support.family_cases import FAMILY_CASES, SMALL
from support.gguf_files import NAMES, add_byte_level_vocabulary, interleave, write_metadata
from support.paged import load, logits_of
from support.tiny_models import make_model
from transformers import PreTrainedModel

TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80, *range(20, 60)], [7]]
EXPERTS = {
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.router": "ffn_gate_inp", "shared_mlp.output_linear": "ffn_down_shexp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}  # fmt: skip
for shared in ("mlp.shared_expert", "mlp.shared_experts"):
    EXPERTS |= {f"{shared}.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
LLAMA = {**NAMES, **EXPERTS, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
POST = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
GLM4 = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
GPT2 = {
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
# GGUF architecture -> (case, names that differ, metadata beside the common ones, whether q and k are interleaved)
FILES: dict[str, tuple[str, dict[str, str], dict[str, Any], bool]] = {
    "granite": (
        "granite", {},
        {"attention.scale": 0.1, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 7.0}, True,
    ),
    "smollm3": ("smollm3", {}, {}, True),
    "phi3": ("phi3", {}, {"attention.sliding_window": 19}, False),
    "olmo2": ("olmo2", POST, {}, False),
    "command-r": ("cohere", {}, {"logit_scale": 0.0625}, False),
    "cohere2": ("cohere2", {}, {"logit_scale": 0.0625, "attention.sliding_window": 19}, False),
    "starcoder2": ("starcoder2-gguf", {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}, {}, False),
    "glm4": ("glm4", GLM4, {"rope.dimension_count": 8}, False),
    "gpt2": ("gpt2", GPT2, {}, False),
    "llama": ("mixtral", {}, {"expert_count": 4, "expert_used_count": 2}, True),
    "qwen2moe": (
        "qwen2-moe", {},
        {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 20,
         "expert_shared_feed_forward_length": 36}, False,
    ),
    "qwen3moe": (
        "qwen3-moe", {}, {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 20}, False,
    ),
    "olmoe": ("olmoe", {}, {"expert_count": 5, "expert_used_count": 3}, False),
    "granitemoe": (
        "granite-moe-shared", {},
        {"attention.scale": 0.1, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 7.0,
         "expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 36}, True,
    ),
    "glm4moe": (
        "glm4-moe", {"post_attention_layernorm": "post_attention_norm"},
        {"rope.dimension_count": 8, "block_count": 4, "nextn_predict_layers": 1, "expert_count": 8,
         "expert_used_count": 3, "expert_feed_forward_length": 20, "expert_shared_count": 1,
         "expert_weights_scale": 1.7, "expert_weights_norm": True, "leading_dense_block_count": 1}, False,
    ),
}  # fmt: skip
CASES = {"starcoder2-gguf": ("Starcoder2Config", SMALL)}


def metadata(config: Any, more: dict[str, Any]) -> dict[str, Any]:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    found = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": inner, "attention.head_count": heads,
        "attention.head_count_kv": kv_heads, "attention.key_length": head_dim, "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
    }  # fmt: skip
    if rope := getattr(config, "rope_parameters", None):
        found["rope.freq_base"] = float(rope["rope_theta"])
    for key in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"):
        if hasattr(config, key):
            name = "layer_norm_rms_epsilon" if key == "rms_norm_eps" else "layer_norm_epsilon"
            found[f"attention.{name}"] = float(getattr(config, key))
    return found | more


def write_family(path: Path, model: PreTrainedModel, arch: str) -> None:
    _, names, more, interleaved = FILES[arch]
    config = model.config
    names = LLAMA | names

    def fill(writer: GGUFWriter) -> None:
        add_byte_level_vocabulary(writer, config.vocab_size)
        for name, tensor in model.state_dict().items():
            base, _, kind = name.rpartition(".")
            layer = re.match(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.*)", base)
            if base == "lm_head" and config.tie_word_embeddings:
                continue
            values = tensor.float().numpy()
            if arch == "gpt2" and layer and values.ndim == 2:
                values = np.ascontiguousarray(values.T)
            if interleaved and ("q_proj" in base or "k_proj" in base):
                heads = config.num_attention_heads if "q_proj" in base else config.num_key_value_heads
                values = interleave(values, heads)
            if (layer and "experts." in name and values.ndim == 3) or "shared_mlp.input" in name:
                halves = np.split(values, 2, axis=-2) if "down_proj" not in name else [values]
                kinds, stack = (
                    ("gate", "up") if len(halves) == 2 else ("down",),
                    "exps" if values.ndim == 3 else "shexp",
                )
                for part, half in zip(kinds, halves, strict=True):
                    writer.add_tensor(f"blk.{layer[1]}.ffn_{part}_{stack}.weight", np.ascontiguousarray(half))
                continue
            if "e_score" in name:
                writer.add_tensor(f"blk.{layer[1]}.exp_probs_b.bias", values)
                continue
            if "shared_expert_gate" in name:
                values = values[0]
            own = f"blk.{layer[1]}.{names[layer[2]]}" if layer else names[base]
            writer.add_tensor(f"{own}.{kind}", values)

        if "nextn_predict_layers" in more:  # whose tensors nobody reads
            writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight", np.zeros((4, 4), np.float32))

    values = {f"{arch}.{key}": value for key, value in metadata(config, more).items()}
    write_metadata(path, arch, values, fill)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("arch", FILES)
def test_logits_are_those_of_transformers(arch: str, tmp_path: Path) -> None:
    case = FILES[arch][0]
    reference = make_model(*(CASES | FAMILY_CASES)[case])
    write_family(tmp_path / "m.gguf", reference, arch)
    for tokens, ours in zip(TOKENS, logits_of(load(tmp_path / "m.gguf"), TOKENS), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item()))
