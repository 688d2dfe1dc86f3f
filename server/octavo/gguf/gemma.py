"""Read the layers of Gemma 3n and Gemma 4 from GGUF headers."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.gguf.header import GGUFFile

_DAMAGED = "the file is damaged or converted wrongly"


def gemma_fields(file: GGUFFile, layers: Any) -> dict[str, Any]:
    """Fields of config.json of Gemma 3n and 4, which share keys and values and have embeddings of each layer; none of
    other files. Raises ModelError where the header and the tensors disagree."""
    arch, meta = file.architecture, file.metadata
    if arch not in ("gemma3n", "gemma4") or type(layers) is not int or layers < 1:
        return {}
    found = {"hidden_size_per_layer_input": meta.get(key := f"{arch}.embedding_length_per_layer_input", 0)}
    if table := file.tensors.get("per_layer_token_embd.weight"):
        rows, width = table.shape if len(table.shape) == 2 else (0, 0)
        found["vocab_size_per_layer_input"] = rows
        if width != found["hidden_size_per_layer_input"] * layers:
            raise _error(
                file,
                key,
                f"is {found['hidden_size_per_layer_input']}, but {table.name} has {width} columns for {layers} layers",
            )
    pattern = meta.get(f"{arch}.attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        types = np.where(_by_layer(file, "attention.sliding_window_pattern", layers), "sliding", "full")
        found["layer_types"] = [f"{kind}_attention" for kind in types.tolist()]
    elif pattern is not None:
        found["sliding_window_pattern"] = pattern
    found["num_kv_shared_layers"] = meta.get(f"{arch}.attention.shared_kv_layers", max(0, layers - 20))
    return found | (_gemma_3n(file, layers) if arch == "gemma3n" else _gemma_4(file, layers, found))


def _gemma_3n(file: GGUFFile, layers: int) -> dict[str, Any]:
    keys = {"altup_num_inputs": "altup.num_inputs", "altup_active_idx": "altup.active_idx"}
    found = {field: file.metadata.get(f"gemma3n.{key}") for field, key in keys.items()}
    if (low_rank := file.tensors.get("blk.0.laurel_l.weight")) and low_rank.shape:
        found["laurel_rank"] = low_rank.shape[0]
    if "gemma3n.activation_sparsity_scale" in file.metadata:  # deviations from the mean; less than any: all gates
        scales = _by_layer(file, "activation_sparsity_scale", layers).tolist()
        found["activation_sparsity_pattern"] = [round(NormalDist().cdf(scale), 6) for scale in scales]
    return {field: value for field, value in found.items() if value is not None}


def _gemma_4(file: GGUFFile, layers: int, common: dict[str, Any]) -> dict[str, Any]:
    meta, types = file.metadata, common.get("layer_types")
    if types is None:
        raise _error(
            file,
            "gemma4.attention.sliding_window_pattern",
            f"must say of each of {layers} layers whether it has a window",
        )
    size, shared = meta.get("gemma4.attention.key_length"), common["num_kv_shared_layers"]
    window_size = meta.get("gemma4.attention.key_length_swa", size)
    if meta.get("gemma4.attention.value_length_swa", window_size) != window_size:
        raise _error(file, "gemma4.attention.value_length_swa", f"must be key_length_swa ({window_size})")
    kv_heads = _by_layer(file, "attention.head_count_kv", layers)
    by_kind = {kind: {kv_heads[n].item() for n in range(layers) if types[n] == kind} for kind in set(types)}
    if any(len(numbers) > 1 for numbers in by_kind.values()):
        raise _error(file, "gemma4.attention.head_count_kv", "must be the same for all layers of one type")
    heads = {kind: numbers.pop() for kind, numbers in by_kind.items()}
    full, window = heads.get("full_attention"), heads.get("sliding_attention", heads.get("full_attention"))
    own = layers - shared if type(shared) is int and 0 <= shared < layers else layers
    # Layers that keep no keys of their own need none in the file.
    both = {f"blk.{n}.attn_v.weight" not in file.tensors for n in range(own) if types[n] == "full_attention"}
    if both == {True, False}:
        raise ModelError(f"{file.path}: attn_v is missing in some layers without a window, not in all; {_DAMAGED}")
    found = {
        "head_dim": window_size,
        "global_head_dim": size,
        "num_key_value_heads": window,
        "num_global_key_value_heads": full,
        "attention_k_eq_v": True in both,
        "use_double_wide_mlp": _is_double_wide(file, layers, own),
    }
    if full != window and True not in both:
        raise _error(file, "gemma4.attention.head_count_kv", "must be one number where attn_v is in all layers")
    bases = {"full_attention": ("freq_base", 1e6), "sliding_attention": ("freq_base_swa", 1e4)}
    ropes: dict[str, Any] = {
        kind: {"rope_type": "default", "rope_theta": float(str(np.float32(meta.get(f"gemma4.rope.{key}", base))))}
        for kind, (key, base) in bases.items()
    }
    ropes["full_attention"] |= {"rope_type": "proportional", "partial_rotary_factor": _turned_part(file, size)}
    return {**found, "rope_parameters": ropes}


def _by_layer(file: GGUFFile, key: str, layers: int) -> np.ndarray:
    """Return a number for each layer, from an array or from one number for all."""
    name = f"{file.architecture}.{key}"
    values = np.asarray(file.metadata.get(name, file.metadata.get(f"{file.architecture}.attention.head_count", 0)))
    if values.ndim and len(values) != layers:
        raise _error(file, name, f"has {len(values)} entries for {layers} layers")
    return values if values.ndim else np.full(layers, values)


def _is_double_wide(file: GGUFFile, layers: int, own: int) -> bool:
    """Return whether the MLPs of layers without keys of their own are twice as wide as the others."""
    widths = _by_layer(file, "feed_forward_length", layers).tolist()
    first, others = widths[0], set(widths[own:])
    if set(widths[:own]) != {first} or not (others <= {first} or others == {2 * first}):
        raise _error(
            file,
            "gemma4.feed_forward_length",
            "may differ between layers with keys of their own and without alone, and be twice as much there",
        )
    return others == {2 * first}


def _turned_part(file: GGUFFile, size: Any) -> float:
    """The part of a head that is turned in layers without a window: frequencies of others are divided by a number
    beyond measure."""
    info = file.tensors.get("rope_freqs.weight")
    if info is None or type(size) is not int:
        return 1.0
    if info.qtype != "F32" or info.shape != (size // 2,):
        raise ModelError(
            f"{file.path}: rope_freqs.weight is {info.qtype} {list(info.shape)}, expected F32 [{size // 2}]; the file "
            "is damaged: fetch it again"
        )
    divisors = file.raw(info).reshape(-1).view("<f4")
    turned = int((divisors == 1.0).sum())
    if not ((divisors[:turned] == 1.0).all() and (divisors[turned:] > 1e20).all()):
        raise ModelError(f"{file.path}: rope_freqs.weight must be 1 and then without measure, as gemma4 has it")
    return (2 * turned + 0.5) / size if 2 * turned < size else 1.0  # a product that is cut to an integer


def _error(file: GGUFFile, key: str, problem: str) -> ModelError:
    return ModelError(f"{file.path}: {key} {problem}; {_DAMAGED}")
