"""GPTQ (Frantar et al., 2022) as AutoGPTQ and GPTQModel write it, in 4 or 8 bits.

``qweight`` int32 [K * bits / 32, N] holds consecutive columns of the weight in a word, ``qzeros`` int32 [G, N * bits /
32] consecutive outputs, lowest bits first; ``scales`` [G, N]; ``g_idx`` int32 [K] says which group a column belongs to
and may be missing. With act order (desc_act) the columns of a group are not neighbours.

Format "gptq" stores zero points less one (modulo 2^bits), "gptq_v2" as they are. Some versions of GPTQModel store the
second and say the first, so where a file says "gptq" the values decide: with symmetric codes all zero points are the
middle one, and otherwise the codes of a weight lie around its zero points on average.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from octavo.errors import ModelError
from octavo.interface.config_checks import Fields
from octavo.interface.module_names import compile_pattern
from octavo.layers.quantization.canonical import GroupCodes
from octavo.layers.quantization.skipped_modules import SkippedModules
from octavo.layers.quantization.weight_format import (
    FLOATS,
    CheckpointFormat,
    DeviceCodes,
    Leaf,
    Sources,
    StoredModule,
    WeightFormat,
    column_order,
    nibbles,
    num_groups_of,
    octets,
)
from octavo_kernels.quant import Kind

_CLEAR = 0.3  # how far codes may lie from their zero points on average, when one step is what is asked about,
_CERTAIN = 0.1  # and the largest standard error of that average (codes of 8 bits in small weights have a larger one)


@dataclass(frozen=True)
class GPTQWeight(WeightFormat):
    """See the module. ``group`` -1: one scale a row; ``zeros_as_they_are`` None: the values decide, and where they are
    not clear the ``default`` does (None: refused)."""

    bits: int
    group: int
    zeros_as_they_are: bool | None
    default: bool | None
    symmetric: bool = True  # as described: the values decide
    ordered: bool = False

    def leaves(self, rows: int, columns: int) -> list[Leaf]:
        """See `WeightFormat`."""
        word = 32 // self.bits
        if columns % word or rows % word:
            raise ModelError(f"GPTQ packs {word} numbers into a word, and it has {rows} x {columns}; use plain weights")
        groups = num_groups_of(columns, self._group(columns), "GPTQ")
        return [
            Leaf("qweight", ((columns // word, rows),), ("I32",)),
            Leaf("qzeros", ((groups, rows // word),), ("I32",)),
            Leaf("scales", ((groups, rows),), FLOATS),
            Leaf("g_idx", ((columns,),), ("I32", "I64"), optional=True),
        ]

    def read(self, sources: Sources, rows: int, columns: int) -> GroupCodes:
        """See `WeightFormat`."""
        unpack = nibbles if self.bits == 4 else octets
        scales = sources["scales"].load().T.contiguous()
        codes = unpack(sources["qweight"].load().T).flatten(1)
        stored = unpack(sources["qzeros"].load()).flatten(1).T.contiguous()
        group = self._group(columns)
        order = column_order(sources.get("g_idx"), group, len(scales[0]))
        if order is not None:
            codes = codes[:, order.long()]
        zeros: Tensor | None = self._zeros(sources["qzeros"].name, stored, codes, group)
        assert zeros is not None
        if bool((zeros == 1 << (self.bits - 1)).all()):
            zeros = None
        return GroupCodes(codes, scales, group, zeros, order, self.bits)

    @property
    def packed_kind(self) -> Kind:
        """See `WeightFormat`."""
        return Kind(self.bits, affine=self.bits == 4)

    @property
    def device_codes(self) -> DeviceCodes:
        """See `WeightFormat`."""
        return DeviceCodes(self.bits, max(0, self.group), 3 - self.symmetric, self.ordered)

    def _group(self, columns: int) -> int:
        return columns if self.group == -1 else self.group

    def _zeros(self, name: str, stored: Tensor, codes: Tensor, group: int) -> Tensor:
        """The zero points uint8 [N, G] of what is ``stored``."""
        as_they_are = self.zeros_as_they_are
        if as_they_are is None:
            as_they_are = self._decide(stored, codes, group)
        if as_they_are is None:
            raise ModelError(
                f"tensor {name!r}: whether zero points are stored as they are or less one cannot be told from this "
                "file; set quantization_config.checkpoint_format in config.json to gptq or gptq_v2"
            )
        return stored if as_they_are else (stored + 1) & ((1 << self.bits) - 1)

    def _decide(self, stored: Tensor, codes: Tensor, group: int) -> bool | None:
        middle = 1 << (self.bits - 1)
        for value, as_they_are in ((middle, True), (middle - 1, False)):
            if bool((stored == value).all()):
                return as_they_are
        distances = codes.float().unflatten(1, (-1, group)).mean(dim=2) - stored.float()
        away, uncertain = distances.mean().item(), distances.std().item() / distances.numel() ** 0.5
        if uncertain < _CERTAIN and abs(away) < _CLEAR:
            return True
        return False if uncertain < _CERTAIN and abs(away - 1) < _CLEAR else self.default


class GPTQ(CheckpointFormat):
    """A checkpoint of AutoGPTQ, GPTQModel, optimum or AutoRound's GPTQ export."""

    name = "gptq"

    def __init__(self, fields: Fields) -> None:
        described = fields.config
        self._format = self._weight(fields, described)
        written = described.get("checkpoint_format", described.get("format", "gptq"))
        if written not in ("gptq", "gptq_v2"):
            fields.refuse("checkpoint_format", "must be gptq or gptq_v2")
        by_gptqmodel = max(map(_gptqmodel_version, _quantizers(described)), default=0)
        self._format = replace(
            self._format,
            zeros_as_they_are=True if written == "gptq_v2" else None,
            default=None if by_gptqmodel >= 5 else False,
        )
        self._skipped = SkippedModules.from_fields(fields, "modules_to_not_convert")
        self._special = self._dynamic(fields)

    def weight_format(self, module: StoredModule) -> WeightFormat | None:
        """See `CheckpointFormat`."""
        chosen = next((found for pattern, found in self._special if pattern.match(module.name)), self._format)
        return self._skipped.choose(module, "qweight", chosen or self._format)

    def _weight(self, fields: Fields, described: Mapping[str, Any]) -> GPTQWeight:
        bits, group = described.get("bits"), described.get("group_size", -1)
        if bits not in (4, 8):
            fields.refuse("bits", "must be 4 or 8, the only ones whose weights are read")
        if group != -1:
            fields.integer("group_size", 1, 1 << 20)
        fields.flag("sym")
        fields.flag("desc_act")
        symmetric, ordered = bool(described.get("sym", True)), bool(described.get("desc_act", False))
        return GPTQWeight(int(str(bits)), group, None, None, symmetric, ordered)

    def _dynamic(self, fields: Fields) -> list[tuple[re.Pattern[str], GPTQWeight | None]]:
        """GPTQModel's exceptions: ``{"+:pattern": {"bits": 8}, "-:pattern": {}}``, of which the first match counts."""
        found: list[tuple[re.Pattern[str], GPTQWeight | None]] = []
        for key, changes in (fields.table("dynamic") or {}).items():
            sign, _, pattern = key.partition(":") if key[:2] in ("+:", "-:") else ("+", "", key)
            if not isinstance(changes, dict):
                fields.refuse("dynamic", "must be an object of objects")
            compiled = compile_pattern(f"re:{pattern}", fields.name("dynamic"))
            inner = fields.inner(f"dynamic.{key}", {**fields.config, **changes})
            other = self._weight(inner, inner.config) if sign == "+" else None
            found.append((compiled, other and replace(self._format, bits=other.bits, group=other.group)))
        return found


def _quantizers(described: Mapping[str, Any]) -> list[str]:
    meta = described.get("meta")
    said = meta.get("quantizer") if isinstance(meta, dict) else None
    return [str(one) for one in (said if isinstance(said, list) else [said]) if one is not None]


def _gptqmodel_version(quantizer: str) -> int:
    """The major version in "gptqmodel:5.0.0"; 0 for other tools."""
    match = re.match(r"gptqmodel:(\d+)", quantizer)
    return int(match[1]) if match else 0
