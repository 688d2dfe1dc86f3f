"""Small random checkpoints of dense families: name -> (config class of transformers, settings)."""

from __future__ import annotations

from typing import Any

from support.tiny_models import VOCAB_SIZE

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


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
    "num_attention_heads": 3, "num_key_value_heads": 1, "original_max_position_embeddings": 64,
    **rope("longrope", short_factor=FACTORS, long_factor=FACTORS, partial_rotary_factor=0.75),
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 7.0,
}  # fmt: skip
GRANITE4 = GRANITE | {
    "layer_types": ["attention"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 80,
    "position_embedding_type": "rope", "mamba_n_heads": 2,
}  # fmt: skip
FAMILY_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-nemo": ("MistralConfig", SMALL | {"sliding_window": None, "head_dim": 20}),
    "phi3": ("Phi3Config", SMALL | PHI3 | {"sliding_window": 19}),
    "phi4-mini": ("Phi3Config", SMALL | PHI3 | LONGROPE | {"tie_word_embeddings": True}),
    "granite": ("GraniteConfig", SMALL | GRANITE | {"tie_word_embeddings": True}),
    "granite-biases": ("GraniteConfig", SMALL | GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "granite4-dense": ("GraniteMoeHybridConfig", SMALL | GRANITE4),
    "granite4-dense-nope": ("GraniteMoeHybridConfig", SMALL | GRANITE4 | {"position_embedding_type": None}),
    "smollm3": ("SmolLM3Config", SMALL | {"num_hidden_layers": 4}),
    "smollm3-window": (
        "SmolLM3Config",
        SMALL | {
            "no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 19, "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
