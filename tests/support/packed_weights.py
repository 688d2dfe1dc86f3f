"""Weights as GGUF files store them, and packed."""

from __future__ import annotations

import gguf
import torch

from octavo_kernels import packing, quant

SCALES = {
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_XS": [0],
    "IQ4_NL": [0],
    "IQ3_S": [0],
    "IQ3_XXS": [0],
    "IQ2_S": [0],
    "IQ2_XS": [0],
    "IQ2_XXS": [0],
    "IQ1_S": [0],
    "IQ1_M": [],
    "TQ1_0": [52],
    "TQ2_0": [64],
}


def gguf_rows(weight: torch.Tensor, qtype: str):
    """A weight as a GGUF file has it. gguf cannot write all types: blocks of random bytes with sane scales are one."""
    channels, width = weight.shape
    if qtype in SCALES:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[qtype]]
        blocks = torch.randint(0, 256, (channels, width // block, size), dtype=torch.uint8)
        for at in SCALES[qtype]:
            blocks[:, :, at : at + 2] = (torch.rand(channels, width // block, 1) * 0.01).half().view(torch.uint8)
        if qtype == "IQ1_M":  # the highest bits of its scale lie there
            blocks[:, :, 55] = blocks[:, :, 55] & 0x0F | 0x10
        return blocks.flatten(1).numpy()
    return gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[qtype])


def make(kind: str, channels: int, width: int, terms: int = 1, seed: int = 0):
    """A packed weight and the float32 weight it stands for."""
    torch.manual_seed(seed)
    weight = torch.randn(channels, width) * 0.3
    if kind == "w8":
        packed = packing.pack_w8(weight, terms)
        return packed, quant.dequantize(packed)
    raw = gguf_rows(weight, kind)
    stored = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    return packing.pack_gguf(raw, kind, (channels, width), terms), stored
