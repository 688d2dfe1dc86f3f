"""Settings that only hybrid models have, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any


def _qwen_3_5(settings: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers, key_heads = settings["num_hidden_layers"], rng.choice([1, 2, 3])
    found = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * rng.choice([1, 2, 3, 4]),
        "linear_key_head_dim": rng.choice([8, 16, 32, 64]),
        "linear_value_head_dim": rng.choice([8, 16, 48, 64]),
        "linear_conv_kernel_dim": rng.choice([2, 3, 4, 5]),
    }
    if rng.random() < 0.6:
        return found | {"layer_types": [rng.choice(["linear_attention", "full_attention"]) for _ in range(layers)]}
    return found


def _lfm2(settings: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers = settings["num_hidden_layers"]
    found: dict[str, Any] = {
        "conv_bias": rng.random() < 0.5,
        "conv_L_cache": rng.choice([2, 3, 4, 5]),
        "layer_types": [rng.choice(["conv", "full_attention"]) for _ in range(layers)],
    }
    if "num_experts" in settings:
        dense, scale = rng.randint(0, layers), rng.choice([1.0, 1.7])
        return found | {
            "num_dense_layers": dense,
            "use_expert_bias": rng.random() < 0.7,
            "routed_scaling_factor": scale,
        }
    if rng.random() < 0.3:
        del found["layer_types"]
        found["full_attn_idxs"] = [layer for layer in range(layers) if rng.random() < 0.5]
    return found | {
        "block_auto_adjust_ff_dim": rng.random() < 0.5,
        "block_ffn_dim_multiplier": rng.choice([0.7, 1.0, 1.3]),
        "block_multiple_of": rng.choice([1, 8, 32]),
    }


def _mamba_2(settings: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Heads of a width that is a multiple of 8: the hidden size is changed for them."""
    size, expand, heads = rng.choice([8, 16, 24]), rng.choice([1, 2]), settings["num_attention_heads"]
    width = 2 * heads * size
    groups = rng.choice([count for count in (1, 2, 3) if 2 * heads * expand % count == 0])
    return {
        "hidden_size": width,
        "head_dim": width // heads,
        "mamba_n_heads": width * expand // size,
        "mamba_d_head": rng.choice([size, "auto"]),
        "mamba_n_groups": groups,
        "mamba_expand": expand,
        "mamba_d_state": rng.choice([8, 16, 64]),
        "mamba_d_conv": rng.choice([2, 3, 4, 5]),
        "mamba_chunk_size": rng.choice([8, 64, 256]),
        "mamba_conv_bias": rng.random() < 0.5,
        "mamba_proj_bias": rng.random() < 0.5,
        "time_step_limit": rng.choice([[0.0, float("inf")], [0.01, 0.5]]),
    }


def _granite_4(settings: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    kinds = rng.choice([["attention"], ["mamba"], ["mamba", "attention"]])
    found = _mamba_2(settings, rng) | {
        "shared_intermediate_size": rng.choice([40, 72]),
        "layer_types": [rng.choice(kinds) for _ in range(settings["num_hidden_layers"])],
        "position_embedding_type": rng.choice(["rope", None, "nope"]),
    }
    if rng.random() < 0.5:
        found |= {"num_local_experts": 4, "num_experts_per_tok": rng.choice([1, 2, 4])}
    return found


def _bamba(settings: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers = min(settings["num_hidden_layers"], 3)  # more add rounding to rounding
    some = [layer for layer in range(layers) if rng.random() < 0.5]
    return _mamba_2(settings, rng) | {"num_hidden_layers": layers, "attn_layer_indices": rng.choice([some, None])}


def _nemotron_h(settings: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers, groups = settings.pop("num_hidden_layers"), rng.choice([1, 2, 3])
    return {
        "hybrid_override_pattern": "".join(rng.choice("MM*-E") for _ in range(layers)),
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": rng.choice([8, 40]),
        "moe_latent_size": rng.choice([None, 16, 24]),
        "mamba_num_heads": groups * rng.choice([1, 2, 3]),
        "mamba_head_dim": rng.choice([8, 16, 24]),
        "n_groups": groups,
        "ssm_state_size": rng.choice([8, 16, 64]),
        "conv_kernel": rng.choice([2, 3, 4, 5]),
        "use_conv_bias": rng.random() < 0.5,
        "time_step_min": rng.choice([0.001, 0.05]),
        "tie_word_embeddings": False,  # transformers does not tie them
        "num_nextn_predict_layers": 0,
    }


def _mamba_2_alone(settings: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"):
        settings.pop(key)
    size, expand, heads = rng.choice([8, 16, 24]), rng.choice([1, 2]), rng.choice([2, 3, 6])
    return {
        "hidden_size": heads * size,
        "num_heads": heads * expand,
        "head_dim": size,
        "expand": expand,
        "n_groups": rng.choice([count for count in (1, 2, 3) if heads * expand % count == 0]),
        "state_size": rng.choice([8, 16, 64]),
        "conv_kernel": rng.choice([2, 3, 4, 5]),
        "chunk_size": rng.choice([8, 64, 256]),
        "use_conv_bias": rng.random() < 0.5,
        "time_step_limit": rng.choice([[0.0, float("inf")], [0.01, 0.5]]),
    }


def _falcon_h1(settings: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    def factor() -> float:
        return rng.choice([0.3, 0.7, 1.0, 1.3])

    found, names = _mamba_2(settings, rng), ("embedding", "lm_head", "key", "ssm_in", "ssm_out")
    inner = found["mamba_expand"] * found["hidden_size"]
    half = inner // 2
    if half % found["mamba_n_groups"] == 0 and found["mamba_n_heads"] % (2 * found["mamba_n_groups"]) == 0:
        inner, found["mamba_n_heads"] = half, found["mamba_n_heads"] // 2
    return found | {
        "num_hidden_layers": min(settings["num_hidden_layers"], 3),
        "mamba_d_ssm": inner,
        "mamba_rms_norm": rng.random() < 0.5,
        "mamba_norm_before_gate": rng.random() < 0.5,
        "projectors_bias": rng.random() < 0.5,
        **{f"{name}_multiplier": factor() for name in (*names, "attention_in", "attention_out")},
        "ssm_multipliers": [factor() for _ in range(5)],
        "mlp_multipliers": [factor(), factor()],
    }


HYBRIDS: dict[str, Callable[[dict[str, Any], random.Random], dict[str, Any]]] = {
    "Qwen3_5TextConfig": _qwen_3_5,
    "Qwen3_5MoeTextConfig": _qwen_3_5,
    "Lfm2Config": _lfm2,
    "Lfm2MoeConfig": _lfm2,
    "GraniteMoeHybridConfig": _granite_4,
    "BambaConfig": _bamba,
    "NemotronHConfig": _nemotron_h,
    "FalconH1Config": _falcon_h1,
    "Mamba2Config": _mamba_2_alone,
}
