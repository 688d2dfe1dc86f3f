"""Where families differ from Llama in llama.cpp's files: names of tensors, order of rows, metadata."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.gguf.header import GGUFFile

# GGUF architecture -> (model_type, class name). Mistral, SmolLM and InternLM 2 files have the layout of llama's.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "internlm2": ("llama", "LlamaForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "command-r": ("cohere", "CohereForCausalLM"),
    "cohere2": ("cohere2", "Cohere2ForCausalLM"),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
}
# Architectures whose files hold the two halves of each query and key head interleaved.
INTERLEAVED = {"llama", "internlm2", "granite", "smollm3"}
# Architectures in which part of each head is turned.
PARTIAL_ROTARY = {"phi3", "glm4"}
_MLP = {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_FUSED_GATE = {"ffn_up": "mlp.gate_up_proj"}
_SANDWICH = {  # norms before and behind the MLP, and behind attention
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
# Names of a layer's tensors that are not those of llama's.
TENSORS: dict[str, dict[str, str]] = {
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", **_FUSED_GATE},
    "olmo2": {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    "starcoder2": _MLP,
    "glm4": {**_FUSED_GATE, "post_attention_norm": "attention_output_norm", "post_ffw_norm": "mlp_output_norm"},
    "gpt2": {"attn_qkv": "self_attn.qkv_proj", **_MLP},
}
_LAYER_NORM = {"layer_norm_eps": "attention.layer_norm_epsilon"}
# config.json's field -> metadata key without the architecture, where there is one.
FIELDS: dict[str, dict[str, str]] = {
    "granite": {
        "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    },
    "command-r": {**_LAYER_NORM, "logit_scale": "logit_scale"},
    "cohere2": {**_LAYER_NORM, "logit_scale": "logit_scale"},
    "starcoder2": _LAYER_NORM,
    "gpt2": _LAYER_NORM,
}  # fmt: skip
_ACTIVATIONS = {"starcoder2": "gelu_pytorch_tanh", "gpt2": "gelu_new"}


def family_fields(file: GGUFFile) -> dict[str, Any]:
    """Fields of config.json that the family has beside Llama's. Raises ModelError."""
    arch = file.architecture
    found = {field: file.metadata.get(f"{arch}.{key}") for field, key in FIELDS.get(arch, {}).items()}
    fields = {field: float(str(np.float32(value))) for field, value in found.items() if isinstance(value, float)}
    if arch in _ACTIVATIONS:
        return {**fields, "hidden_act": _ACTIVATIONS[arch], "use_bias": "blk.0.attn_output.bias" in file.tensors}
    if arch == "olmo2" and file.metadata.get("olmo2.attention.sliding_window"):
        return {**fields, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return fields


def long_rope(file: GGUFFile) -> dict[str, Any] | None:
    """Phi-3's two lists of divisors, which are tensors of the file. Raises ModelError."""
    arch, factors = file.architecture, {}
    for name in ("short", "long"):
        info = file.tensors.get(f"rope_factors_{name}.weight")
        if info is None:
            return None
        if info.qtype != "F32" or len(info.shape) != 1:
            raise ModelError(f"{file.path}: {info.name} is {info.qtype} {list(info.shape)}; the file is damaged")
        factors[f"{name}_factor"] = file.raw(info).reshape(-1).view("<f4").tolist()
    scaling = {"rope_type": "longrope", **factors}
    keys = {
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "attention_factor": "rope.scaling.attn_factor",
    }
    stated = {field: file.metadata.get(f"{arch}.{key}") for field, key in keys.items()}
    return scaling | {field: value for field, value in stated.items() if value is not None}
