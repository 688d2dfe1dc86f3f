"""Small random checkpoints of hybrid models, as those of `support.family_cases`."""

from __future__ import annotations

from typing import Any

from support.small_sizes import SMALL

QWEN3_5 = SMALL | {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
QWEN3_5_MOE = {key: value for key, value in QWEN3_5.items() if key != "intermediate_size"} | {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 36,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 7.0,
}
GRANITE4 = GRANITE | {
    "layer_types": ["attention"] * 2,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 80,
    "position_embedding_type": "rope",
    "mamba_n_heads": 2,
}
MAMBA2 = {"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8}
GRANITE4_HYBRID = (
    GRANITE4
    | MAMBA2
    | {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "tie_word_embeddings": True,
    }
)
GRANITE4_EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 36,
    "intermediate_size": 20,
    "mamba_n_groups": 1,
    "position_embedding_type": "nope",
}
BAMBA = SMALL | MAMBA2 | {"num_hidden_layers": 4, "attn_layer_indices": [2]}
NEMOTRON_H = {key: value for key, value in SMALL.items() if key != "num_hidden_layers"} | {
    "head_dim": 16,
    "hybrid_override_pattern": "M-M*-M",
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 8,
}
NEMOTRON_3 = NEMOTRON_H | {
    "hybrid_override_pattern": "ME*ME",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
MAMBA2_ALONE = {key: SMALL[key] for key in SMALL if "token_id" in key} | {
    "vocab_size": SMALL["vocab_size"],
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_heads": 6,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 2,
    "chunk_size": 8,
}
FALCON_H1 = (
    SMALL
    | MAMBA2
    | {
        "mamba_d_ssm": 96,
        "embedding_multiplier": 5.7,
        "lm_head_multiplier": 0.3,
        "key_multiplier": 0.39,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.6,
        "ssm_multipliers": [0.7, 0.5, 0.6, 0.8, 0.35],
        "mlp_multipliers": [0.9, 0.6],
    }
)
LFM2 = SMALL | {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}
LFM2_MOE = LFM2 | {"num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
HYBRID_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5TextConfig", QWEN3_5),
    "qwen3.5-three-values-a-key": (
        "Qwen3_5TextConfig",
        QWEN3_5
        | {
            "num_hidden_layers": 3,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 48,
            "linear_conv_kernel_dim": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "qwen3.5-recurrent": (
        "Qwen3_5TextConfig",
        QWEN3_5
        | {
            "num_hidden_layers": 2,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 5,
            "layer_types": ["linear_attention"] * 2,
        },
    ),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", QWEN3_5_MOE),
    "qwen3.5-moe-all-experts": (
        "Qwen3_5MoeTextConfig",
        QWEN3_5_MOE
        | {
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "linear_num_value_heads": 6,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "linear_attention"],
        },
    ),
    "lfm2": ("Lfm2Config", LFM2 | {"block_multiple_of": 16}),
    "lfm2-biases": (
        "Lfm2Config",
        LFM2
        | {
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "conv", "conv", "conv"],
        },
    ),
    "lfm2-recurrent": ("Lfm2Config", LFM2 | {"num_hidden_layers": 2, "layer_types": ["conv"] * 2}),
    "lfm2-moe": ("Lfm2MoeConfig", LFM2_MOE),
    "lfm2-moe-plain": (
        "Lfm2MoeConfig",
        LFM2_MOE
        | {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5, "num_dense_layers": 0},
    ),
    "granite4-hybrid": ("GraniteMoeHybridConfig", SMALL | GRANITE4_HYBRID),
    "granite4-hybrid-experts": (
        "GraniteMoeHybridConfig",
        SMALL
        | GRANITE4_HYBRID
        | GRANITE4_EXPERTS
        | {
            "mamba_n_heads": 3,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "time_step_limit": [0.01, 0.5],
        },
    ),
    "granite4-recurrent": (
        "GraniteMoeHybridConfig",
        SMALL | GRANITE4_HYBRID | {"num_hidden_layers": 2, "layer_types": ["mamba"] * 2, "mamba_d_state": 64},
    ),
    "granite4-dense": ("GraniteMoeHybridConfig", SMALL | GRANITE4),
    "granite4-dense-nope": ("GraniteMoeHybridConfig", SMALL | GRANITE4 | {"position_embedding_type": None}),
    "nemotron-h": ("NemotronHConfig", NEMOTRON_H),
    "nemotron-h-recurrent": (
        "NemotronHConfig",
        NEMOTRON_H
        | {
            "hybrid_override_pattern": "M-M",
            "n_groups": 1,
            "use_conv_bias": False,
            "use_bias": True,
            "mlp_bias": True,
            "time_step_min": 0.1,
        },
    ),
    "nemotron-3": ("NemotronHConfig", NEMOTRON_3),
    "nemotron-3-latent": (
        "NemotronHConfig",
        NEMOTRON_3
        | {
            "hybrid_override_pattern": "EM-E*",
            "moe_latent_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "mlp_bias": True,
        },
    ),
    "bamba": ("BambaConfig", BAMBA),
    "mamba2": ("Mamba2Config", MAMBA2_ALONE),
    "mamba2-tied": (
        "Mamba2Config",
        MAMBA2_ALONE
        | {
            "tie_word_embeddings": True,
            "n_groups": 1,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "time_step_limit": [0.01, 0.5],
        },
    ),
    "falcon-h1": ("FalconH1Config", FALCON_H1),
    "falcon-h1-norms": (
        "FalconH1Config",
        FALCON_H1 | {"num_hidden_layers": 3, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "falcon-h1-biases": (
        "FalconH1Config",
        FALCON_H1
        | {
            "head_dim": 16,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
}
