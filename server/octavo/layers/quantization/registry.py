"""Which quantisation a model runs with."""

from __future__ import annotations

from collections.abc import Callable

from octavo.config import ModelConfig
from octavo.errors import ConfigError, ModelError
from octavo.layers.quantization.base import QuantizationConfig
from octavo.layers.quantization.unquantized import UnquantizedConfig

_KNOWN: dict[str, Callable[[ModelConfig], QuantizationConfig]] = {"none": lambda config: UnquantizedConfig()}


def quantization_config(config: ModelConfig) -> QuantizationConfig:
    """The quantisation asked for, or else the one the checkpoint was saved with, or else none.

    Raises ConfigError for a name that is not known, ModelError for a checkpoint whose quantisation is not.
    """
    known = ", ".join(_KNOWN)
    stored = (config.hf_config.get("quantization_config") or {}).get("quant_method")
    if stored is not None and stored not in _KNOWN:
        raise ModelError(
            f"{config.model}: the checkpoint is quantised with {stored!r}, which is not supported (known: {known}); "
            "use the model's unquantised or GGUF weights"
        )
    name = config.quantization or stored or "none"
    if name not in _KNOWN:
        raise ConfigError(f"quantization must be one of {known}, got {name!r}")
    return _KNOWN[name](config)
