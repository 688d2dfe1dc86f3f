"""Differences between families and Llama in llama.cpp's files: names of tensors, order of rows, metadata."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.gguf.header import GGUFFile
from octavo.interface.config_checks import shown_value
from octavo.interface.model_config import config_class
from octavo.interface.model_config.experts import ExpertsConfig

# GGUF architecture -> (model_type, class name). Mistral, SmolLM and InternLM 2 files have the layout of llama's.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma-embedding": ("gemma3_text", "Gemma3TextModel"),
    "gemma3n": ("gemma3n_text", "Gemma3nForCausalLM"),
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM"),
    "internlm2": ("llama", "LlamaForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "command-r": ("cohere", "CohereForCausalLM"),
    "cohere2": ("cohere2", "Cohere2ForCausalLM"),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM"),
    "stablelm": ("stablelm", "StableLmForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen35": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen35moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "granitehybrid": ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    "nemotron_h_moe": ("nemotron_h", "NemotronHForCausalLM"),
    "mamba2": ("mamba2", "Mamba2ForCausalLM"),
    "falcon-h1": ("falcon_h1", "FalconH1ForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "lfm2moe": ("lfm2_moe", "Lfm2MoeForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
    "granitemoe": ("granitemoe", "GraniteMoeForCausalLM"),
    "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "gptneox": ("gpt_neox", "GPTNeoXForCausalLM"),
    "falcon": ("falcon", "FalconForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
    "deepseek2": ("deepseek_v3", "DeepseekV3ForCausalLM"),
}
# Architectures whose files hold the two halves of each query and key head interleaved.
INTERLEAVED = {"llama", "internlm2", "granite", "smollm3", "granitemoe", "granitehybrid"}
# Architectures with gated delta nets; `hybrids` looks at what they keep.
HYBRIDS = {"qwen35", "qwen35moe"}
# Architectures whose layers are one thing each.
SINGLE_MIXERS = {"nemotron_h", "nemotron_h_moe"}
# Architectures with short convolutions or with state spaces, in the layers that have no heads of keys (in all layers of
# Falcon-H1 and of Mamba 2).
SHORT_CONVS, STATE_SPACES = {"lfm2", "lfm2moe"}, {"granitehybrid", *SINGLE_MIXERS, "falcon-h1", "mamba2"}
# Layouts in which part of each head is turned.
PARTIAL_ROTARY = {"phi3", "glm4", "glm4moe", "gptneox", "stablelm", "bamba", *HYBRIDS}
_MLP = {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", **_MLP}
_FUSED_GATE = {"ffn_up": "mlp.gate_up_proj"}
_SANDWICH = {  # norms before and behind the MLP, and behind attention
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EMBEDDED = {  # what an embedding of each layer's own passes
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GATED_DELTA_NETS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.rate",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
}
_STATE_SPACE = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_a": "rate",
    "ssm_d": "D",
    "ssm_dt.bias": "dt_bias",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
_MAMBA = {own: f"mamba.{name}" for own, name in _STATE_SPACE.items()}
_SINGLE_MIXERS = {  # of layers that are one thing each
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    **{f"ffn_{part}_exps": f"mixer.experts.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_shexp": f"mixer.shared_expert.{part}_proj" for part in ("up", "down")},
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    **{own: f"mixer.{name}" for own, name in _STATE_SPACE.items()},
}
_SHORT_CONVS = {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}
# Numbers that may differ from layer to layer; `gemma` and `hybrids` look at them.
BY_LAYER = {
    "gemma4": {"feed_forward_length", "attention.head_count_kv"},
    **{arch: {"attention.head_count_kv", "feed_forward_length"} for arch in (*SHORT_CONVS, *STATE_SPACES)},
}
# Names of a layer's tensors that are not those of llama's; whole, where they end otherwise in the checkpoint.
TENSORS: dict[str, dict[str, str]] = {
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "gemma-embedding": _SANDWICH,
    "gemma3n": {
        **_SANDWICH,
        **_EMBEDDED,
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    "gemma4": {
        **_SANDWICH,
        **_EMBEDDED,
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "ffn_gate_up_exps": "experts.gate_up_proj",
        "ffn_gate_exps": "experts.gate_proj",
        "ffn_up_exps": "experts.up_proj",
        "ffn_down_exps": "experts.down_proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", **_FUSED_GATE},
    "olmo2": {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    "starcoder2": _MLP,
    "glm4": {**_FUSED_GATE, "post_attention_norm": "attention_output_norm", "post_ffw_norm": "mlp_output_norm"},
    "glm4moe": {"post_attention_norm": "post_attention_layernorm"},
    **dict.fromkeys(HYBRIDS, _GATED_DELTA_NETS),
    **dict.fromkeys(SHORT_CONVS, _SHORT_CONVS),
    **dict.fromkeys((*SINGLE_MIXERS, "mamba2"), _SINGLE_MIXERS),
    "falcon-h1": {**_MAMBA, **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "post_attention_layernorm.weight")},
    "bamba": _MAMBA,
    "granitehybrid": {
        **_MAMBA,
        **{f"ffn_{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    },
    "gpt2": _FUSED,
    "gptneox": _FUSED,
    "falcon": _FUSED,
    "falcon-40b": {**_FUSED, "attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"},
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
    "deepseek2": {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
    },
}
_LAYER_NORM = {"layer_norm_eps": "attention.layer_norm_epsilon"}
# config.json's field -> metadata key without the architecture, where there is one.
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
FIELDS: dict[str, dict[str, str]] = {
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitehybrid": _GRANITE,
    "nemotron_h_moe": {
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "moe_latent_size": "moe_latent_size",
    },
    "command-r": {**_LAYER_NORM, "logit_scale": "logit_scale"},
    "cohere2": {**_LAYER_NORM, "logit_scale": "logit_scale"},
    "starcoder2": _LAYER_NORM,
    "stablelm": _LAYER_NORM,
    "gpt2": _LAYER_NORM,
    "gptneox": {**_LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
    "falcon": _LAYER_NORM,
}
_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
_V3_EXPERTS = 256  # of a layer of DeepSeek V3 and R1
_ACTIVATIONS = {"starcoder2": "gelu_pytorch_tanh", "gpt2": "gelu_new", "gptneox": "gelu", "falcon": "gelu"}


def layout_of(file: GGUFFile) -> str:
    """The key of `TENSORS` for the file: its architecture but for Falcon's with two norms, whose names differ, and for
    Bamba's, which call themselves granitehybrid and lack Granite's multipliers."""
    if file.architecture == "granitehybrid" and "granitehybrid.attention.scale" not in file.metadata:
        return "bamba"
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
    if arch == "stablelm":  # llama.cpp writes use_parallel_residual for all of them, and goes by the tensors
        has_head_norms, is_serial = (f"blk.0.{name}.weight" in file.tensors for name in ("attn_q_norm", "ffn_norm"))
        return {**fields, "qk_layernorm": has_head_norms, "use_parallel_residual": not is_serial}
    if layout_of(file) == "bamba":
        return {**fields, "architectures": ["BambaForCausalLM"], "model_type": "bamba"}
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
    elif arch == "gemma4":
        fields["enable_moe_block"] = True
    elif not issubclass(config_class(ARCHITECTURES[arch][1]), ExpertsConfig):
        raise ModelError(f"{file.path}: experts are not part of architecture {arch!r}; use a dense model")
    shared = fields["shared_expert_intermediate_size"]
    fields["shared_intermediate_size"] = shared if arch in ("granitemoe", "granitehybrid") else None
    if arch == "qwen3moe":
        fields["norm_topk_prob"] = True  # as llama.cpp has it, whatever the file says
    downs = next((info for name, info in file.tensors.items() if name.endswith("ffn_down_exps.weight")), None)
    if downs is not None and fields["moe_intermediate_size"] is None:
        fields["moe_intermediate_size"] = downs.shape[-1]
    fields["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    fields["num_hidden_layers"] = layers_of(file)
    return {field: value for field, value in fields.items() if value is not None}


def latent_fields(file: GGUFFile) -> dict[str, Any]:
    """Fields of config.json of multi-head latent attention and the experts beside it; none of other architectures.

    Newer files state the sizes of the cache where older ones state those of heads, which are under ``..._mla`` then.
    Raises ModelError.
    """
    arch, metadata = file.architecture, file.metadata
    if arch != "deepseek2":
        return {}

    def stated(*keys: str, default: Any = None) -> Any:
        return next((metadata[f"{arch}.{key}"] for key in keys if f"{arch}.{key}" in metadata), default)

    sizes = {
        "key": stated("attention.key_length_mla", "attention.key_length"),
        "turned": stated("rope.dimension_count"),
    }
    if any(type(size) is not int for size in sizes.values()) or not 0 < sizes["turned"] < sizes["key"]:
        raise ModelError(
            f"{file.path}: {arch}.rope.dimension_count ({sizes['turned']!r}) must be a part of "
            f"{arch}.attention.key_length_mla ({sizes['key']!r}); the file is damaged or converted wrongly"
        )
    function = stated("expert_gating_func", default=0)
    if function not in (0, 1, 2):  # not said, softmax, sigmoid
        raise ModelError(
            f"{file.path}: {arch}.expert_gating_func must be 1 (softmax) or 2 (sigmoid), got {function!r}; use a file "
            "of DeepSeek V2 or V3"
        )
    fields = {
        "num_key_value_heads": stated("attention.head_count"),
        "head_dim": sizes["turned"],
        "qk_nope_head_dim": sizes["key"] - sizes["turned"],
        "v_head_dim": stated("attention.value_length_mla", "attention.value_length"),
        "kv_lora_rank": stated("attention.kv_lora_rank"),
        "q_lora_rank": stated("attention.q_lora_rank"),
        "n_shared_experts": stated("expert_shared_count", default=0),
        "first_k_dense_replace": stated("leading_dense_block_count", default=0),
        "norm_topk_prob": stated("expert_weights_norm", default=False),
        "routed_scaling_factor": stated("expert_weights_scale") or 1.0,
    }
    groups, kept = stated("expert_group_count"), stated("expert_group_used_count")
    if groups is None and stated("expert_count") == _V3_EXPERTS:
        groups, kept = 8, 4  # of V3 and R1, in files that were written before groups were stated
    fields |= {"n_group": groups or 1, "topk_group": kept or 1}
    if function != 2:
        method = "group_limited_greedy" if (groups or 1) > 1 else "greedy"
        fields |= {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": method}
    return fields


def layers_of(file: GGUFFile) -> Any:
    """The number of layers, without those of multi-token prediction. Raises ModelError."""
    arch, metadata = file.architecture, file.metadata
    layers, further = metadata.get(f"{arch}.block_count"), metadata.get(f"{arch}.nextn_predict_layers", 0)
    if type(further) is not int:
        raise ModelError(
            f"{file.path}: {arch}.nextn_predict_layers must be an integer, got {shown_value(further)}; the file is "
            "damaged or converted wrongly"
        )
    return layers - further if type(layers) is int else layers


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
