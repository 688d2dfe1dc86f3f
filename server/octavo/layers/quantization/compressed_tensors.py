"""compressed-tensors, the format of llm-compressor: integers, FP8, MXFP4 and NVFP4 by groups of modules.

``config_groups`` says how the weights of its ``targets`` (module names, ``re:`` patterns, or the class Linear) are
stored; ``ignore`` lists modules that are not. How activations would be quantised is left alone: the layers' own kernels
decide that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.interface.config_checks import Fields
from octavo.layers.quantization.canonical import GroupCodes
from octavo.layers.quantization.fp4 import MXFP4Weight, NVFP4Weight
from octavo.layers.quantization.fp8 import ACTIVATION_LEAVES, FP8Weight, block_size, unread
from octavo.layers.quantization.skipped_modules import SkippedModules, is_plain
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
from octavo.layers.weights import WeightSource
from octavo_kernels.quant import Kind

_PACKED_MARKS = ("weight_packed", "weight_scale")  # a module with one of these is quantised


@dataclass(frozen=True)
class IntegerWeight(WeightFormat):
    """Integers of 4 or 8 bits around 0, with a scale for ``group`` columns of a row (None: for a row or the tensor).

    ``packed``: ``weight_packed`` int32 [N, K * bits / 32] along K, rounded up, with ``weight_zero_point`` along N; else
    ``weight`` int8 [N, K]. Stored zero points are around 0, too.
    """

    bits: int
    group: int | None
    symmetric: bool
    packed: bool

    def leaves(self, rows: int, columns: int) -> list[Leaf]:
        """See `WeightFormat`."""
        groups = num_groups_of(columns, self.group or columns, "compressed-tensors")
        scales: tuple[tuple[int, ...], ...] = ((rows, groups),)
        if groups == 1:
            scales += ((), (1,), (rows,), (1, 1))
        word = 32 // self.bits
        packed_zeros = (-(-rows // word), groups)
        codes = Leaf("weight", ((rows, columns),), ("I8",))
        if self.packed:
            codes = Leaf("weight_packed", ((rows, -(-columns // word)),), ("I32",))
        return [
            codes,
            Leaf("weight_scale", scales, FLOATS),
            Leaf("weight_shape", ((2,),), ("I64", "I32"), optional=True),
            Leaf("weight_zero_point", (*scales, packed_zeros), ("I8", "I32"), optional=self.symmetric),
            Leaf("weight_g_idx", ((columns,),), ("I32", "I64"), optional=True),
            *unread(ACTIVATION_LEAVES),
        ]

    @property
    def has_row_scales(self) -> bool:
        """See `WeightFormat`."""
        return self.bits == 8 and self.group is None and self.symmetric

    @property
    def activations(self) -> str | None:
        """See `WeightFormat`."""
        return None if self.packed else "int8"

    def read(self, sources: Sources, rows: int, columns: int) -> GroupCodes:
        """See `WeightFormat`."""
        group = self.group or columns
        scales = sources["weight_scale"].load().reshape(-1, columns // group).expand(rows, -1)
        if self.packed:
            _check_shape(sources.get("weight_shape"), rows, columns)
            codes = self._unpack(sources["weight_packed"].load())[:, :columns]
        else:
            codes = sources["weight"].load().view(torch.uint8) ^ 128
        order = column_order(sources.get("weight_g_idx"), group, columns // group)
        if order is not None:
            codes = codes[:, order.long()]
        zeros = None if self.symmetric else self._zeros(sources["weight_zero_point"], rows, columns // group)
        return GroupCodes(codes, scales, group, zeros, order, self.bits)

    @property
    def packed_kind(self) -> Kind:
        """See `WeightFormat`."""
        return Kind(self.bits, affine=self.bits == 4 and not self.symmetric)

    @property
    def device_codes(self) -> DeviceCodes:
        """See `WeightFormat`."""
        return DeviceCodes(self.bits, self.group or 0, 3 - self.symmetric)

    def _unpack(self, words: Tensor) -> Tensor:
        return (nibbles if self.bits == 4 else octets)(words).flatten(1)

    def _zeros(self, source: WeightSource, rows: int, groups: int) -> Tensor | None:
        """uint8 [N, G]; None where all are the middle."""
        middle = 1 << (self.bits - 1)
        if source.qtype == "I32":
            zeros = self._unpack(source.load().T)[:, :rows].T.contiguous()
        else:
            stored = source.load(torch.int16)
            if int(stored.min()) < -middle or int(stored.max()) >= middle:
                raise ModelError(
                    f"tensor {source.name!r} holds zero points from {int(stored.min())} to {int(stored.max())}, "
                    f"{self.bits} bits hold {-middle} to {middle - 1}; the file is damaged: fetch it again"
                )
            zeros = (stored + middle).to(torch.uint8).reshape(-1, groups).expand(rows, -1)
        return None if bool((zeros == middle).all()) else zeros


def _check_shape(source: WeightSource | None, rows: int, columns: int) -> None:
    if source is not None and source.load().tolist() != [rows, columns]:
        raise ModelError(
            f"tensor {source.name!r} says {source.load().tolist()}, config.json asks for {[rows, columns]}; "
            "the weights and config.json are not of one model"
        )


class CompressedTensors(CheckpointFormat):
    """See the module."""

    name = "compressed-tensors"

    def __init__(self, fields: Fields) -> None:
        for key in ("sparsity_config", "transform_config"):
            extra = fields.table(key)
            if extra and extra.get("format", "") != "dense":
                fields.refuse(key, "must be absent: sparse and rotated weights are not supported")
        self._skipped = SkippedModules.from_fields(fields, "ignore", exact=True)
        self._groups: list[tuple[SkippedModules, bool, WeightFormat]] = []
        for name, group in (fields.table("config_groups") or {}).items():
            if not isinstance(group, dict):
                fields.refuse("config_groups", "must be an object of objects (targets and weights)")
            self._add(
                fields.inner(f"config_groups.{name}", group), str(group.get("format") or fields.config.get("format"))
            )
        if not self._groups:
            fields.refuse("config_groups", "must hold a group with quantised weights")

    def weight_format(self, module: StoredModule) -> WeightFormat | None:
        """See `CheckpointFormat`."""
        marked = next((mark for mark in _PACKED_MARKS if mark in module.tensors), None)
        if marked is None and (is_plain(module) or module.name in self._skipped or not module.tensors):
            return None
        chosen = self._group_of(module.name)
        if marked is not None and (chosen is None or module.name in self._skipped):
            raise ModelError(
                f"tensor {module.tensors[marked].name!r} is quantised, but quantization_config lists {module.name!r} "
                "as not quantised; the weights and their quantization_config are not of one model"
            )
        return chosen

    def _group_of(self, module: str) -> WeightFormat | None:
        """Find a module's format, by name before by class."""
        for names, _, found in self._groups:
            if module in names:
                return found
        return next((found for _, linear, found in self._groups if linear), None)

    def _add(self, fields: Fields, stored_as: str) -> None:
        targets = fields.config.get("targets")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            fields.refuse("targets", "must be a list of module names")
            return
        weights = fields.table("weights")
        if weights is None:
            return
        names = SkippedModules(targets, fields.name("targets"), exact=True)
        self._groups.append((names, "Linear" in targets, _weight(fields.inner("weights", weights), stored_as)))


