"""Fields of config.json that every model must have, for tests that need no weights."""

from __future__ import annotations

from typing import Any

LLAMA_SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
