"""Configurations drawn at random of a family: what config.json might say, in its newer or in older words."""

from __future__ import annotations

import random
from typing import Any

import transformers
from support.drawn_hybrids import HYBRIDS

ACTIVATIONS = ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "quick_gelu"]  # the last is not built
ROPE_KINDS = ["default", "default", "linear", "dynamic", "llama3", "yarn", "longrope"]
# Those that may turn part of each head.
PARTIAL = {
    "Phi3Config",
    "GlmConfig",
    "Glm4Config",
    "Glm4MoeConfig",
    "GPTNeoXConfig",
    "StableLmConfig",
    "Qwen3_5TextConfig",
    "Qwen3_5MoeTextConfig",
}
WITHOUT_HEAD_DIM = {
    "Phi3Config",
    "OlmoeConfig",
    "FalconConfig",
    "GPT2Config",
    "GPTNeoXConfig",
    "OPTConfig",
    "StableLmConfig",
}
WITHOUT_ROTARY = {"GPT2Config", "OPTConfig", "NemotronHConfig", "Mamba2Config"}
ROPE_BY_LAYER_TYPE = {"Olmo3Config", "Gemma3TextConfig", "Gemma3nTextConfig", "ModernBertConfig"}
ROPE_NAMES = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
OLDER_NAMES = {"GPTNeoXConfig": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
WINDOW_IN_ALL_LAYERS = {"MistralConfig", "MixtralConfig", "Phi3Config", "Starcoder2Config"}
WINDOW_BY_LAYER = {
    "Qwen2Config",
    "Qwen2MoeConfig",
    "Qwen3Config",
    "SmolLM3Config",
    "Olmo3Config",
    "Cohere2Config",
    "MinistralConfig",
    "Gemma2Config",
    "Gemma3TextConfig",
    "Gemma3nTextConfig",
    "Gemma4TextConfig",
    "Gemma4UnifiedTextConfig",
    "Exaone4Config",
}
WIDTHS_OF_EXPERTS = (
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "intermediate_size_mlp",
)
FLAGS = (
    "attention_out_bias",
    "attention_bias",
    "mlp_bias",
    "use_bias",
    "bias",
    "tie_word_embeddings",
    "use_parallel_residual",
    "enable_bias",
    "do_layer_norm_before",
    "layer_norm_elementwise_affine",
    "_remove_final_layer_norm",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "new_decoder_architecture",
    "multi_query",
    "parallel_attn",
    "qkv_bias",
    "norm_bias",
    "classifier_bias",
    "attn_temperature_tuning",
    "use_qkv_bias",
)
CHOICES: dict[str, tuple[Any, ...]] = {
    "embedding_multiplier": (0.5, 3.0, 12.0),
    "residual_multiplier": (0.22, 0.7),
    "attention_multiplier": (0.02, 0.1),
    "logits_scaling": (0.5, 7.0),
    "logit_scale": (0.1, 3.0),
    "attn_logit_softcapping": (None, 0.7, 3.0, 12.0),
    "final_logit_softcapping": (None, 0.1, 3.0, 12.0),
    "query_pre_attn_scalar": (7, 16, 100),
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"), (1e-3, 1e-5, 1e-6)
    ),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "activation"), (*ACTIVATIONS,)),
}


