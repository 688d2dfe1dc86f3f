"""config.json and generation_config.json out of a GGUF header, in the words of Hugging Face."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.gguf.encoders import ENCODERS, encoder_config
from octavo.gguf.families import (
    ARCHITECTURES,
    BY_LAYER,
    PARTIAL_ROTARY,
    SHORT_CONVS,
    expert_fields,
    family_fields,
    latent_fields,
    layout_of,
    long_rope,
)
from octavo.gguf.gemma import gemma_fields
from octavo.gguf.header import GGUFFile, TensorInfo
from octavo.gguf.hybrids import NAMES as STATE_NAMES
from octavo.gguf.hybrids import hybrid_fields
from octavo.gguf.pooling import answer_words
from octavo.interface.config_checks import shown_value
from octavo.interface.model_config import check_config, config_class

_NAMES = {  # config.json's field -> metadata key
    "hidden_size": "{arch}.embedding_length",
    "intermediate_size": "{arch}.feed_forward_length",
    "num_hidden_layers": "{arch}.block_count",
    "num_attention_heads": "{arch}.attention.head_count",
    "num_key_value_heads": "{arch}.attention.head_count_kv",
    "head_dim": "{arch}.attention.key_length",
    "rms_norm_eps": "{arch}.attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "{arch}.context_length",
    "rope_theta": "{arch}.rope.freq_base",
    "sliding_window": "{arch}.attention.sliding_window",
    "rope_scaling.factor": "{arch}.rope.scaling.factor",
    "rope_scaling.original_max_position_embeddings": "{arch}.rope.scaling.original_context_length",
    "rope_scaling.beta_fast": "{arch}.rope.scaling.yarn_beta_fast",
    "rope_scaling.beta_slow": "{arch}.rope.scaling.yarn_beta_slow",
    "attn_logit_softcapping": "{arch}.attn_logit_softcapping",
    "final_logit_softcapping": "{arch}.final_logit_softcapping",
    "num_experts": "{arch}.expert_count",
    "num_experts_per_tok": "{arch}.expert_used_count",
    "moe_intermediate_size": "{arch}.expert_feed_forward_length",
    "moe_shared_expert_intermediate_size": "{arch}.expert_shared_feed_forward_length",
    "moe_latent_size": "{arch}.moe_latent_size",
    "rope_local_base_freq": "{arch}.rope.freq_base_swa",
    "kv_lora_rank": "{arch}.attention.kv_lora_rank",
    "q_lora_rank": "{arch}.attention.q_lora_rank",
    "v_head_dim": "{arch}.attention.value_length_mla",
    "n_group": "{arch}.expert_group_count",
    "topk_group": "{arch}.expert_group_used_count",
    "first_k_dense_replace": "{arch}.leading_dense_block_count",
    "n_shared_experts": "{arch}.expert_shared_count",
    "routed_scaling_factor": "{arch}.expert_weights_scale",
    "norm_topk_prob": "{arch}.expert_weights_norm",
    "num_kv_shared_layers": "{arch}.attention.shared_kv_layers",
    "global_head_dim": "{arch}.attention.key_length",
    "hidden_size_per_layer_input": "{arch}.embedding_length_per_layer_input",
    "altup_num_inputs": "{arch}.altup.num_inputs",
    "altup_active_idx": "{arch}.altup.active_idx",
    "shared_expert_intermediate_size": "{arch}.expert_shared_feed_forward_length",
    "full_attention_interval": "{arch}.full_attention_interval",
    "layer_types": "{arch}.attention.recurrent_layers",
    **{field: f"{{arch}}.{key}" for field, key in STATE_NAMES.items()},
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "vocab_size": "rows of token_embd.weight",
}
_REQUIRED = object()
# Layers of the models whose scores are scaled by the hidden size of a head, not by the size of a head.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
_SPECIAL = ("bos", "eos", "eot", "eom")  # tokens that a text begins or ends with
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SAMPLING = {  # general.sampling.* -> generation_config.json
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """config.json. Raises ModelError when the architecture is not supported or a key is missing."""
    arch = file.architecture
    if arch in ENCODERS:
        return _encoder(file)
    _check_supported(file)
    model_type, class_name = ARCHITECTURES[arch]
    heads = _stated(file, "ssm.time_step_rank" if arch == "mamba2" else "attention.head_count")
    tables = _tables(file)
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": _stated(file, "embedding_length"),
        "intermediate_size": _stated(file, "feed_forward_length", *([None] if arch == "qwen35moe" else [])),
        "num_hidden_layers": _stated(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _stated(file, "attention.head_count_kv", heads),
        "head_dim": _stated(file, "attention.key_length", None),
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(_stated(file, "attention.layer_norm_rms_epsilon", 1e-6)),
        "max_position_embeddings": _stated(file, "context_length"),
        "rope_theta": _shortest(_stated(file, "rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file),
        "vocab_size": (tables[0].shape or (0,))[0],
        "tie_word_embeddings": len(tables) < 2,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "bos_token_id": _token(file, "bos"),
        "eos_token_id": _eos(file),
    }
    if window := _stated(file, "attention.sliding_window", 0):
        config["sliding_window"] = window
        config["use_sliding_window"] = True
    if arch.startswith("gemma"):
        config |= _gemma(file, heads) | ({"use_bidirectional_attention": True} if arch == "gemma-embedding" else {})
    config |= family_fields(file) | expert_fields(file) | (latent := latent_fields(file))
    config |= hybrid_fields(file)
    config |= gemma_fields(file, config["num_hidden_layers"])
    config = check_config(config, str(file.path), lambda field: _NAMES.get(field, field).format(arch=arch))
    _check_vocabulary(file, config["vocab_size"])
    head_dim = config.setdefault("head_dim", config["hidden_size"] // heads)
    head_dim = config.get("global_head_dim", head_dim)  # the header states the larger one
    if not latent and (size := _stated(file, "attention.value_length", head_dim)) != head_dim:
        raise ModelError(
            f"{file.path}: {arch}.attention.value_length must be the size of a head ({head_dim}), as {arch} models "
            f"have it, got {shown_value(size)}; the file is damaged or converted wrongly"
        )
    rotary, layout = _stated(file, "rope.dimension_count", head_dim), layout_of(file)
    if layout in PARTIAL_ROTARY and type(rotary) is int and 0 < rotary <= head_dim:
        factor = min(1.0, (rotary + 0.5) / head_dim)  # whose product is cut to an integer
        config["partial_rotary_factor"] = factor
        if layout == "bamba":  # whose config.json says it there alone
            config["rope_parameters"] = {"rope_theta": config["rope_theta"], "partial_rotary_factor": factor}
    elif rotary != head_dim and config_class(class_name).is_rotary:
        raise ModelError(
            f"{file.path}: {arch}.rope.dimension_count must be the size of a head ({head_dim}), as {arch} models have "
            f"it, got {shown_value(rotary)}; the file is damaged or converted wrongly"
        )
    if config.get("rope_scaling") is None and arch != "gemma4":
        config["rope_scaling"] = long_rope(file) or _from_frequency_factors(file, head_dim)
    if words := answer_words(file):
        config["classifier_from_token"] = words
    return config | _stored_as(file)


def _encoder(file: GGUFFile) -> dict[str, Any]:
    """config.json of a model that reads whole texts."""
    names = {
        **_NAMES,
        "layer_norm_eps": "{arch}.attention.layer_norm_epsilon",
        "local_attention": "{arch}.attention.sliding_window",
        "type_vocab_size": "rows of token_types.weight",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
    }
    found = encoder_config(file, _stated)
    config = check_config(found, str(file.path), lambda field: names.get(field, field).format(arch=file.architecture))
    _check_vocabulary(file, config["vocab_size"])
    return config | _stored_as(file)


def _stored_as(file: GGUFFile) -> dict[str, Any]:
    stored = _FLOATS.get(_tables(file)[0].qtype)
    return {"dtype": stored} if stored else {}


def _gemma(file: GGUFFile, heads: int) -> dict[str, Any]:
    """Fields of Gemma's families; the others have their defaults."""
    size = _stated(file, "attention.key_length", 256)
    if _stated(file, "block_count") == _SCALED_BY_WIDTH.get(file.architecture):
        size = _stated(file, "embedding_length") / heads
    found: dict[str, Any] = {
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": size,
        "final_logit_softcapping": _stated(file, "final_logit_softcapping", None),
        "attn_logit_softcapping": _stated(file, "attn_logit_softcapping", None),
        "rope_local_base_freq": _stated(file, "rope.freq_base_swa", None),
    }
    return {key: _shortest(value) for key, value in found.items() if value is not None}


