"""Which quantisation a model runs with."""

from __future__ import annotations

from collections.abc import Callable

import torch

import octavo_kernels
from octavo.errors import ConfigError, ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.layers.quantization.base import QuantizationConfig
from octavo.layers.quantization.int8 import Int8Config
from octavo.layers.quantization.unquantized import UnquantizedConfig

_KNOWN: dict[str, Callable[[ModelConfig], QuantizationConfig]] = {
    "none": lambda config: UnquantizedConfig(),
    "int8": lambda config: Int8Config(),
}


def quantization_config(config: ModelConfig, device: torch.device | str = "cpu") -> QuantizationConfig:
    """The quantisation asked for, or else the one the checkpoint was saved with: int8 for GGUF files on a CPU that
    has the C kernels (plain torch would be slower with it than without).

    Raises ConfigError for a name that is not known, ModelError for a checkpoint whose quantisation is not.
    """
    known = ", ".join(_KNOWN)
    stored = (config.hf_config.get("quantization_config") or {}).get("quant_method")
    if stored is not None and stored not in _KNOWN:
        raise ModelError(
            f"{config.model}: the checkpoint is quantised with {stored!r}, which is not supported (known: {known}); "
            "use the model's unquantised or GGUF weights"
        )
    on_cpu = torch.device(device).type == "cpu"
    packed = on_cpu and config.files.format == "gguf" and _has_kernels()
    name = config.quantization or stored or ("int8" if packed else "none")
    if name == "int8" and not on_cpu:
        raise ConfigError("quantization int8 is for CPUs; leave it out on this device")
    if name not in _KNOWN:
        raise ConfigError(f"quantization must be one of {known}, got {name!r}")
    return _KNOWN[name](config)


def _has_kernels() -> bool:
    from octavo_kernels import cpu

    return octavo_kernels.backend_name(torch.device("cpu")) == "cpu" and cpu.unavailable_reason() is None
