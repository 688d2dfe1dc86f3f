"""Fields of config.json of hybrid models' recurrent layers, out of a GGUF header."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.gguf.families import HYBRIDS, SHORT_CONVS, SINGLE_MIXERS, STATE_SPACES, layers_of, layout_of
from octavo.gguf.header import GGUFFile
from octavo.interface.config_checks import shown_value

# config.json's field -> metadata key without the architecture.
NAMES = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "conv_L_cache": "shortconv.l_cache",
    "num_dense_layers": "leading_dense_block_count",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_head": "ssm.inner_size",
}
_GATED_DELTA_NETS = [field for field in NAMES if field.startswith("linear")]
_STATE_SPACES = [field for field in NAMES if field.startswith("mamba")]


def hybrid_fields(file: GGUFFile) -> dict[str, Any]:
    """Fields of config.json of recurrent layers, and which layers these are; none of other architectures. Raises
    ModelError."""
    if file.architecture in SHORT_CONVS:
        return _short_conv_fields(file)
    if file.architecture in STATE_SPACES:
        return _state_space_fields(file)
    return _gated_delta_fields(file) if file.architecture in HYBRIDS else {}


def _stated(file: GGUFFile, *keys: str) -> list[Any]:
    arch = file.architecture
    for key in keys:
        if f"{arch}.{key}" not in file.metadata:
            raise ModelError(f"{file.path}: the header has no {arch}.{key}; the file is damaged or converted wrongly")
    return [file.metadata[f"{arch}.{key}"] for key in keys]


def _by_heads(file: GGUFFile, recurrent: str) -> dict[str, Any]:
    """Return the kinds of layers: ``recurrent`` ones have no heads of keys."""
    arch, layers = file.architecture, file.metadata.get(f"{file.architecture}.block_count")
    (heads,) = _stated(file, "attention.head_count_kv")
    counts = set(heads.tolist()) - {0} if isinstance(heads, np.ndarray) else set()
    if len(counts) > 1 or (isinstance(heads, np.ndarray) and type(layers) is int and len(heads) != layers):
        raise ModelError(
            f"{file.path}: {arch}.attention.head_count_kv must have an entry for each of {shown_value(layers)} layers, "
            "0 or the number that all others have; the file is damaged or converted wrongly"
        )
    if not isinstance(heads, np.ndarray):
        return {}
    kinds = ["full_attention" if count else recurrent for count in heads.tolist()[: layers_of(file)]]
    return {"layer_types": kinds, "num_key_value_heads": next(iter(counts), 1)}


def _state_space_fields(file: GGUFFile) -> dict[str, Any]:
    arch, metadata = file.architecture, file.metadata
    fields = dict(zip(_STATE_SPACES, _stated(file, *(NAMES[field] for field in _STATE_SPACES)), strict=True))
    inner, heads = fields["mamba_d_head"], fields["mamba_n_heads"]
    if any(type(size) is not int or size < 1 for size in (inner, heads)) or inner % heads:
        raise ModelError(
            f"{file.path}: {arch}.ssm.inner_size ({shown_value(inner)}) must be a multiple of "
            f"{arch}.ssm.time_step_rank ({shown_value(heads)}); the file is damaged or converted wrongly"
        )
    fields["mamba_d_head"] = inner // heads
    fields["mamba_conv_bias"] = any(name.endswith(".ssm_conv1d.bias") for name in file.tensors)
    fields["mamba_proj_bias"] = any(name.endswith(".ssm_in.bias") for name in file.tensors)
    if arch == "falcon-h1":
        return fields | _side_by_side_fields(file, inner)
    if arch != "mamba2":
        fields |= _by_heads(file, "mamba")
    if arch in SINGLE_MIXERS:
        return fields | _single_mixer_fields(file, fields.get("layer_types", []))
    hidden = metadata.get(f"{arch}.embedding_length")
    fields["mamba_expand"] = inner // hidden if type(hidden) is int and hidden > 0 else 1
    if layout_of(file) == "bamba":
        kinds = fields.get("layer_types", [])
        return fields | {"attn_layer_indices": [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]}
    turns = metadata.get(f"{arch}.rope.scaling.finetuned", False)
    fields["position_embedding_type"] = "rope" if turns else "nope"
    if not metadata.get(f"{arch}.expert_count"):
        shared = metadata.get(f"{arch}.expert_shared_feed_forward_length")
        fields["shared_intermediate_size"] = shared or metadata.get(f"{arch}.feed_forward_length")
        fields |= {"num_experts": 0, "num_experts_per_tok": 0}
    return fields


def _side_by_side_fields(file: GGUFFile, inner: int) -> dict[str, Any]:
    """Falcon-H1's own: multipliers are in the weights, and gates come before the norm where there is one."""
    return {
        "mamba_d_ssm": inner,
        "mamba_rms_norm": any(name.endswith(".ssm_norm.weight") for name in file.tensors),
        "mamba_norm_before_gate": False,
        "projectors_bias": any(name.endswith(".ssm_out.bias") for name in file.tensors),
    }


