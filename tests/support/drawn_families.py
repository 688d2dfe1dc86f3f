"""Configurations drawn at random of a family: what config.json might say, in its newer or in older words."""

from __future__ import annotations

import random
from typing import Any

import transformers

ACTIVATIONS = ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "quick_gelu"]  # the last is not built
ROPE_KINDS = ["default", "default", "linear", "dynamic", "llama3", "yarn", "longrope"]
PARTIAL = {"Phi3Config", "GlmConfig", "Glm4Config", "GPTNeoXConfig"}  # may turn part of each head
WITHOUT_HEAD_DIM = {"Phi3Config", "FalconConfig", "GPT2Config", "GPTNeoXConfig", "OPTConfig"}
WITHOUT_ROTARY = {"GPT2Config", "OPTConfig"}
ROPE_BY_LAYER_TYPE = {"Olmo3Config", "Gemma3TextConfig"}
ROPE_NAMES = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
OLDER_NAMES = {"GPTNeoXConfig": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
WINDOW_IN_ALL_LAYERS = {"MistralConfig", "Phi3Config", "Starcoder2Config"}
WINDOW_BY_LAYER = {
    "Qwen2Config", "Qwen3Config", "SmolLM3Config", "Olmo3Config", "Cohere2Config", "MinistralConfig", "Gemma2Config",
    "Gemma3TextConfig", "Exaone4Config",
}  # fmt: skip
FLAGS = (
    "attention_out_bias",
    "attention_bias", "mlp_bias", "use_bias", "bias", "tie_word_embeddings", "use_parallel_residual", "enable_bias",
    "do_layer_norm_before", "layer_norm_elementwise_affine", "_remove_final_layer_norm", "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx", "new_decoder_architecture", "multi_query", "parallel_attn",
)  # fmt: skip
CHOICES: dict[str, tuple[Any, ...]] = {
    "embedding_multiplier": (0.5, 3.0, 12.0), "residual_multiplier": (0.22, 0.7), "attention_multiplier": (0.02, 0.1),
    "logits_scaling": (0.5, 7.0), "logit_scale": (0.1, 3.0), "attn_logit_softcapping": (None, 0.7, 3.0, 12.0),
    "final_logit_softcapping": (None, 0.1, 3.0, 12.0), "query_pre_attn_scalar": (7, 16, 100),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), (1e-3, 1e-5, 1e-6)),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "activation"), (*ACTIVATIONS,)),
}  # fmt: skip


