"""The interface between a checkpoint's formats and the linear layers that are filled from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.layers.quantization.canonical import StoredWeight
from octavo.layers.weights import WeightSource
from octavo_kernels.quant import Kind

FLOATS = ("F16", "BF16", "F32")
Sources = Mapping[str, WeightSource]  # unread tensors by leaf name ("qweight", "scales")


@dataclass(frozen=True)
class Leaf:
    """A tensor of a quantised weight: its own name, the shapes that it may have and the types that it may be stored in
    (empty: any)."""

    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    qtypes: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class DeviceCodes:
    """The form of a weight's codes on a GPU: ``bits`` of each, and ``scale_bytes`` of each ``group`` of columns (0: a
    row), zero points included. ``ordered``: columns have an order of their own, which is stored as well."""

    bits: int
    group: int
    scale_bytes: int
    ordered: bool = False


@dataclass(frozen=True)
class StoredModule:
    """A linear module of a checkpoint: the name that the checkpoint has for it, and its tensors, none of them read."""

    name: str
    tensors: Sources


class WeightFormat(ABC):
    """The storage of one weight ``[rows, columns]`` in a checkpoint."""

    @abstractmethod
    def leaves(self, rows: int, columns: int) -> list[Leaf]:
        """Name the weight's tensors. Raises ModelError for a size that the format does not have."""

    @abstractmethod
    def read(self, sources: Sources, rows: int, columns: int) -> StoredWeight:
        """Read it. Raises ModelError, which names the tensor, for values that cannot be."""

    @property
    def packed_kind(self) -> Kind:
        """The kind of packed codes that the CPU's kernels will take, the largest that it may be."""
        return Kind(8)

    @property
    def has_row_scales(self) -> bool:
        """True if it holds symmetric integers of 8 bits with one scale for each row, for which the CPU has kernels."""
        return False

    @property
    def device_codes(self) -> DeviceCodes | None:
        """The codes that a GPU keeps, for its memory ledger; None: it holds values."""
        return None

    @property
    def activations(self) -> str | None:
        """The 8-bit type ("int8", "fp8") of the activations that the format is made for, None: they keep theirs."""
        return None


class CheckpointFormat(ABC):
    """The description of a quantised checkpoint. ``name`` is the format's in ``--quantization``."""

    name: str

    @abstractmethod
    def weight_format(self, module: StoredModule) -> WeightFormat | None:
        """Return the storage of the module's weight; None: a plain tensor. Raises ModelError if that is not clear."""


def read_exponents(source: WeightSource) -> Tensor:
    """A tensor of e8m0 (127 stands for 1) as float32. Raises ModelError where a number is NaN."""
    exponents = source.load().view(torch.uint8)
    if bool((exponents == 255).any()):
        raise ModelError(f"tensor {source.name!r} holds NaN; the file is damaged: fetch it again")
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)


def column_order(source: WeightSource | None, group: int, groups: int) -> Tensor | None:
    """The columns sorted by their groups, int32 [K], where a tensor says which one each is of; None: as they are.

    Raises ModelError for groups that are not there, or that have not ``group`` columns.
    """
    if source is None:
        return None
    group_of = source.load(torch.int64)
    expected = torch.arange(len(group_of)) // group
    if torch.equal(group_of, expected):
        return None
    low, high = int(group_of.min()), int(group_of.max())
    if low == high == -1:  # compressed-tensors: not calibrated, so as they are
        return None
    if low < 0 or high >= groups:
        raise ModelError(
            f"tensor {source.name!r} names groups from {low} to {high}, the weight has {groups}; "
            "the file is damaged: fetch it again"
        )
    order = torch.argsort(group_of, stable=True)
    if not torch.equal(group_of[order], expected):
        raise ModelError(
            f"tensor {source.name!r} does not give each group {group} columns; the file is damaged: fetch it again"
        )
    return order.to(torch.int32)


def halves(packed: Tensor) -> Tensor:
    """uint8 ``[..., n]`` as uint8 ``[..., 2 n]`` below 16, the low half of a byte first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def nibbles(words: Tensor) -> Tensor:
    """int32 ``[..., n]`` as uint8 ``[..., n, 8]``, the lowest four bits first."""
    return halves(octets(words))


def octets(words: Tensor) -> Tensor:
    """int32 ``[..., n]`` as uint8 ``[..., n, 4]``, the lowest byte first."""
    split: Tensor = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    return split


def num_groups_of(columns: int, group: int, what: str) -> int:
    """Groups of ``columns``. Raises ModelError where they do not divide."""
    if columns % group:
        raise ModelError(
            f"{what}'s groups of {group} columns do not divide its {columns}; fetch the model again, or quantise it "
            "with a group size that divides them"
        )
    return columns // group