def _single_mixer_fields(file: GGUFFile, kinds: list[str]) -> dict[str, Any]:
    """Tell MLPs and experts from recurrent layers, none of which has heads of keys."""
    (widths,) = _stated(file, "feed_forward_length")
    stated = widths.tolist()[: layers_of(file)] if isinstance(widths, np.ndarray) else []
    wide = "moe" if file.architecture == "nemotron_h_moe" else "mlp"
    if len(stated) != len(kinds) or len(set(stated) - {0}) > 1:
        raise ModelError(
            f"{file.path}: {file.architecture}.feed_forward_length must have an entry for each of {len(kinds)} layers, "
            "0 or the number that all others have; the file is damaged or converted wrongly"
        )
    return {
        "num_hidden_layers": layers_of(file),
        "layer_types": [wide if width else kind for width, kind in zip(stated, kinds, strict=True)],
        "intermediate_size": max(stated) or 1,
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in file.tensors),
        "hidden_act": "relu2",
    }


def _short_conv_fields(file: GGUFFile) -> dict[str, Any]:
    arch = file.architecture
    (taps,) = _stated(file, "shortconv.l_cache")
    fields = {
        "conv_L_cache": taps,
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in file.tensors),
        "block_auto_adjust_ff_dim": False,
        **_by_heads(file, "conv"),
    }
    if arch == "lfm2moe":
        fields["num_dense_layers"] = file.metadata.get(f"{arch}.leading_dense_block_count", 0)
        fields["use_expert_bias"] = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    return fields


def _gated_delta_fields(file: GGUFFile) -> dict[str, Any]:
    arch, metadata = file.architecture, file.metadata
    *found, inner = _stated(file, *(NAMES[field] for field in _GATED_DELTA_NETS), "ssm.inner_size")
    fields = dict(zip(_GATED_DELTA_NETS, found, strict=True))
    size, heads = fields["linear_key_head_dim"], fields["linear_num_value_heads"]
    if type(size) is not int or type(heads) is not int or inner != size * heads:
        raise ModelError(
            f"{file.path}: {arch}.ssm.inner_size ({shown_value(inner)}) must be {arch}.ssm.time_step_rank "
            f"({shown_value(heads)}) heads of {arch}.ssm.state_size ({shown_value(size)}); the file is damaged or "
            "converted wrongly"
        )
    fields["linear_value_head_dim"] = size
    fields["num_hidden_layers"] = layers = layers_of(file)
    fields["attention_bias"] = any(name.endswith(".attn_q.bias") for name in file.tensors)
    if further := metadata.get(f"{arch}.nextn_predict_layers"):
        fields["mtp_num_hidden_layers"] = further
    kinds = metadata.get(f"{arch}.attention.recurrent_layers")
    if kinds is None:
        interval = metadata.get(f"{arch}.full_attention_interval")
        return fields if interval is None else {**fields, "full_attention_interval": interval}
    if not isinstance(kinds, np.ndarray) or type(layers) is not int or len(kinds) < layers:
        raise ModelError(
            f"{file.path}: {arch}.attention.recurrent_layers must have an entry for each of {shown_value(layers)} "
            "layers; the file is damaged or converted wrongly"
        )
    named = ["linear_attention" if kind else "full_attention" for kind in kinds.tolist()[:layers]]
    return {**fields, "layer_types": named}
