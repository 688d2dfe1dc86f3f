"""What llama.cpp's files of hybrid models have: names of tensors, metadata, and numbers in forms of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

HYBRID_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
SHORT_CONV_NAMES = {
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp",
    **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
STATE_SPACE_NAMES = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
SINGLE_MIXER_NAMES = {
    "model.embeddings": "token_embd",
    "backbone.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "backbone.norm_f": "output_norm",
    "norm": "attn_norm",
    **{f"mixer.{part}_proj": f"attn_{part}" for part in "qkv"},
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.experts.up_proj": "ffn_up_exps",
    **{f"mixer.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("up", "down")},
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    **{name.replace("mamba", "mixer"): own for name, own in STATE_SPACE_NAMES.items()},
}
SIDE_BY_SIDE_NAMES = STATE_SPACE_NAMES | {
    "model.final_layernorm": "output_norm",
    "pre_ff_layernorm": "ffn_norm",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
STATE_SPACE = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.inner_size": 96,
    "ssm.time_step_rank": 6,
    "rope.scaling.finetuned": False,
}
NEMOTRON_3_KEYS = STATE_SPACE | {
    "attention.head_count_kv": [0, 0, 2, 0, 0],
    "attention.layer_norm_rms_epsilon": 1e-5,
    "feed_forward_length": [0, 24, 0, 0, 24],
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 24,
    "expert_shared_feed_forward_length": 40,
    "expert_shared_count": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "expert_group_count": 1,
}


def multiplier(name: str, config: Any) -> Any:
    """What Falcon-H1's tensor is multiplied by, a number or one for each row."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part == "in_proj":
        state = config.mamba_n_groups * config.mamba_d_state
        sizes = [config.mamba_d_ssm, config.mamba_d_ssm, state, state, config.mamba_n_heads]
        return config.ssm_in_multiplier * np.repeat(np.float32(config.ssm_multipliers), sizes)[:, None]
    inside = config.attention_in_multiplier
    return {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "q_proj": inside,
        "k_proj": inside * config.key_multiplier,
        "v_proj": inside,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
    }.get(part, 1.0)


def of_state_space(name: str, kind: str, values: np.ndarray, config: Any) -> tuple[str, np.ndarray]:
    """A tensor of Mamba 2 in llama.cpp's numbers: rates of decay, constants of heads in columns, norms in groups."""
    if kind in ("A_log", "D"):
        return "", (-np.exp(values) if kind == "A_log" else values)[:, None]
    if "mamba.norm" in name or "mixer.norm" in name:
        return kind, values.reshape(getattr(config, "mamba_n_groups", 0) or config.n_groups, -1)
    return "bias" if kind == "dt_bias" else kind, values[:, 0] if "conv1d" in name and values.ndim == 3 else values


def as_ggml(name: str, kind: str, values: np.ndarray, config: Any) -> tuple[str, np.ndarray]:
    """A hybrid's tensor in llama.cpp's numbers: whole norms, rates of decay, and value heads that take turns."""
    if "norm" in name and "linear_attn" not in name:
        return kind, values + 1.0
    part, keys = name.rpartition("linear_attn.")[2], config.linear_num_key_heads

    def tiled(of_heads: np.ndarray) -> np.ndarray:
        apart = of_heads.reshape(keys, config.linear_num_value_heads // keys, -1, *of_heads.shape[1:])
        return np.ascontiguousarray(apart.swapaxes(0, 1)).reshape(of_heads.shape)

    if part == "A_log":
        return "", tiled(-np.exp(values))
    if part == "out_proj.weight":
        return kind, np.ascontiguousarray(tiled(values.T).T)
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        first = 2 * keys * config.linear_key_head_dim
        return kind, np.concatenate([values[:first], tiled(values[first:])]).reshape(len(values), -1)
    is_by_head = part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "dt_bias")
    return ("bias" if part == "dt_bias" else kind), tiled(values) if is_by_head else values
