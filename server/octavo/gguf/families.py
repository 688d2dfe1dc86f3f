"""Where families differ from Llama in llama.cpp's files: names of tensors, order of rows, metadata."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.gguf.header import GGUFFile
from octavo.interface.architectures import ALIASES

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
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
    "granitemoe": ("granitemoe", "GraniteMoeForCausalLM"),
    "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "gptneox": ("gpt_neox", "GPTNeoXForCausalLM"),
    "falcon": ("falcon", "FalconForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
}
# Architectures whose files hold the two halves of each query and key head interleaved.
INTERLEAVED = {"llama", "internlm2", "granite", "smollm3", "granitemoe"}
# Architectures in which part of each head is turned.
PARTIAL_ROTARY = {"phi3", "glm4", "glm4moe", "gptneox"}
_MLP = {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", **_MLP}
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
    "glm4moe": {"post_attention_norm": "post_attention_layernorm"},
    "gpt2": _FUSED,
    "gptneox": _FUSED,
    "falcon": _FUSED,
    "falcon-40b": {**_FUSED, "attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"},
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
}
_LAYER_NORM = {"layer_norm_eps": "attention.layer_norm_epsilon"}
# config.json's field -> metadata key without the architecture, where there is one.
_GRANITE = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
FIELDS: dict[str, dict[str, str]] = {
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "command-r": {**_LAYER_NORM, "logit_scale": "logit_scale"},
    "cohere2": {**_LAYER_NORM, "logit_scale": "logit_scale"},
    "starcoder2": _LAYER_NORM,
    "gpt2": _LAYER_NORM,
    "gptneox": {**_LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
    "falcon": _LAYER_NORM,
}  # fmt: skip
_EXPERTS = {
    "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length", "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count", "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}  # fmt: skip
_ACTIVATIONS = {"starcoder2": "gelu_pytorch_tanh", "gpt2": "gelu_new", "gptneox": "gelu", "falcon": "gelu"}


def layout_of(file: GGUFFile) -> str:
    """The key of `TENSORS` for the file: its architecture but for Falcon's with two norms, whose names differ."""
    return "falcon-40b" if "blk.0.attn_norm_2.weight" in file.tensors else file.architecture


def family_fields(file: GGUFFile) -> dict[str, Any]:
    """Fields of config.json that the family has beside Llama's. Raises ModelError."""
    arch = file.architecture
    found = {field: file.metadata.get(f"{arch}.{key}") for field, key in FIELDS.get(arch, {}).items()}
    fields = {
        field: float(str(np.float32(value))) if isinstance(value, float) else value
        for field, value in found.items()
        if value is not None
    }
    if arch in _ACTIVATIONS:
        bias = "blk.0.attn_output.bias" in file.tensors
        fields |= {"hidden_act": _ACTIVATIONS[arch], "use_bias": bias, "attention_bias": bias}
    if arch == "falcon":
        return {**fields, "multi_query": False, "new_decoder_architecture": layout_of(file) == "falcon-40b"}
    if arch == "olmo2" and file.metadata.get("olmo2.attention.sliding_window"):
        return {**fields, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return fields


def expert_fields(file: GGUFFile) -> dict[str, Any]:
    """Fields of config.json of a mixture of experts; none where there are no experts. Raises ModelError."""
    arch, metadata = file.architecture, file.metadata
    if not metadata.get(f"{arch}.expert_count"):
        return {}
    fields = {field: metadata.get(f"{arch}.{key}") for field, key in _EXPERTS.items()}
    if arch == "llama":
        fields |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    elif ARCHITECTURES[arch][1] not in ALIASES or "n_routed_experts" not in ALIASES[ARCHITECTURES[arch][1]]:
        raise ModelError(f"{file.path}: experts are not part of architecture {arch!r}; use a dense model")
    shared = fields["shared_expert_intermediate_size"]
    fields["shared_intermediate_size"] = shared if arch == "granitemoe" else None
    if arch == "qwen3moe":
        fields["norm_topk_prob"] = True  # as llama.cpp has it, whatever the file says
    downs = next((info for name, info in file.tensors.items() if name.endswith("ffn_down_exps.weight")), None)
    if downs is not None and fields["moe_intermediate_size"] is None:
        fields["moe_intermediate_size"] = downs.shape[-1]
    fields["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    fields["num_hidden_layers"] = layers_of(file)
    return {field: value for field, value in fields.items() if value is not None}


def layers_of(file: GGUFFile) -> Any:
    """The number of layers, without those that foretell further tokens."""
    arch, metadata = file.architecture, file.metadata
    layers, further = metadata.get(f"{arch}.block_count"), metadata.get(f"{arch}.nextn_predict_layers", 0)
    return layers - further if type(layers) is int and type(further) is int else layers


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
