"""Storage and multiplication of a linear layer's weights: the one place where quantisation plugs in."""

from octavo.layers.quantization.base import LinearMethod, QuantizationConfig
from octavo.layers.quantization.registry import exact_method, quantization_config
from octavo.layers.quantization.unquantized import UnquantizedConfig, UnquantizedLinearMethod
