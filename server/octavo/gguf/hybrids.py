"""Fields of config.json of hybrid models' recurrent layers, out of a GGUF header."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.gguf.families import HYBRIDS, layers_of
from octavo.gguf.header import GGUFFile
from octavo.interface.config_checks import shown_value

# config.json's field -> metadata key without the architecture.
NAMES = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}


def hybrid_fields(file: GGUFFile) -> dict[str, Any]:
    """Fields of config.json of gated delta nets, and which layers have them; none of other architectures. Raises
    ModelError."""
    arch, metadata = file.architecture, file.metadata
    if arch not in HYBRIDS:
        return {}
    for key in (*NAMES.values(), "ssm.inner_size"):
        if f"{arch}.{key}" not in metadata:
            raise ModelError(f"{file.path}: the header has no {arch}.{key}; the file is damaged or converted wrongly")
    fields = {field: metadata[f"{arch}.{key}"] for field, key in NAMES.items()}
    size, heads = fields["linear_key_head_dim"], fields["linear_num_value_heads"]
    inner = metadata[f"{arch}.ssm.inner_size"]
    if type(size) is not int or type(heads) is not int or inner != size * heads:
        raise ModelError(
            f"{file.path}: {arch}.ssm.inner_size ({shown_value(inner)}) must be {arch}.ssm.time_step_rank "
            f"({shown_value(heads)}) heads of {arch}.ssm.state_size ({shown_value(size)}); the file is damaged or "
            "converted wrongly"
        )
    fields["linear_value_head_dim"] = size
    fields["num_hidden_layers"] = layers = layers_of(file)
    fields["attention_bias"] = any(name.endswith(".attn_q.bias") for name in file.tensors)
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