def drawn(config_class: str, base: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Settings of a model of the family of ``base``, which says what is not drawn."""
    default = getattr(transformers, config_class)()
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 4])
    size = rng.choice([16, 24, 32] if config_class in PARTIAL else [4, 8, 12, 16, 20, 32])
    left_out = ("layer_types", "no_rope_layers", "rope_parameters", "sliding_window_pattern")
    found = {key: value for key, value in base.items() if key not in left_out} | {
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * size,
        "intermediate_size": rng.choice([40, 72, 104]), "num_hidden_layers": rng.choice([1, 2, 3, 7]),
        "max_position_embeddings": rng.choice([64, 200, 256]),
    }  # fmt: skip
    has_size = "head_dim" in base or hasattr(default, "head_dim") or rng.random() < 0.3
    if config_class not in WITHOUT_HEAD_DIM and has_size:
        found |= {"head_dim": size, "hidden_size": heads * rng.choice([4, 6, 12])}
    found |= {key: rng.random() < 0.5 for key in FLAGS if hasattr(default, key)}
    for key, choices in CHOICES.items():
        if hasattr(default, key) and ("act" not in key or rng.random() < 0.3):
            found[key] = rng.choice(choices)
    found |= _windows(config_class, found["num_hidden_layers"], rng)
    found |= _own(config_class, found, rng)
    if config_class not in WITHOUT_ROTARY:
        turned = found["head_dim"] if config_class.startswith("Deepseek") else size
        found |= _rope(config_class, found, turned, rng)
    return found


def _windows(config_class: str, layers: int, rng: random.Random) -> dict[str, Any]:
    if config_class in WINDOW_IN_ALL_LAYERS:
        return {"sliding_window": rng.choice([None, *rng.choices(range(1, 41), k=3)])}
    if config_class not in WINDOW_BY_LAYER:
        return {}
    found: dict[str, Any] = {"sliding_window": rng.randint(1, 40)}
    if config_class in ("Qwen2Config", "Qwen3Config", "SmolLM3Config"):
        found["use_sliding_window"] = rng.random() < 0.7
    kinds = ["full_attention", "sliding_attention"] if found.get("use_sliding_window", True) else ["full_attention"]
    if rng.random() < 0.6:
        found["layer_types"] = [rng.choice(kinds) for _ in range(layers)]
    return found


def _own(config_class: str, found: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """What one family alone has."""
    layers, heads, hidden = (found[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if config_class == "GptOssConfig":  # transformers multiplies experts of widths that fill whole 16 bytes
        return {"hidden_size": heads * rng.choice([4, 12]), "sliding_window": rng.randint(1, 40)}
    if config_class.startswith("Deepseek"):
        turned = rng.choice([4, 8, 16])
        return {
            "num_key_value_heads": heads, "hidden_size": heads * rng.choice([4, 12]), "head_dim": turned,
            "qk_rope_head_dim": turned, "qk_nope_head_dim": rng.choice([4, 16, 20]), "v_head_dim": rng.choice([8, 12]),
            "kv_lora_rank": rng.choice([16, 24, 34]), "q_lora_rank": rng.choice([None, 20]),
            "first_k_dense_replace": rng.randint(0, layers),
        }  # fmt: skip
    if config_class.startswith("Qwen"):
        return {"max_window_layers": rng.randint(0, layers)}
    if config_class == "SmolLM3Config":
        own: dict[str, Any] = {"no_rope_layer_interval": rng.choice([2, 4])}
        return own | ({"no_rope_layers": [rng.randint(0, 1) for _ in range(layers)]} if rng.random() < 0.5 else {})
    if config_class == "GraniteMoeHybridConfig":
        kind = rng.choice(["rope", None, "nope"])
        width = {"shared_intermediate_size": rng.choice([40, 72])}
        return width | {"layer_types": ["attention"] * layers, "position_embedding_type": kind, "mamba_n_heads": heads}
    if config_class == "OPTConfig":
        return {"ffn_dim": rng.choice([40, 72]), "word_embed_proj_dim": rng.choice([24, hidden, hidden])}
    if config_class == "GPT2Config":
        del found["intermediate_size"]
        return {"n_embd": hidden, "n_head": heads, "n_layer": layers, "n_inner": rng.choice([None, 40])}
    if config_class == "FalconConfig":
        own = {"num_kv_heads": found["num_key_value_heads"], "alibi": rng.random() < 0.1}
        if found["new_decoder_architecture"]:
            own |= {"parallel_attn": rng.random() < 0.9, "num_ln_in_parallel_attn": rng.choice([None, 1, 2])}
        elif not found["multi_query"]:  # as many keys as queries
            own |= {"num_kv_heads": heads, "num_key_value_heads": heads}
        return own
    return {"use_qk_norm": rng.random() < 0.1} if config_class == "CohereConfig" else {}


def _rope(config_class: str, found: dict[str, Any], size: int, rng: random.Random) -> dict[str, Any]:
    longest = found["max_position_embeddings"]
    if config_class in ROPE_BY_LAYER_TYPE:
        ropes = {kind: rope_of(ROPE_KINDS, longest, size, rng) for kind in ("full_attention", "sliding_attention")}
        for rope in ropes.values():
            rope.pop("truncate", None)  # transformers reads it outside of layer types alone
        return {"rope_parameters": ropes}
    part = {"partial_rotary_factor": rng.choice([0.25, 0.5, 0.75, 1.0])} if config_class in PARTIAL else {}
    turned = int(size * part.get("partial_rotary_factor", 1.0))
    if config_class == "Phi3Config":
        rope = rope_of(["default", "longrope"], longest, turned, rng)
        original = rope.pop("original_max_position_embeddings", longest)
        return {"rope_parameters": rope | part, "original_max_position_embeddings": original}
    return {"rope_parameters": rope_of(ROPE_KINDS, longest, turned, rng) | part}


def rope_of(kinds: list[str], longest: int, size: int, rng: random.Random) -> dict[str, Any]:
    """Rope parameters of one of ``kinds``, for up to ``longest`` positions; ``size`` elements of a head are turned."""
    kind = rng.choice(kinds)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([123.0, 1e4, 5e5])}
    if kind != "default":
        rope["factor"] = rng.choice([1.0, 2.0, 4.5, 8.0])
    if kind in ("llama3", "yarn") and rng.random() < 0.7:
        rope["original_max_position_embeddings"] = rng.choice([16, 32, longest])
    if kind == "llama3":
        rope |= {"low_freq_factor": rng.choice([0.5, 1.0]), "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "yarn":
        for key, values in (
            ("beta_fast", (16, 32.0)), ("beta_slow", (1, 2.0)), ("attention_factor", (0.8, 1.3)),
            ("mscale", (0.7, 1.0)), ("mscale_all_dim", (0.5, 1.0)), ("truncate", (True, False)),
        ):  # fmt: skip
            if rng.random() < 0.4:
                rope[key] = rng.choice(values)
    if kind == "longrope":
        rope["original_max_position_embeddings"] = rng.choice([16, longest])
        for key in ("short_factor", "long_factor"):
            rope[key] = [round(rng.uniform(1.0, 6.0), 2) for _ in range(size // 2)]
        if rng.random() < 0.3:
            rope["attention_factor"] = 1.2
    return rope


def in_other_words(config_class: str, config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same config.json as older or terser releases write it: some fields left out that are the family's default,
    and rope in ``rope_theta`` and ``rope_scaling``."""
    default = getattr(transformers, config_class)().to_dict()
    found = {
        key: value
        for key, value in config.items()
        if key in ("architectures", "model_type") or key not in default or value != default[key] or rng.random() < 0.5
    }
    rope = found.get("rope_parameters")
    if rope and config_class in ROPE_BY_LAYER_TYPE:
        full, sliding = dict(rope["full_attention"]), rope["sliding_attention"]
        local = {"rope_local_base_freq": sliding["rope_theta"]} if config_class == "Gemma3TextConfig" else {}
        if sliding["rope_type"] == "default" and (local or sliding["rope_theta"] == full["rope_theta"] == 5e5):
            del found["rope_parameters"]
            found |= local | {"rope_theta": full.pop("rope_theta"), "rope_scaling": full}
    elif rope and rng.random() < 0.6:
        rope = dict(found.pop("rope_parameters"))
        for newer, older in (OLDER_NAMES.get(config_class) or ROPE_NAMES).items():
            if newer in rope:
                found[older] = rope.pop(newer)
        kind = rope.pop("rope_type")
        found["rope_scaling"] = None if kind == "default" else {rng.choice(["type", "rope_type"]): kind, **rope}
    return found