def drawn(config_class: str, base: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Settings of a model of the family of ``base``, which says what is not drawn."""
    default = getattr(transformers, config_class)()
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 4])
    size = rng.choice([16, 24, 32] if config_class in PARTIAL else [4, 8, 12, 16, 20, 32])
    left_out = ("layer_types", "no_rope_layers", "rope_parameters", "sliding_window_pattern")
    found = {key: value for key, value in base.items() if key not in left_out} | {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * size,
        "intermediate_size": rng.choice([40, 72, 104]),
        "num_hidden_layers": rng.choice([1, 2, 3, 7]),
        "max_position_embeddings": rng.choice([64, 200, 256]),
    }
    has_size = "head_dim" in base or hasattr(default, "head_dim") or rng.random() < 0.3
    if config_class not in WITHOUT_HEAD_DIM and has_size:
        found |= {"head_dim": size, "hidden_size": heads * rng.choice([4, 6, 12])}
    found |= {key: rng.random() < 0.5 for key in FLAGS if hasattr(default, key)}
    for key, choices in CHOICES.items():
        if hasattr(default, key) and ("act" not in key or rng.random() < 0.3):
            found[key] = rng.choice(choices)
    found |= _windows(config_class, found["num_hidden_layers"], rng)
    found |= _own(config_class, found, rng)
    found |= _experts(config_class, found, rng)
    if config_class not in WITHOUT_ROTARY:
        turned = found["head_dim"] if config_class.startswith(("Deepseek", "FalconH1")) else size
        turned = found["head_dim"] // 2 if config_class == "BambaConfig" else turned  # half of a width of its own
        found |= _rope(config_class, found, turned, rng)
    return found


def _windows(config_class: str, layers: int, rng: random.Random) -> dict[str, Any]:
    if config_class in WINDOW_IN_ALL_LAYERS:
        return {"sliding_window": rng.choice([None, *rng.choices(range(1, 41), k=3)])}
    if config_class == "Qwen3MoeConfig":
        return {"use_sliding_window": rng.random() < 0.7, "sliding_window": rng.randint(1, 40)}
    if config_class not in WINDOW_BY_LAYER:
        return {}
    found: dict[str, Any] = {"sliding_window": rng.randint(1, 40)}
    if config_class in ("Qwen2Config", "Qwen2MoeConfig", "Qwen3Config", "SmolLM3Config"):
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
    if config_class.startswith(("Gemma3n", "Gemma4")):
        return _gemma_3n(found, rng) if "3n" in config_class else _gemma_4(config_class, found, rng)
    if config_class.startswith("Deepseek"):
        turned = rng.choice([4, 8, 16])
        return {
            "num_key_value_heads": heads,
            "hidden_size": heads * rng.choice([4, 12]),
            "head_dim": turned,
            "qk_rope_head_dim": turned,
            "qk_nope_head_dim": rng.choice([4, 16, 20]),
            "v_head_dim": rng.choice([8, 12]),
            "kv_lora_rank": rng.choice([16, 24, 34]),
            "q_lora_rank": rng.choice([None, 20]),
            "first_k_dense_replace": rng.randint(0, layers),
        }
    if config_class in HYBRIDS:
        return HYBRIDS[config_class](found, rng)
    if config_class.startswith("Qwen"):
        return {"max_window_layers": rng.randint(0, layers)}
    if config_class == "SmolLM3Config":
        own: dict[str, Any] = {"no_rope_layer_interval": rng.choice([2, 4])}
        return own | ({"no_rope_layers": [rng.randint(0, 1) for _ in range(layers)]} if rng.random() < 0.5 else {})
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


def _gemma_3n(found: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers, streams = found["num_hidden_layers"], rng.choice([2, 3, 4])
    types = found.get("layer_types") or [("full" if n % 5 == 4 else "sliding") + "_attention" for n in range(layers)]
    return {
        "num_kv_shared_layers": rng.choice([n for n in range(layers) if set(types[: layers - n]) == set(types)]),
        "altup_num_inputs": streams,
        "altup_active_idx": rng.randrange(streams),
        "laurel_rank": rng.choice([4, 9]),
        "altup_correct_scale": rng.random() < 0.7,
        "hidden_size_per_layer_input": rng.choice([8, 12]),
        "vocab_size_per_layer_input": found["vocab_size"] - rng.choice([0, 60]),
        "intermediate_size": 320,
        "final_logit_softcapping": found["final_logit_softcapping"] or 30.0,
        "activation_sparsity_pattern": [rng.choice([0.0, 0.5, 0.9]) for _ in range(layers)],
    }


def _gemma_4(config_class: str, found: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers, heads = found["num_hidden_layers"], found["num_attention_heads"]
    types = found.get("layer_types", ["sliding_attention"] * min(5, layers - 1) + ["full_attention"] * layers)
    types = [*types[: layers - 1], "full_attention"]
    shared = rng.choice([n for n in range(layers) if set(types[: layers - n]) == set(types)])
    own: dict[str, Any] = {
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "global_head_dim": rng.choice([8, 12, 28]),
        "attention_k_eq_v": rng.random() < 0.5,
        "num_global_key_value_heads": rng.choice([None, 1, heads]),
        "use_double_wide_mlp": rng.random() < 0.5,
    }
    if config_class == "Gemma4TextConfig":
        # transformers cannot share keys without them
        own["hidden_size_per_layer_input"] = rng.choice([8, 12] if shared else [0, 8, 12])
    if config_class == "Gemma4TextConfig" and rng.random() < 0.4:
        own |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 20}
    return own


def _experts(config_class: str, found: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Of a mixture: how many experts there are and take part, how wide they are, and which layers have them."""
    count = next((key for key in ("num_local_experts", "num_experts", "n_routed_experts") if found.get(key)), None)
    if count is None or config_class.startswith("Gemma4"):
        return {}
    layers, experts = found.get("num_hidden_layers", 1), rng.choice([1, 2, 4, 6, 12, 16])
    own: dict[str, Any] = {}
    if count == "n_routed_experts":  # transformers adds up the two best of each group
        groups = rng.choice([1, 2, 4])
        own = {"n_group": groups, "topk_group": rng.randint(1, groups), "n_shared_experts": rng.choice([1, 2])}
        experts = groups * rng.choice([2, 3, 4])
        own |= {"first_k_dense_replace": rng.randint(0, layers), "routed_scaling_factor": rng.choice([1.0, 1.7])}
    most = experts // own.get("n_group", 1) * own.get("topk_group", 1)
    own |= {count: experts, "num_experts_per_tok": rng.randint(1, min(most, 5))}
    own |= {key: rng.choice([4, 20, 36, 64]) for key in WIDTHS_OF_EXPERTS if key in found}
    default = getattr(transformers, config_class)()
    own |= {key: rng.random() < 0.5 for key in ("norm_topk_prob", "use_qk_norm") if hasattr(default, key)}
    return own | _of_one_mixture(config_class, layers, rng)


def _of_one_mixture(config_class: str, layers: int, rng: random.Random) -> dict[str, Any]:
    some = [layer for layer in range(layers) if rng.random() < 0.3]
    if config_class == "GraniteMoeSharedConfig":
        return {"shared_intermediate_size": rng.choice([0, 20, 36, 64])}
    if config_class == "OlmoeConfig":
        return {"clip_qkv": 8.0 if rng.random() < 0.1 else None}
    if config_class == "DeepseekV2Config":
        return {"topk_method": rng.choice(["greedy", "group_limited_greedy"]), "norm_topk_prob": False}
    if config_class in ("Qwen2MoeConfig", "Qwen3MoeConfig"):
        return {"decoder_sparse_step": rng.choice([1, 1, 2]), "mlp_only_layers": some}
    if config_class == "Llama4TextConfig":
        turned = [rng.randint(0, 1) for _ in range(layers)]
        return {
            "interleave_moe_layer_step": rng.choice([1, 2]),
            "moe_layers": rng.choice([None, some]),
            "no_rope_layer_interval": rng.choice([2, 4]),
            "no_rope_layers": rng.choice([None, turned]),
        }
    return {}


def drawn_encoder(config_class: str, base: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Settings of an encoder of the family of ``base``, for texts of up to 64 tokens."""
    default = getattr(transformers, config_class)()
    heads, size = rng.choice([1, 2, 3, 6]), rng.choice([4, 8, 12, 16, 20, 32, 64])
    found = base | {
        "num_attention_heads": heads,
        "hidden_size": heads * size,
        "intermediate_size": rng.choice([40, 72, 104]),
        "num_hidden_layers": rng.choice([1, 2, 4]),
        "max_position_embeddings": rng.choice([70, 130]),
        "num_labels": rng.choice([1, 2, 5]),
    }
    found |= {key: rng.random() < 0.5 for key in FLAGS if key != "tie_word_embeddings" and hasattr(default, key)}
    for key, choices in CHOICES.items():
        if hasattr(default, key) and ("act" not in key or rng.random() < 0.3):
            found[key] = rng.choice(choices)
    if config_class == "ModernBertConfig":
        layers = found["num_hidden_layers"]
        found |= {"local_attention": rng.choice([2, 7, 24, 60, 128]), "classifier_pooling": rng.choice(["cls", "mean"])}
        found |= {"classifier_activation": rng.choice(["gelu", "relu"])}
        if rng.random() < 0.5:
            found["global_attn_every_n_layers"] = rng.choice([1, 2, 4])
        else:
            found["layer_types"] = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
        return found | _rope(config_class, found, size, rng)
    if config_class == "Gemma3TextConfig":
        layers, both = found["num_hidden_layers"], ["full_attention", "sliding_attention"]
        found |= {"num_key_value_heads": rng.choice([one for one in (1, 2, 3, 6) if heads % one == 0])}
        found |= {"head_dim": rng.choice([8, 16, 20, 64]), "query_pre_attn_scalar": rng.choice([8, 24, 256])}
        found |= {"sliding_window": rng.choice([2, 8, 24, 60, 512]), "use_bidirectional_attention": True}
        return found | {"layer_types": rng.choice([None, [rng.choice(both) for _ in range(layers)]])}
    found["pad_token_id"] = rng.choice([0, 1, 3])
    if config_class == "DistilBertConfig":
        return found | {"hidden_dim": found.pop("intermediate_size")}
    found["type_vocab_size"] = rng.choice([1, 2, 3])
    return found | (_rope(config_class, found, size, rng) if config_class in ("NomicBertConfig", "GteConfig") else {})


def _rope(config_class: str, found: dict[str, Any], size: int, rng: random.Random) -> dict[str, Any]:
    longest = found["max_position_embeddings"]
    if config_class.startswith("Gemma4"):
        full = {"rope_type": "proportional", "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]), "rope_theta": 5e5}
        sliding = rope_of(["default"], longest, size, rng)
        return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
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
            ("beta_fast", (16, 32.0)),
            ("beta_slow", (1, 2.0)),
            ("attention_factor", (0.8, 1.3)),
            ("mscale", (0.7, 1.0)),
            ("mscale_all_dim", (0.5, 1.0)),
            ("truncate", (True, False)),
        ):
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
    if rope and config_class == "ModernBertConfig":
        full, sliding = rope["full_attention"], rope["sliding_attention"]
        if full["rope_type"] == sliding["rope_type"] == "default":
            del found["rope_parameters"]
            found |= {"global_rope_theta": full["rope_theta"], "local_rope_theta": sliding["rope_theta"]}
    elif rope and config_class in ROPE_BY_LAYER_TYPE:
        full, sliding = dict(rope["full_attention"]), rope["sliding_attention"]
        local = {"rope_local_base_freq": sliding["rope_theta"]} if config_class.startswith("Gemma3") else {}
        if sliding["rope_type"] == "default" and (local or sliding["rope_theta"] == full["rope_theta"] == 5e5):
            del found["rope_parameters"]
            found |= local | {"rope_theta": full.pop("rope_theta"), "rope_scaling": full}
    elif rope and not config_class.startswith("Gemma4") and rng.random() < 0.6:
        rope = dict(found.pop("rope_parameters"))
        for newer, older in (OLDER_NAMES.get(config_class) or ROPE_NAMES).items():
            if newer in rope:
                found[older] = rope.pop(newer)
        kind = rope.pop("rope_type")
        found["rope_scaling"] = None if kind == "default" else {rng.choice(["type", "rope_type"]): kind, **rope}
    return found
