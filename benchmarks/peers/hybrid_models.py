"""A hybrid model of random numbers in the shape of a real one, as the GGUF file that llama.cpp reads."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.random_models import TESTS, add_tokens

QWEN3_5_0_8B: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 3584,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
KEYS = {
    "rope.dimension_count": 64,
    "rope.dimension_sections": [11, 11, 10, 0],
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 16,
    "ssm.time_step_rank": 16,
    "ssm.inner_size": 2048,
}


def write_hybrid(tokenizer_of: Path, target: Path) -> None:
    """Write Qwen3.5 0.8B's shape in float32 with SmolLM2's tokenizer."""
    import torch
    import transformers

    sys.path.insert(0, str(TESTS))
    try:
        from support.gguf_families import HYBRID_NAMES, Layout, write_family
    finally:
        sys.path.remove(str(TESTS))
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**QWEN3_5_0_8B)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tokens = partial(add_tokens, shape=QWEN3_5_0_8B, tokenizer_of=tokenizer_of)
    write_family(target, model, Layout("qwen35", "", HYBRID_NAMES, KEYS, "tiled", tokens))
