"""Tiny models of sizes that two ranks share, one for each way to split a layer."""

from __future__ import annotations

from typing import Any

TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80], [320, 0, 5]]
# Halves of these sizes need no padding in the kernels' own order.
SMALL: dict[str, Any] = {
    "vocab_size": 321,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("LlamaConfig", SMALL | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "one-kv-head": ("Qwen3Config", SMALL | {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}),
    "experts": (
        "Qwen2MoeConfig",
        SMALL
        | {
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "sinks": (
        "GptOssConfig",
        SMALL
        | {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
        },
    ),
    "latents": (
        "DeepseekV3Config",
        SMALL
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "qk_nope_head_dim": 32,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "shared-keys": (
        "Gemma4TextConfig",
        SMALL
        | {
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "head_dim": 32,
            "global_head_dim": 64,
            "sliding_window": 5,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "experts-beside-an-mlp": (
        "Gemma4TextConfig",
        SMALL
        | {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 5,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
    ),
    "opt": ("OPTConfig", SMALL | {"ffn_dim": 192, "do_layer_norm_before": False, "word_embed_proj_dim": 64}),
}
