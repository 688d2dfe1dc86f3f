"""What config.json says of the models that are run on a pretended GPU, and what image processors' files do."""

from __future__ import annotations

from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK: dict[str, Any] = QWEN3 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "num_key_value_heads": 16,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
del DEEPSEEK["head_dim"]
MIXTRAL: dict[str, Any] = QWEN3 | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "intermediate_size": 1024,
}
# Few layers around towers as released, or of few layers; and what their image processors say.
IMAGE_READERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava": (
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "text_config": QWEN3 | {"model_type": "llama", "head_dim": 64, "vocab_size": 32064},
            "image_token_index": 32000,
            "torch_dtype": "float16",
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "image_size": 336,
                "patch_size": 14,
            },
        },
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    ),
    "gemma3": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "num_hidden_layers": 2,
                "intermediate_size": 10240,
                "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "image_token_index": 262144,
            "torch_dtype": "bfloat16",
            "mm_tokens_per_image": 256,
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "patch_size": 14,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "image_size": 896,
            },
        },
        {"size": {"height": 896, "width": 896}},
    ),
    "idefics3": (
        {
            "architectures": ["Idefics3ForConditionalGeneration"],
            "model_type": "idefics3",
            "scale_factor": 4,
            "text_config": QWEN3
            | {
                "model_type": "llama",
                "hidden_size": 960,
                "num_attention_heads": 15,
                "head_dim": 64,
                "num_key_value_heads": 5,
                "intermediate_size": 2560,
                "vocab_size": 49280,
            },
            "image_token_id": 49190,
            "torch_dtype": "bfloat16",
            "vision_config": {
                "model_type": "idefics3",
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "image_size": 512,
                "patch_size": 16,
            },
        },
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
    ),
    "qwen2.5-vl": (
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "text_config": {"model_type": "qwen2_5_vl_text"}
            | {key: value for key, value in QWEN3.items() if key not in ("architectures", "model_type", "head_dim")}
            | {"num_key_value_heads": 2, "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}},
            "image_token_id": 151655,
            "torch_dtype": "bfloat16",
            "vision_config": {
                "model_type": "qwen2_5_vl",
                "hidden_size": 1280,
                "out_hidden_size": 1024,
                "depth": 3,
                "fullatt_block_indexes": [1],
            },
        },
        {"patch_size": 14},
    ),
    "qwen3-vl": (
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "text_config": QWEN3
            | {
                "model_type": "qwen3_vl_text",
                "num_key_value_heads": 8,
                "num_hidden_layers": 4,
                "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]},
            },
            "image_token_id": 151655,
            "torch_dtype": "bfloat16",
            "vision_config": {
                "model_type": "qwen3_vl",
                "out_hidden_size": 1024,
                "patch_size": 16,
                "depth": 6,
                "deepstack_visual_indexes": [1, 3, 5],
            },
        },
        {"patch_size": 16},
    ),
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
