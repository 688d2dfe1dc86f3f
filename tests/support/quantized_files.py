"""Checkpoints in quantised formats, written as the formats' own tools write them, and their values as those read them.

Each writer turns a weight ``[N, K]`` into the tensors of one module and says which values they stand for. The values
are computed from the format's text, element by element where order matters, and not by what is tested.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Writer = Callable[[Tensor], tuple[Tensors, Tensor]]  # weight -> its tensors by leaf name, its values in float32

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column AWQ_ORDER[i]


def round_to_groups(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes int64 [N, K], scales float16 [N, G] and zero points int64 [N, G] that are nearest to ``weight``."""
    rows, width = weight.shape
    grouped, top = weight.float().reshape(rows, -1, width if group == -1 else group), 2**bits - 1
    if symmetric:
        scales = (grouped.abs().amax(2) / (top // 2)).clamp(min=1e-5).half()
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scales = ((high - low) / top).clamp(min=1e-5).half()
        zeros = (-low / scales.float()).round().clamp(0, top).long()
    codes = ((grouped / scales.float()[:, :, None]).round().long() + zeros[:, :, None]).clamp(0, top)
    return codes.reshape(rows, width), scales, zeros


def values_of(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    """``scale * (code - zero)`` in float32, with the group of each column int64 [K]."""
    return (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def pack_words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Numbers [r, c] as int32 [r, c * bits / 32]: the i-th ``bits`` of a word hold its column ``order[i]``."""
    count = 32 // bits
    order = order or tuple(range(count))
    out = np.zeros((numbers.shape[0], numbers.shape[1] // count), np.uint32)
    for place, column in enumerate(order):
        out |= numbers[:, column::count].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(out.view(np.int32).copy())


def awq(group: int, symmetric: bool = False) -> Writer:
    """AutoAWQ's gemm version."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scales, zeros = round_to_groups(weight, 4, group, symmetric)
        width = weight.shape[1]
        tensors = {
            "qweight": pack_words(codes.T.numpy(), 4, AWQ_ORDER),
            "qzeros": pack_words(zeros.T.numpy(), 4, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
        return tensors, values_of(codes, scales, zeros, torch.arange(width) // (width if group == -1 else group))

    return write


def quantize_checkpoint(
    source: Path, target: Path, write: Writer | dict[str, Writer | None], description: dict[str, Any], **config: Any
) -> Path:
    """Copy the checkpoint at ``source``, its decoder's linear weights written by ``write`` (or by that of ``{part of a
    name: writer}``; None: left plain). Beside it, in ``target``/values, lies the plain checkpoint of their values."""
    writers = write if isinstance(write, dict) else {"_proj": write, ".fc": write}
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        writer = next((w for part, w in writers.items() if part in name and "layers." in name), None)
        if writer is None or not name.endswith(".weight") or tensor.ndim != 2:
            continue
        del stored[name]
        leaves, plain[name] = writer(tensor)
        stored |= {name.removesuffix("weight") + leaf: value for leaf, value in leaves.items()}
    values = target / "values"
    values.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | config
    for folder, tensors, more in ((target, stored, {"quantization_config": description}), (values, plain, {})):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | more))
    return target
