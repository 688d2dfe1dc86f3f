"""Weights of 8 bits that GPUs multiply with activations of 8 bits (W8A8), from checkpoints that ask for it."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.layers.quantization.canonical import FloatCodes, GroupCodes, StoredWeight
from octavo_kernels import ScaledWeight, quantize_tokens
from octavo_kernels.scaled_weight import BLOCK

# Names of activations' types in descriptions of checkpoints.
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def device_multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """True if ``device`` multiplies numbers of this type: FP8 from compute capability 8.9 on. True also for a GPU that
    is planned for on a machine without one."""
    if device.type != "cuda" or dtype == torch.int8 or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) >= (8, 9)


def scaled_of(weight: StoredWeight, dtype: torch.dtype, device: torch.device) -> ScaledWeight | None:
    """The weight for products with activations of ``dtype``; None where its scales or zero points rule that out."""
    if not isinstance(weight, FloatCodes | GroupCodes):
        return None
    by_row = weight.group >= weight.shape[1]
    if isinstance(weight, FloatCodes):
        if dtype != torch.float8_e4m3fn or not (by_row or weight.group == BLOCK):
            return None
        values = weight.codes.view(torch.float8_e4m3fn)
    else:
        plain = weight.zeros is None and weight.order is None and by_row
        if dtype != torch.int8 or weight.bits != 8 or not plain:
            return None
        values = (weight.codes ^ 128).view(torch.int8)
    return ScaledWeight(values.contiguous().to(device), weight.scales.float().t().contiguous().to(device))


def quantized(weight: Tensor, dtype: torch.dtype) -> ScaledWeight:
    """A plain weight ``[N, K]`` rounded to ``dtype``, with a scale for each row."""
    values, scales = quantize_tokens(weight, dtype)
    return ScaledWeight(values, scales.t().contiguous())


def joined(a: ScaledWeight, b: ScaledWeight) -> ScaledWeight | None:
    """Rows of ``a``, then those of ``b``; None where they do not go together."""
    if a.values.dtype != b.values.dtype or a.blocks != b.blocks:
        return None
    return ScaledWeight(torch.cat([a.values, b.values]), torch.cat([a.scales, b.scales], dim=1))
