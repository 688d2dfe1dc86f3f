"""Plain weights that a GPU's 8 bits are made of while they are loaded."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from octavo.errors import ConfigError, ModelError
from octavo.layers.quantization.base import ExpertsBase, LinearBase, LinearMethod, MoEMethod, QuantizationConfig, Shard
from octavo.layers.quantization.gpu_weights import GPUWeightMethod
from octavo.layers.quantization.scaled_weight import TYPES, device_multiplies, quantized
from octavo.layers.quantization.stacked_experts import StackedMoEMethod
from octavo.layers.quantization.unquantized import UnquantizedLinearMethod
from octavo.layers.weights import WeightSlot, WeightSource


class OnlineMethod(GPUWeightMethod):
    """Plain weights, rounded to 8 bits with a scale a row as they are loaded; activations row by row as they come."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._kept = dtype

    def weight_slots(self, layer: LinearBase, part: int, shard: Shard) -> Iterator[WeightSlot]:
        """See `LinearMethod`."""
        nbytes = shard.num_rows * (shard.columns.stop - shard.columns.start + 4)

        def take(source: WeightSource) -> None:
            weight = source.load(self._dtype)[shard.rows, shard.columns].to(self._device)
            if bool((~weight.isfinite()).any()):
                raise ModelError(
                    f"tensor {source.name!r} holds NaN or infinite numbers; the file is damaged: fetch it again"
                )
            self._parts[part] = quantized(weight, self._kept)

        yield WeightSlot(part, "weight", shard.shape, take, lambda qtype: nbytes)
        yield from self.bias_slots(layer, part, shard)


class OnlineConfig(QuantizationConfig):
    """8 bits in all linear layers but the head, which is where rounding would be seen at once."""

    def __init__(self, name: str, device: torch.device) -> None:
        """Raises ConfigError where ``device`` does not multiply numbers of that type."""
        self.name, self._dtype = name, TYPES[name]
        if not device_multiplies(self._dtype, device):
            raise ConfigError("quantization fp8 needs a GPU of compute capability 8.9 or above; use int8 on this one")

    def moe_method(self, name: str, layer: ExpertsBase) -> MoEMethod:
        """See `QuantizationConfig`."""
        return StackedMoEMethod(self, name)

    def linear_method(self, name: str, layer: LinearBase) -> LinearMethod:
        """See `QuantizationConfig`."""
        return UnquantizedLinearMethod() if name.endswith("lm_head") else OnlineMethod(self._dtype)