def _check_supported(file: GGUFFile) -> None:
    arch = file.architecture
    if arch not in ARCHITECTURES:
        known = ", ".join([*ARCHITECTURES, *ENCODERS])
        raise ModelError(f"{file.path}: GGUF architecture {arch!r} is not supported; supported are {known}")
    if file.metadata.get(f"{arch}.attention.causal", True) is False and arch != "gemma-embedding":
        raise ModelError(f"{file.path}: {arch}.attention.causal is false: {arch} is built for causal attention alone")
    norm = "token_embd_norm.weight" if arch in SHORT_CONVS else "output_norm.weight"
    for name in ("token_embd.weight", norm):
        if name not in file.tensors and not (name == "token_embd.weight" and _tables(file)):
            raise ModelError(f"{file.path}: tensor {name!r} is missing; the file is damaged or one part of several")


def _tables(file: GGUFFile) -> list[TensorInfo]:
    """The table of tokens, and the head where it is another; a file with the head alone means it for both."""
    return [file.tensors[name] for name in ("token_embd.weight", "output.weight") if name in file.tensors]


def _check_vocabulary(file: GGUFFile, rows: int) -> None:
    """Raises ModelError where the header has other tokens than the table of tokens, of ``rows`` rows. Rows without a
    token are common."""
    stated = file.metadata.get(key := f"{file.architecture}.vocab_size", rows)
    tokens = file.metadata.get("tokenizer.ggml.tokens") or ()
    problem = None
    if stated != rows:
        problem = f"{key} is {shown_value(stated)}"
    elif len(tokens) > rows:
        problem = f"its vocabulary (tokenizer.ggml.tokens) has {len(tokens)} tokens"
    for name in _SPECIAL:
        ids = _token(file, name)
        for token in ids if isinstance(ids, list) else [ids]:
            if token is not None and not (type(token) is int and 0 <= token < rows):
                problem = problem or f"tokenizer.ggml.{name}_token_id is {shown_value(token)}"
    if problem:
        raise ModelError(
            f"{file.path}: tensor 'token_embd.weight' has {rows} rows, but {problem}; the header and the tensors are "
            "not of one model: fetch the file again, or convert it anew"
        )


