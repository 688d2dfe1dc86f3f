"""Choose a model's quantisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from octavo.errors import ConfigError, ModelError
from octavo.interface.config_checks import Fields
from octavo.interface.engine_config import ModelConfig
from octavo.interface.quantizations import ALIASES, GPU_ONLINE, ONLINE, PER_CHANNEL, PER_GROUP, STORED
from octavo.layers.quantization.awq import AWQ
from octavo.layers.quantization.base import ExpertsBase, LinearBase, LinearMethod, MoEMethod, QuantizationConfig
from octavo.layers.quantization.bitsandbytes import BitsAndBytes
from octavo.layers.quantization.checkpoint import CheckpointConfig
from octavo.layers.quantization.compressed_tensors import CompressedTensors
from octavo.layers.quantization.dense import (
    FLOAT_TYPES,
    DenseConfig,
    DenseLinearMethod,
    WeightTypes,
    has_dense_kernels,
    has_kernels,
)
from octavo.layers.quantization.fp4 import MXFP4
from octavo.layers.quantization.fp8 import FBGEMM, FP8
from octavo.layers.quantization.gptq import GPTQ
from octavo.layers.quantization.int8 import Int8Config
from octavo.layers.quantization.modelopt import ModelOpt
from octavo.layers.quantization.online import OnlineConfig
from octavo.layers.quantization.unquantized import UnquantizedConfig, UnquantizedLinearMethod
from octavo.layers.quantization.weight_format import CheckpointFormat, StoredModule


class AsStoredConfig(QuantizationConfig):
    """Codes where all of a layer's tensors are quantised; values, where one of them is not, as its 16 or 32 bits were
    wanted."""

    name = "gguf"

    def __init__(self, values: DenseConfig | UnquantizedConfig) -> None:
        self._codes, self._values = Int8Config(), values

    def linear_method(self, name: str, layer: LinearBase) -> LinearMethod:
        """See `QuantizationConfig`."""
        plain = any(qtype in FLOAT_TYPES for qtype in layer.stored_types)
        return (self._values if plain else self._codes).linear_method(name, layer)

    def moe_method(self, name: str, layer: ExpertsBase) -> MoEMethod:
        """See `QuantizationConfig`."""
        plain = any(qtype in FLOAT_TYPES for types in layer.stored_types for qtype in types.values())
        return (self._values if plain else self._codes).moe_method(name, layer)


# By quant_method of the description.
_FORMATS: dict[str, Callable[[Fields], CheckpointFormat]] = {
    "awq": AWQ,
    "gptq": GPTQ,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
    "fbgemm_fp8": FBGEMM,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
    "mxfp4": MXFP4,
    "bitsandbytes": BitsAndBytes,
}


def quantization_config(
    config: ModelConfig,
    device: torch.device | str = "cpu",
    modules: Mapping[str, StoredModule] | None = None,
    parts: Mapping[str, Sequence[str]] | None = None,
) -> QuantizationConfig:
    """The quantisation asked for, or else the one the checkpoint was saved with: codes of GGUF files on a CPU that has
    the C kernels (plain torch would be slower with them than without).

    ``modules`` are those of the checkpoint by the names that they have here, ``parts`` names those of merged layers.
    Raises ConfigError for a name that is not known or that the checkpoint contradicts, ModelError for a checkpoint
    whose quantisation is not known.
    """
    asked = ALIASES.get(config.quantization or "", config.quantization)
    if asked is not None and asked not in (*ONLINE, *STORED):
        raise ConfigError(f"quantization must be one of {', '.join((*ONLINE, *STORED))}, got {asked!r}")
    on_cpu = torch.device(device).type == "cpu"
    stored = stored_format(config)
    if stored is None and not on_cpu and asked in GPU_ONLINE and config.files.format != "gguf":
        return OnlineConfig("fp8" if asked == "fp8" else "int8", torch.device(device))
    if asked == "fp8" and stored is None and config.files.format != "gguf":
        raise ConfigError(
            f"quantization fp8 rounds plain weights to FP8 on GPUs alone, and {config.model} is not quantised; use "
            "int8, which takes as much memory on this device, or leave --quantization out"
        )
    if asked == PER_GROUP and not on_cpu:
        raise ConfigError(f"quantization {asked} is for CPUs; use int8, or leave --quantization out")
    if asked in STORED or (asked in ("int8", PER_GROUP) and stored is not None):
        found = stored.name if stored is not None else None
        _check_agreement(config, asked, "gguf" if config.files.format == "gguf" else found)
    if asked == PER_CHANNEL and (stored is not None or config.files.format == "gguf"):
        raise ConfigError(f"quantization {asked} is for plain weights, and {config.model} is quantised: leave it out")
    if asked == "int8" and not on_cpu:
        raise ConfigError("quantization int8 is for plain weights on this device, not for GGUF files; leave it out")
    packed = on_cpu and asked != "none" and has_kernels()
    dense = has_dense_kernels(device, getattr(torch, config.dtype))
    values = DenseConfig(WeightTypes.of(config)) if dense else UnquantizedConfig()
    if stored is not None:
        return CheckpointConfig(stored, modules or {}, parts or {}, packed, values, not on_cpu and asked != "none")
    if asked in ("int8", PER_CHANNEL, PER_GROUP):
        return Int8Config(per_channel=asked == PER_CHANNEL)
    return AsStoredConfig(values) if packed and config.files.format == "gguf" else values


def exact_method(config: ModelConfig, device: torch.device | str = "cpu") -> LinearMethod:
    """The method of an `ExactLinear`."""
    if has_dense_kernels(device, getattr(torch, config.dtype)):
        return DenseLinearMethod(WeightTypes(torch.float32, False), torch.float32)
    return UnquantizedLinearMethod()


def stored_format(config: ModelConfig) -> CheckpointFormat | None:
    """Return the checkpoint's own quantisation; None if it states none. Raises ModelError."""
    table = config.hf_config.get("quantization_config")
    if not table:
        return None
    method = table.get("quant_method")
    if method not in _FORMATS:
        raise ModelError(
            f"{config.model}: the checkpoint is quantised with {method!r}, which is not supported (known: "
            f"{', '.join(_FORMATS)}); use the model's unquantised or GGUF weights"
        )
    return _FORMATS[method](Fields(config.hf_config, config.model, str).inner("quantization_config", table))


def _check_agreement(config: ModelConfig, asked: str | None, stored: str | None) -> None:
    if asked != stored:
        said = "is not quantised" if stored is None else f"is stored as {stored}"
        raise ConfigError(f"quantization {asked} was asked for, but {config.model} {said}; leave --quantization out")
