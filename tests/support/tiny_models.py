"""Small random checkpoints, made by transformers and saved as safetensors: the reference's own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB_SIZE = 320
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GQA = _COMMON | {"num_key_value_heads": 2, "intermediate_size": 112}

# name -> (config class, settings)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GQA | {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", _GQA | {"sliding_window": 24, "head_dim": 24, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", _GQA | {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", _GQA | {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", _GQA | {"head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        _GQA | {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        _GQA | {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2},
    ),
    "opt": ("OPTConfig", _COMMON | {"ffn_dim": 112, "word_embed_proj_dim": 64, "do_layer_norm_before": True}),
}


def make_model(config_class: str, settings: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A causal language model in float32 whose logits are spread enough to have clear winners."""
    return model_of(getattr(transformers, config_class)(**settings), seed)


def model_of(config: Any, seed: int = 0) -> PreTrainedModel:
    """`make_model` of transformers' ``config``."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    family = type(config).__name__
    own = family.startswith(("Gemma3n", "Gemma4"))
    low = -0.5 if family.startswith("Gemma") and not own else 0.5  # its norms multiply by 1 + weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name and name.endswith("weight"):
                parameter.uniform_(low, low + 1.0)
                if own and "q_norm" in name:  # scores have no other scale
                    parameter.mul_(2 * parameter.numel() ** -0.5)
            elif name.endswith(("A_log", "dt_bias")):  # decays from next to 0 to next to 1
                parameter.uniform_(*(-7.0, 2.0) if name.endswith("A_log") else (-6.0, 3.0))
            elif parameter.ndim == 1:
                parameter.normal_(0, 0.1)
            else:
                parameter.normal_(0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.15)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
    return model.eval()


def save_all(directory: Path) -> dict[str, Path]:
    paths = {}
    for name, (config_class, settings) in FAMILIES.items():
        paths[name] = directory / name
        make_model(config_class, settings).save_pretrained(paths[name])
    return paths
