"""Small random checkpoints: name -> (config class of transformers, settings). Each is compared with transformers
(test_families, test_drawn_families), and the first of each architecture on two ranks (test_tensor_parallel)."""

from __future__ import annotations

from typing import Any

import transformers
from support.hybrid_cases import GRANITE, HYBRID_CASES
from support.small_sizes import SMALL, rope
from support.tiny_models import VOCAB_SIZE
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PHI3 = {"original_max_position_embeddings": 256}
FACTORS = [
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    5.0,
]  # for any length: transformers turns short sequences by others, see test_rotary
LONGROPE = {
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "original_max_position_embeddings": 64,
    **rope("longrope", short_factor=FACTORS, long_factor=FACTORS, partial_rotary_factor=0.75),
}
WINDOW = {"sliding_window": 19, "num_hidden_layers": 4}
GLM = {"head_dim": 16, "attention_bias": True, **rope("default", partial_rotary_factor=0.5)}
STABLELM = {"hidden_size": 64, **rope("default", partial_rotary_factor=0.25)}
GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT_OSS = {
    "head_dim": 32,
    "sliding_window": 19,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    **rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False, beta_fast=32.0, beta_slow=1.0),
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "qk_nope_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
}
MSCALE = rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.9, mscale_all_dim=0.7)
GROUPS = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0, "n_shared_experts": 1}
FALCON = {"alibi": False, "bias": True}
OPT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "ffn_dim": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GEMMA = SMALL | {"head_dim": 20, "sliding_window": 19, "query_pre_attn_scalar": 12}
GEMMA4 = SMALL | {
    "head_dim": 20,
    "global_head_dim": 28,
    "sliding_window": 19,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
GEMMA3N = SMALL | {
    "head_dim": 20,
    "sliding_window": 19,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 2,
    "laurel_rank": 8,
    "num_hidden_layers": 5,
    "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0, 0.0],
    "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
}
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
FAMILY_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa-tied": ("LlamaConfig", SMALL | {"tie_word_embeddings": True}),
    "llama-mha-biases": ("LlamaConfig", SMALL | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("LlamaConfig", SMALL | {"head_dim": 20, "rms_norm_eps": 1e-3}),
    "llama-mqa-gelu": ("LlamaConfig", SMALL | {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}),
    "llama-linear": ("LlamaConfig", SMALL | rope("linear", factor=4.0)),
    "llama-llama3": ("LlamaConfig", SMALL | LLAMA3),
    "llama-yarn": ("LlamaConfig", SMALL | YARN),
    "mistral-window": ("MistralConfig", SMALL | {"sliding_window": 19}),
    "mistral-no-window": ("MistralConfig", SMALL | {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2Config", SMALL | {"sliding_window": 19, "tie_word_embeddings": True}),
    "qwen2-window-above": (
        "Qwen2Config",
        SMALL | {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1},
    ),
    "qwen2-layer-types": (
        "Qwen2Config",
        SMALL
        | {
            "use_sliding_window": True,
            "sliding_window": 19,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3": ("Qwen3Config", SMALL | {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-bias-window": (
        "Qwen3Config",
        SMALL | {"attention_bias": True, "use_sliding_window": True, "sliding_window": 19, "max_window_layers": 0},
    ),
    "gemma": ("GemmaConfig", SMALL | {"head_dim": 20}),
    "gemma-mqa-untied": ("GemmaConfig", SMALL | {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "gemma2": ("Gemma2Config", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma2-uncapped": (
        "Gemma2Config",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3": ("Gemma3TextConfig", GEMMA | {"num_hidden_layers": 7}),
    "gemma3-types": (
        "Gemma3TextConfig",
        GEMMA
        | {
            "hidden_activation": "gelu",
            "attn_logit_softcapping": 2.0,  # this one without effect
            "layer_types": ["full_attention", "sliding_attention"],
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3n": ("Gemma3nTextConfig", GEMMA3N),
    "gemma3n-default": (  # of what is sparse, and of layers' types; fewer rows than tokens
        "Gemma3nTextConfig",
        GEMMA3N
        | {
            "num_hidden_layers": 12,
            "intermediate_size": 512,
            "activation_sparsity_pattern": None,
            "layer_types": None,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "vocab_size_per_layer_input": VOCAB_SIZE - 50,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": ("Gemma4TextConfig", GEMMA4 | {"num_hidden_layers": 6, "attention_bias": True}),
    "gemma4-shared": (
        "Gemma4TextConfig",
        GEMMA4
        | {
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2 + ["full_attention"],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4-keys-as-values": (
        "Gemma4TextConfig",
        GEMMA4
        | {
            "num_hidden_layers": 6,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4-unified": (
        "Gemma4UnifiedTextConfig",
        SMALL
        | {
            "head_dim": 20,
            "global_head_dim": 28,
            "sliding_window": 19,
            "num_hidden_layers": 6,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4-moe": (
        "Gemma4TextConfig",
        GEMMA4
        | {
            "num_hidden_layers": 6,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 20,
        },
    ),
    "opt": ("OPTConfig", OPT),
    "opt-350m": ("OPTConfig", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "opt-plain": (
        "OPTConfig",
        OPT
        | {
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
            "activation_function": "gelu",
        },
    ),
    "mistral-nemo": ("MistralConfig", SMALL | {"sliding_window": None, "head_dim": 20}),
    "phi3": ("Phi3Config", SMALL | PHI3 | {"sliding_window": 19}),
    "phi4-mini": ("Phi3Config", SMALL | PHI3 | LONGROPE | {"tie_word_embeddings": True}),
    "granite": ("GraniteConfig", SMALL | GRANITE | {"tie_word_embeddings": True}),
    "granite-biases": ("GraniteConfig", SMALL | GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "smollm3": ("SmolLM3Config", SMALL | {"num_hidden_layers": 4}),
    "smollm3-window": (
        "SmolLM3Config",
        SMALL
        | {
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": 19,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2": ("Olmo2Config", SMALL),
    "olmo2-bias": ("Olmo2Config", SMALL | {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3Config", SMALL | WINDOW),
    "olmo3-stretched": (  # layers without a window alone
        "Olmo3Config",
        SMALL
        | WINDOW
        | {
            "rope_parameters": {
                "sliding_attention": rope("default")["rope_parameters"],
                "full_attention": rope("yarn", factor=4.0, original_max_position_embeddings=32)["rope_parameters"],
            }
        },
    ),
    "glm": ("GlmConfig", SMALL | GLM),
    "glm4": ("Glm4Config", SMALL | GLM),
    "glm4-quarter": (
        "Glm4Config",
        SMALL | GLM | rope("default", partial_rotary_factor=0.25) | {"attention_bias": False},
    ),
    "cohere": ("CohereConfig", SMALL),
    "cohere-bias": ("CohereConfig", SMALL | {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.3}),
    "cohere2": ("Cohere2Config", SMALL | WINDOW),
    "ministral": (
        "MinistralConfig",
        SMALL | {"head_dim": 16, "sliding_window": 19, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "seed-oss": ("SeedOssConfig", SMALL | {"head_dim": 16}),
    "seed-oss-biases": (
        "SeedOssConfig",
        SMALL | {"head_dim": 16, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "ernie4.5": ("Ernie4_5Config", SMALL | {"head_dim": 16, "use_bias": True}),
    "exaone4": ("Exaone4Config", SMALL | WINDOW),
    "exaone4-full": (
        "Exaone4Config",
        SMALL | {"sliding_window": None, "layer_types": ["full_attention"] * 2, "sliding_window_pattern": "LLLG"},
    ),
    "stablelm": ("StableLmConfig", SMALL | STABLELM),
    "stablelm-parallel": (
        "StableLmConfig",
        SMALL | STABLELM | {"use_qkv_bias": True, "use_parallel_residual": True},
    ),
    "starcoder2": ("Starcoder2Config", SMALL | {"sliding_window": 19}),
    "starcoder2-plain": ("Starcoder2Config", SMALL | {"use_bias": False, "tie_word_embeddings": False}),
    "gpt-neox": ("GPTNeoXConfig", SMALL | rope("default", partial_rotary_factor=0.5)),
    "gpt-neox-serial": (
        "GPTNeoXConfig",
        SMALL | rope("default", partial_rotary_factor=1.0) | {"use_parallel_residual": False},
    ),
    "falcon-7b": ("FalconConfig", SMALL | FALCON | {"multi_query": True, "bias": False}),
    "falcon-40b": ("FalconConfig", SMALL | FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "FalconConfig",
        SMALL | FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-serial": ("FalconConfig", SMALL | FALCON | {"multi_query": False, "parallel_attn": False}),
    "gpt2": ("GPT2Config", GPT2),
    "gpt-oss": ("GptOssConfig", SMALL | GPT_OSS),
    "gpt-oss-plain": (
        "GptOssConfig",
        SMALL
        | GPT_OSS
        | rope("default")
        | {
            "attention_bias": False,
            "swiglu_limit": 0.2,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "deepseek-v3": ("DeepseekV3Config", SMALL | DEEPSEEK | MSCALE),
    "deepseek-v3-halves": (
        "DeepseekV3Config",
        SMALL | DEEPSEEK | {"rope_interleave": False, "attention_bias": True, "norm_topk_prob": False},
    ),
    "deepseek-v2-lite": ("DeepseekV2Config", SMALL | DEEPSEEK | {"q_lora_rank": None}),
    "deepseek-v2": ("DeepseekV2Config", SMALL | DEEPSEEK | MSCALE | GROUPS),
    "gpt2-scaled": (
        "GPT2Config",
        GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 80, "tie_word_embeddings": False},
    ),
}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
GLM4_MOE = {
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 3,
    "routed_scaling_factor": 1.7,
    **rope("default", partial_rotary_factor=0.5),
}
LLAMA4 = {
    "num_local_experts": 4,
    "intermediate_size_mlp": 60,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_experts_per_tok": 1,
    "moe_layers": None,
    "no_rope_layers": None,
}
MOE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", SMALL | MOE),
    "qwen2-moe": ("Qwen2MoeConfig", SMALL | QWEN_MOE | {"shared_expert_intermediate_size": 36}),
    "qwen2-moe-some-layers": (
        "Qwen2MoeConfig",
        SMALL
        | QWEN_MOE
        | {
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 36,
        },
    ),
    "qwen3-moe": ("Qwen3MoeConfig", SMALL | QWEN_MOE | {"norm_topk_prob": True, "head_dim": 16}),
    "qwen3-moe-plain": ("Qwen3MoeConfig", SMALL | QWEN_MOE | {"tie_word_embeddings": True, "attention_bias": True}),
    "olmoe": ("OlmoeConfig", SMALL | {"num_experts": 5, "num_experts_per_tok": 3}),
    "granite-moe": ("GraniteMoeConfig", SMALL | GRANITE | MOE | {"tie_word_embeddings": True}),
    "granite-moe-shared": ("GraniteMoeSharedConfig", SMALL | GRANITE | MOE | {"shared_intermediate_size": 36}),
    "glm4-moe": ("Glm4MoeConfig", SMALL | GLM4_MOE),
    "glm4-moe-groups": (
        "Glm4MoeConfig",
        SMALL
        | GLM4_MOE
        | {
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "llama4": ("Llama4TextConfig", SMALL | LLAMA4),
    "llama4-chunks": (
        "Llama4TextConfig",
        SMALL | LLAMA4 | {"attention_chunk_size": 16, "floor_scale": 20, "attn_scale": 0.5},
    ),
    "llama4-dense-layers": (
        "Llama4TextConfig",
        SMALL | LLAMA4 | {"interleave_moe_layer_step": 2, "num_experts_per_tok": 2, "use_qk_norm": False},
    ),
    "mixtral-window": ("MixtralConfig", SMALL | MOE | {"sliding_window": 19, "num_experts_per_tok": 4}),
    "llama4-stretched": (  # its norms come behind the rope, whose factor they take back
        "Llama4TextConfig",
        SMALL
        | LLAMA4
        | {"rms_norm_eps": 1e-2, "interleave_moe_layer_step": 2}
        | rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            attention_factor=0.5,
        ),
    ),
    "qwen2-moe-windows": (
        "Qwen2MoeConfig",
        SMALL
        | QWEN_MOE
        | WINDOW
        | {
            "shared_expert_intermediate_size": 36,
            "use_sliding_window": True,
            "max_window_layers": 3,
            "qkv_bias": False,
        },
    ),
    "qwen3-moe-window": ("Qwen3MoeConfig", SMALL | QWEN_MOE | {"use_sliding_window": True, "sliding_window": 19}),
}
FAMILY_CASES |= MOE_CASES | HYBRID_CASES


def architecture(case: tuple[str, dict[str, Any]]) -> str:
    """The name that config.json gives it."""
    name: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[getattr(transformers, case[0]).model_type]
    return name


# Architecture -> its first case.
FIRST_CASES = {architecture(FAMILY_CASES[case]): case for case in reversed(FAMILY_CASES)}
