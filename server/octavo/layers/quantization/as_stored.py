"""GGUF files on a CPU: every tensor in the bits that it is stored in."""

from __future__ import annotations

from octavo.layers.quantization.base import ExpertsBase, LinearBase, LinearMethod, MoEMethod, QuantizationConfig
from octavo.layers.quantization.dense import FLOAT_TYPES, DenseConfig
from octavo.layers.quantization.int8 import Int8Config
from octavo.layers.quantization.unquantized import UnquantizedConfig


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
