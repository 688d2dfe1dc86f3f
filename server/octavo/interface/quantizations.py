"""The names that ``--quantization`` takes; no torch, as flags are read before it is imported."""

from collections.abc import Mapping
from typing import Any

# Formats to which plain weights can be converted while they are loaded; none: whatever is stored as values.
# int8 is the first on CPUs with matrix units, elsewhere the second (see `octavo.memory.plan.with_int8_kind`).
PER_CHANNEL = "int8_per_channel"  # one scale a channel and a token, as W8A8 has
PER_GROUP = "int8_per_group"  # one scale for 32 columns of a channel or a token: finer, for CPUs
ONLINE = ("none", "int8", PER_CHANNEL, PER_GROUP)
GPU_ONLINE = ("int8", PER_CHANNEL, "fp8")  # with activations of 8 bits, too
# Formats of checkpoints, by vLLM's names: they state what the files are found to be anyway.
STORED = (
    "awq",
    "gptq",
    "compressed-tensors",
    "fp8",
    "fbgemm_fp8",
    "modelopt",
    "modelopt_fp4",
    "mxfp4",
    "bitsandbytes",
    "gguf",
)
# Names that choose one of vLLM's kernels for a format.
ALIASES = {"awq_marlin": "awq", "gptq_marlin": "gptq"}
QUANTIZATIONS = (*ONLINE, *STORED, *ALIASES)


def has_int8_rows(table: Mapping[str, Any]) -> bool:
    """True for a checkpoint's ``quantization_config`` in which all weights are int8 with one scale a row (W8A8).
    Mistakes in it are found when the format is read."""
    groups = table.get("config_groups")
    if table.get("quant_method") != "compressed-tensors" or not isinstance(groups, Mapping) or not groups:
        return False
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()]
    return all(
        isinstance(one, Mapping)
        and (one.get("num_bits"), one.get("type"), one.get("symmetric")) == (8, "int", True)
        and one.get("strategy") in ("channel", "tensor")
        for one in weights
    )
