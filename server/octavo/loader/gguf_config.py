"""config.json and generation_config.json out of a GGUF header, in the words of Hugging Face."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.loader.gguf_reader import GGUFFile

# GGUF architecture -> (model_type, class name). Mistral and SmolLM files call themselves llama too.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
_SAMPLING = {  # general.sampling.* -> generation_config.json
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Raises ModelError when the architecture is not supported or a key is missing."""
    arch, meta = file.architecture, file.metadata
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: GGUF architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    if int(meta.get("split.count", 1)) > 1:
        raise ModelError(f"{file.path} is one part of {meta['split.count']}; join them with llama-gguf-split --merge")
    if meta.get(f"{arch}.expert_count"):
        raise ModelError(f"{file.path}: mixture-of-experts models are not supported as GGUF; use a dense model")

    def count(key: str, default: int | None = None) -> int:
        if f"{arch}.{key}" not in meta:
            if default is not None:
                return default
            raise ModelError(f"{file.path}: the header has no {arch}.{key}; the file is damaged or converted wrongly")
        value = meta[f"{arch}.{key}"]
        if isinstance(value, np.ndarray):  # one number a layer
            if len(set(value.tolist())) != 1:
                raise ModelError(f"{file.path}: {arch}.{key} differs from layer to layer, which is not supported")
            value = value[0]
        if int(value) < 1:
            raise ModelError(f"{file.path}: {arch}.{key} is {value}, expected at least 1; the file is damaged")
        return int(value)

    def real(key: str, default: float) -> float:
        return _shortest(meta.get(f"{arch}.{key}", default))

    for name in ("token_embd.weight", "output_norm.weight"):
        if name not in file.tensors:
            raise ModelError(f"{file.path}: tensor {name!r} is missing; the file is damaged or one part of several")
    model_type, class_name = ARCHITECTURES[arch]
    heads, hidden = count("attention.head_count"), count("embedding_length")
    head_dim = count("attention.key_length", hidden // heads)
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": real("attention.layer_norm_rms_epsilon", 1e-6),
        "max_position_embeddings": count("context_length"),
        "rope_theta": real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, head_dim),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "bos_token_id": _token(file, "bos"),
        "eos_token_id": _eos(file),
    }
    rotary = count("rope.dimension_count", head_dim)
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    if window := meta.get(f"{arch}.attention.sliding_window"):
        config["sliding_window"] = int(window)
        config["use_sliding_window"] = True
    stored = file.tensors["token_embd.weight"].qtype
    if stored in ("F32", "F16", "BF16"):
        config["dtype"] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[stored]
    return config


def generation_config(file: GGUFFile) -> dict[str, Any]:
    config: dict[str, Any] = {"bos_token_id": _token(file, "bos"), "eos_token_id": _eos(file)}
    for key, name in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if value is not None:
            config[name] = _shortest(value) if isinstance(value, float) else value
    return {key: value for key, value in config.items() if value is not None}


def _token(file: GGUFFile, name: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return None if value is None else int(value)


def _eos(file: GGUFFile) -> int | list[int] | None:
    """Where generation ends: end of text and, where the model has one, end of turn."""
    ids = [i for i in (_token(file, "eos"), _token(file, "eot"), _token(file, "eom")) if i is not None]
    unique = list(dict.fromkeys(ids))
    return unique if len(unique) > 1 else unique[0] if unique else None


def _shortest(value: float) -> float:
    """1e-05 for the float32 that reads 9.999999747378752e-06 as a float64."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GGUFFile, head_dim: int) -> dict[str, Any] | None:
    arch, meta = file.architecture, file.metadata
    prefix = f"{arch}.rope.scaling."
    original = meta.get(prefix + "original_context_length")
    if "rope_freqs.weight" in file.tensors:
        return _from_frequency_factors(file, head_dim)
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
    if original:
        scaling["original_max_position_embeddings"] = int(original)
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if meta.get(prefix + key) is not None:
            scaling[name] = _shortest(meta[prefix + key])
    return scaling


def _from_frequency_factors(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling is stored as the finished divisor of each frequency: find the parameters that give them."""
    info = file.tensors["rope_freqs.weight"]
    if info.qtype != "F32":
        raise ModelError(f"{file.path}: rope_freqs.weight is {info.qtype}, expected F32")
    factors = file.raw(info).reshape(-1).view("<f4").astype(np.float64)
    base = float(file.metadata.get(f"{file.architecture}.rope.freq_base", 10000.0))
    wavelength = 2 * np.pi * base ** (np.arange(0, 2 * len(factors), 2) / (2 * len(factors)))
    for original in (8192, 4096, 2048, 16384, 32768):
        candidate: dict[str, Any] = {
            "rope_type": "llama3", "factor": _shortest(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }  # fmt: skip
        smooth = np.clip((original / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        if np.allclose(1 / ((1 - smooth) / candidate["factor"] + smooth), factors, rtol=1e-3):
            return candidate
    raise ModelError(f"{file.path}: its rope_freqs.weight is not Llama 3's rope scaling, which is the one supported")