def _weight(fields: Fields, stored_as: str) -> WeightFormat:
    """Return the storage of a group's weights, from its ``weights`` and ``format``."""
    given = fields.config
    bits, kind, strategy = given.get("num_bits"), given.get("type", "int"), given.get("strategy")
    group = given.get("group_size")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if kind == "float" and bits == 4 and strategy in ("group", "tensor_group"):
        if stored_as == "mxfp4-pack-quantized":
            return MXFP4Weight()
        if stored_as == "nvfp4-pack-quantized":
            return NVFP4Weight("weight_packed", "weight_global_scale", reciprocal=True)
    if kind == "float" and bits == 8 and stored_as in ("float-quantized", "naive-quantized"):
        if strategy in ("tensor", "channel"):
            return FP8Weight()
        if strategy == "block" and (block := block_size(fields, "block_structure")):
            return FP8Weight(block=block)
    if kind == "int" and bits in (4, 8) and stored_as in ("pack-quantized", "int-quantized", "naive-quantized"):
        packed = stored_as == "pack-quantized"
        if strategy in ("tensor", "channel", "group") and (packed or bits == 8):
            if strategy == "group":
                fields.integer("group_size", 1, 1 << 20)
            fields.flag("symmetric")
            return IntegerWeight(bits, group if strategy == "group" else None, given.get("symmetric", True), packed)
    raise fields.error(
        f"{fields.name('num_bits')}: {kind} weights of {bits} bits by {strategy} in format {stored_as!r} are not "
        "supported (int of 4 or 8 bits, FP8, MXFP4 and NVFP4 are)"
    )
