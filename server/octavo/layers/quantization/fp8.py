"""Weights in 8-bit floating point (e4m3), under the names of several tools.

``weight`` F8_E4M3 [N, K] with ``weight_scale``: one for the tensor, or one a row; or ``weight_scale_inv`` (DeepSeek,
Qwen), one for each block of ``weight_block_size`` rows and columns, or without such blocks one for the tensor
(Ministral 3), which in spite of its name is multiplied. Scales of activations are for hardware that multiplies in
8-bit floating point: where values or integers are computed on they are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.interface.config_checks import Fields
from octavo.layers.quantization.canonical import FloatCodes
from octavo.layers.quantization.skipped_modules import SkippedModules
from octavo.layers.quantization.weight_format import (
    FLOATS,
    CheckpointFormat,
    DeviceCodes,
    Leaf,
    Sources,
    StoredModule,
    WeightFormat,
    read_exponents,
)
from octavo.layers.weights import WeightSource

ACTIVATION_LEAVES = (
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "activation_scale",
)
_INVERSE = "weight_scale_inv"


@dataclass(frozen=True)
class FP8Weight(WeightFormat):
    """See the module. ``block``: rows and columns of a scale; None: one for the tensor or one a row."""

    activations = "fp8"

    scale: str = "weight_scale"
    block: tuple[int, int] | None = None

    def leaves(self, rows: int, columns: int) -> list[Leaf]:
        """See `WeightFormat`."""
        if self.block is None:
            scale = Leaf(self.scale, ((), (1,), (rows,), (rows, 1), (1, 1)), FLOATS)
        else:
            shape = (-(-rows // self.block[0]), -(-columns // self.block[1]))
            scale = Leaf(self.scale, (shape,), (*FLOATS, "U8", "F8_E8M0"))
        return [Leaf("weight", ((rows, columns),), ("F8_E4M3",)), scale, *unread(ACTIVATION_LEAVES)]

    @property
    def device_codes(self) -> DeviceCodes:
        """See `WeightFormat`."""
        return DeviceCodes(8, self.block[1] if self.block else 0, 4)

    def read(self, sources: Sources, rows: int, columns: int) -> FloatCodes:
        """See `WeightFormat`."""
        values = read_e4m3(sources["weight"])
        source = sources[self.scale]
        if source.qtype in ("U8", "F8_E8M0"):
            scales = read_exponents(source)
        else:
            scales = source.load(torch.float32)
        if self.block is None:
            return FloatCodes(values, scales.reshape(-1, 1).expand(rows, 1), columns)
        return FloatCodes(values, scales.repeat_interleave(self.block[0], dim=0)[:rows], self.block[1])


def unread(names: tuple[str, ...]) -> list[Leaf]:
    """Tensors that a checkpoint may have and that nothing is made of."""
    return [Leaf(name, optional=True) for name in names]


def read_e4m3(source: WeightSource) -> Tensor:
    """A tensor of e4m3. Raises ModelError where a number is NaN."""
    tensor = source.load()
    if bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise ModelError(f"tensor {source.name!r} holds NaN; the file is damaged: fetch it again")
    return tensor


class FP8(CheckpointFormat):
    """The format called fp8 by vLLM: AutoFP8's checkpoints, and those in blocks of DeepSeek and Qwen."""

    name = "fp8"

    def __init__(self, fields: Fields) -> None:
        scheme = fields.config.get("activation_scheme", "dynamic")
        if scheme not in ("static", "dynamic"):
            fields.refuse("activation_scheme", "must be static or dynamic")
        block = block_size(fields, "weight_block_size")
        self._format = FP8Weight(_INVERSE if block else "weight_scale", block)
        key = "ignored_layers" if fields.config.get("ignored_layers") else "modules_to_not_convert"
        self._skipped = SkippedModules.from_fields(fields, key)

    def weight_format(self, module: StoredModule) -> WeightFormat | None:
        """See `CheckpointFormat`."""
        named = replace(self._format, scale=_INVERSE) if _INVERSE in module.tensors else self._format
        return self._skipped.choose(module, named.scale, named)


class FBGEMM(CheckpointFormat):
    """The format called fbgemm_fp8 by transformers: one scale a row; the bound on activation scales is for its own
    kernels."""

    name = "fbgemm_fp8"

    def __init__(self, fields: Fields) -> None:
        self._format = FP8Weight()
        self._skipped = SkippedModules.from_fields(fields, "modules_to_not_convert")

    def weight_format(self, module: StoredModule) -> WeightFormat | None:
        """See `CheckpointFormat`."""
        return self._skipped.choose(module, "weight_scale", self._format)


def block_size(fields: Fields, key: str) -> tuple[int, int] | None:
    """Rows and columns of a block in a description; None where it has none. Raises ModelError."""
    block = fields.config.get(key)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n <= 1 << 20 for n in block):
        fields.refuse(key, "must be two positive numbers, rows and columns")
    return block[0], block[1]
