"""bitsandbytes: NF4 and FP4 (Dettmers et al., 2023) in flat blocks, and INT8 by rows.

4 bits: ``weight`` U8 [N K / 2, 1], two codes of a 16-entry table (``weight.quant_map``) in a byte, the first one in its
high half; ``weight.absmax`` holds the scale of each block of codes, in 8 bits where they are quantised themselves: a
second table (``weight.nested_quant_map``), scales for blocks of scales (``weight.nested_absmax``) and an offset, which
``weight.quant_state.bitsandbytes__nf4`` states as JSON in bytes. 8 bits: ``weight`` I8 [N, K] and ``SCB`` F32 [N], the
largest magnitude of each row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.interface.config_checks import Fields
from octavo.layers.quantization.canonical import GroupCodes, TableCodes
from octavo.layers.quantization.skipped_modules import SkippedModules
from octavo.layers.quantization.weight_format import (
    CheckpointFormat,
    DeviceCodes,
    Leaf,
    Sources,
    StoredModule,
    WeightFormat,
    halves,
)
from octavo.layers.weights import WeightSource
from octavo_kernels.quant import Kind


@dataclass(frozen=True)
class FourBitWeight(WeightFormat):
    """See the module. ``kind``: "nf4" or "fp4"."""

    kind: str

    packed_kind = Kind(4, table=True)  # blocks have whole groups of 32; the library has none smaller than that

    @property
    def _state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def leaves(self, rows: int, columns: int) -> list[Leaf]:
        """See `WeightFormat`."""
        return [
            Leaf("weight", ((rows * columns // 2, 1), (1, rows * columns // 2)), ("U8",)),
            Leaf("weight.absmax", (), ("U8", "F32")),
            Leaf("weight.quant_map", ((16,),), ("F32",)),
            Leaf("weight.nested_absmax", (), ("F32",), optional=True),
            Leaf("weight.nested_quant_map", ((256,),), ("F32",), optional=True),
            Leaf(self._state, (), ("U8",)),
        ]

    def read(self, sources: Sources, rows: int, columns: int) -> TableCodes:
        """See `WeightFormat`."""
        state = _read_state(sources[self._state])
        block = state["blocksize"]
        if columns % block:
            raise ModelError(
                f"tensor {sources['weight'].name!r}: rows of {columns} columns are not whole blocks of {block}: "
                "a scale would belong to several rows; use the model's unquantised weights"
            )
        scales = sources["weight.absmax"].load()
        if scales.dtype == torch.uint8:
            scales = _nested(sources, scales, state)
        if scales.numel() != rows * columns // block:
            raise ModelError(
                f"tensor {sources['weight.absmax'].name!r} has {scales.numel()} scales, the weight has "
                f"{rows * columns // block} blocks of {block}; the file is damaged: fetch it again"
            )
        swapped = sources["weight"].load().reshape(rows, columns // 2)
        codes = halves(swapped >> 4 | swapped << 4)
        return TableCodes(codes, scales.float().reshape(rows, -1), block, sources["weight.quant_map"].load())


def _nested(sources: Sources, codes: Tensor, state: dict[str, Any]) -> Tensor:
    """Scales float32 out of their 8 bits."""
    for leaf in ("weight.nested_absmax", "weight.nested_quant_map"):
        if leaf not in sources:
            name = sources["weight.absmax"].name
            raise ModelError(f"tensor {name!r} is quantised, but the file lacks {leaf[7:]}; fetch it again")
    of_block = sources["weight.nested_absmax"].load().repeat_interleave(state["nested_blocksize"])[: codes.numel()]
    table = sources["weight.nested_quant_map"].load()
    scales: Tensor = table[codes.flatten().int()] * of_block + state["nested_offset"]
    return scales


def _read_state(source: WeightSource) -> dict[str, Any]:
    """``blocksize`` and, for nested scales, ``nested_blocksize`` and ``nested_offset``. Raises ModelError."""
    try:
        said = json.loads(bytes(source.load().tolist()))
        state = {
            "blocksize": int(said["blocksize"]),
            "nested_blocksize": int(said.get("nested_blocksize") or 256),
            "nested_offset": float(said.get("nested_offset") or 0.0),
        }
        if 0 < state["blocksize"] <= 1 << 16 and 0 < state["nested_blocksize"] <= 1 << 16:
            return state
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise ModelError(f"tensor {source.name!r} is not bitsandbytes' JSON; the file is damaged: fetch it again")


class EightBitWeight(WeightFormat):
    """See the module."""

    has_row_scales = True
    device_codes = DeviceCodes(8, 0, 4)

    def leaves(self, rows: int, columns: int) -> list[Leaf]:
        """See `WeightFormat`."""
        return [
            Leaf("weight", ((rows, columns),), ("I8",)),
            Leaf("SCB", ((rows,),), ("F32",)),
            Leaf("weight_format", (), optional=True),
        ]

    def read(self, sources: Sources, rows: int, columns: int) -> GroupCodes:
        """See `WeightFormat`."""
        codes = sources["weight"].load().view(torch.uint8) ^ 128
        scales = sources["SCB"].load().reshape(rows, 1) / 127
        return GroupCodes(codes, scales, columns, None, None, 8)


class BitsAndBytes(CheckpointFormat):
    """A checkpoint that transformers has saved with bitsandbytes."""

    name = "bitsandbytes"

    def __init__(self, fields: Fields) -> None:
        for key in ("load_in_4bit", "load_in_8bit"):
            fields.flag(key)
        if fields.config.get("load_in_8bit"):
            self._format: WeightFormat = EightBitWeight()
            self._mark = "SCB"
        else:
            kind = fields.config.get("bnb_4bit_quant_type", "fp4")
            if kind not in ("nf4", "fp4"):
                fields.refuse("bnb_4bit_quant_type", "must be nf4 or fp4")
            self._format, self._mark = FourBitWeight(str(kind)), "weight.absmax"
        # llm_int8_skip_modules is about turning plain weights into 8 bits; what is stored tells by itself.
        self._skipped = SkippedModules([], fields.name("llm_int8_skip_modules"))

    def weight_format(self, module: StoredModule) -> WeightFormat | None:
        """See `CheckpointFormat`."""
        return self._skipped.choose(module, self._mark, self._format)