def _stated(file: GGUFFile, key: str, default: Any = _REQUIRED) -> Any:
    """The architecture's value of ``key``, one number for all layers. Raises ModelError."""
    name = f"{file.architecture}.{key}"
    if name not in file.metadata:
        if default is not _REQUIRED:
            return default
        raise ModelError(f"{file.path}: the header has no {name}; the file is damaged or converted wrongly")
    value = file.metadata[name]
    if isinstance(value, np.ndarray):  # one number a layer
        if len(set(value.tolist())) != 1 and key not in BY_LAYER.get(file.architecture, ()):
            raise ModelError(f"{file.path}: {name} differs from layer to layer, which is not supported")
        value = value[0].item()
    return value


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """generation_config.json: special tokens and the recommended sampling parameters."""
    config: dict[str, Any] = {"bos_token_id": _token(file, "bos"), "eos_token_id": _eos(file)}
    for key, name in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if value is not None:
            config[name] = _shortest(value) if isinstance(value, float) else value
    return {key: value for key, value in config.items() if value is not None}


def _token(file: GGUFFile, name: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value.tolist() if isinstance(value, np.ndarray) else value


def _eos(file: GGUFFile) -> int | list[int] | None:
    """Return the ids that end generation: end of text and, if the model has one, end of turn. gpt-oss continues after
    the end of a message."""
    names = ("eos",) if file.architecture == "gpt-oss" else ("eos", "eot", "eom")
    ids = [i for i in (_token(file, name) for name in names) if i is not None]
    unique = [token for at, token in enumerate(ids) if token not in ids[:at]]
    return unique if len(unique) > 1 else unique[0] if unique else None


def _shortest(value: Any) -> Any:
    """Shorten a float32 read as a float64: 1e-05 for 9.999999747378752e-06. Other numbers stay as they are."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope_scaling(file: GGUFFile) -> dict[str, Any] | None:
    arch = file.architecture
    found = {key: file.metadata[key] for key in file.metadata if key.startswith(f"{arch}.rope.")}
    meta = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in found.items()}
    prefix = f"{arch}.rope.scaling."
    original = meta.get(prefix + "original_context_length")
    if "rope_freqs.weight" in file.tensors or "rope_factors_long.weight" in file.tensors:
        return None  # these factors are all of it
    kind = meta.get(prefix + "type", "none")
    factor = meta.get(prefix + "factor") or meta.get(f"{arch}.rope.scale_linear")
    if kind == "none" and not factor:
        return None
    factor = _shortest(factor or 1.0)
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind != "yarn":
        raise ModelError(f"{file.path}: rope scaling of type {kind!r} is not supported; none, linear and yarn are")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if arch == "gpt-oss":
        scaling["truncate"] = False
    if log_multiplier := meta.get(prefix + "yarn_log_multiplier"):  # stored as 0.1 times the weight of a logarithm
        scaling["mscale"] = scaling["mscale_all_dim"] = _shortest(10 * log_multiplier)
    if original:
        scaling["original_max_position_embeddings"] = original
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if meta.get(prefix + key) is not None:
            scaling[name] = _shortest(meta[prefix + key])
    return scaling


def _from_frequency_factors(file: GGUFFile, head_dim: int) -> dict[str, Any] | None:
    """Llama 3's scaling is stored as the finished divisor of each frequency: find the parameters that give them."""
    info = file.tensors.get("rope_freqs.weight")
    if info is None:
        return None
    if info.qtype != "F32" or info.shape != (head_dim // 2,):
        raise ModelError(
            f"{file.path}: rope_freqs.weight is {info.qtype} {list(info.shape)}, expected F32 [{head_dim // 2}]; "
            "the file is damaged: fetch it again"
        )
    factors = file.raw(info).reshape(-1).view("<f4").astype(np.float64)
    base = float(file.metadata.get(f"{file.architecture}.rope.freq_base", 10000.0))
    wavelength = 2 * np.pi * base ** (np.arange(0, 2 * len(factors), 2) / (2 * len(factors)))
    for original in (8192, 4096, 2048, 16384, 32768):
        candidate: dict[str, Any] = {
            "rope_type": "llama3",
            "factor": _shortest(factors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        smooth = np.clip((original / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        if np.allclose(1 / ((1 - smooth) / candidate["factor"] + smooth), factors, rtol=1e-3):
            return candidate
    raise ModelError(f"{file.path}: its rope_freqs.weight is not Llama 3's rope scaling, which is the one supported")
