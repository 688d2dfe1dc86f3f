"""Destinations of a checkpoint's tensors.

Every module that owns weights lists one `WeightSlot` for each checkpoint tensor that it takes; the loader fills slots
by name (`loader.load_model`), and reports tensors without a slot and slots without a tensor.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from octavo.errors import ModelError

_NAMES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# A tensor that cannot be read straight to its place takes host memory of its own until it is copied: one at a time.
_one_copy = Lock()


class WeightSource(Protocol):
    """One tensor of a checkpoint that has not been read yet.

    ``qtype`` is how it is stored ("F32", "BF16", "F8_E4M3", "Q4_1", ...); ``shape`` is the tensor's, not the bytes'.
    """

    name: str
    shape: tuple[int, ...]
    qtype: str

    def load(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read it (dequantised) as ``dtype``, or as it is stored; the tensor belongs to the caller."""
        ...

    def load_into(self, target: torch.Tensor) -> None:
        """Read it (dequantised) into ``target``, which has its shape: without a copy where that can be."""
        ...

    def pieces(self, dtype: torch.dtype, rows: slice) -> Iterator[torch.Tensor]:
        """Read ``rows`` (start and stop given) of its first dimension as ``dtype``, some at a time and in order. A
        piece is valid until the next one."""
        ...

    def __getitem__(self, index: int | slice) -> WeightSource:
        """A part of it along its first dimension (start and stop given), as torch would index it; nothing is read."""
        ...


@dataclass
class TensorGroup:
    """Tensors that mean something together alone, as codes and their scales do: ``load`` is called once, with those of
    them that the checkpoint has, by leaf name. They stand for ``parameters`` numbers."""

    load: Callable[[dict[str, WeightSource]], None]
    parameters: int = 0
    sources: dict[str, WeightSource] = field(default_factory=dict)

    def fill(self) -> None:
        """Read the group's tensors, once all are known."""
        self.load(self.sources)


@dataclass(frozen=True)
class WeightSlot:
    """A place for one tensor of the checkpoint.

    ``part`` is which of a merged module's checkpoint modules it belongs to (q, k, v = 0, 1, 2), ``leaf`` the tensor's
    own name ("weight", "bias"), ``shape`` the shape that it has in the checkpoint, before any partitioning (None: one
    of ``shapes``, or any where there are none).
    ``extra_bytes`` is what a tensor of some type takes here beside the module's parameters, which count anyway.
    The checkpoint may lack an ``optional`` one. ``qtypes`` are the types that it may be stored in (empty: any). A
    tensor of a ``group`` is read with the others of it.
    """

    part: int
    leaf: str
    shape: tuple[int, ...] | None
    load: Callable[[WeightSource], None]
    extra_bytes: Callable[[str], int] = lambda qtype: 0
    optional: bool = False
    qtypes: tuple[str, ...] = ()
    group: TensorGroup | None = None
    shapes: tuple[tuple[int, ...], ...] = ()

    def reordered(self, order: Tensor) -> WeightSlot:
        """The same for a tensor with its rows in another order (see `ReorderedRows`); a group sees to that itself."""
        return replace(self, load=lambda source: self.load(ReorderedRows(source, order)))

    def multiplied(self, factor: float) -> WeightSlot:
        """The same for a tensor of which each number is multiplied; a group sees to that itself."""
        return replace(self, load=lambda source: self.load(Multiplied(source, factor)))

    def check(self, source: WeightSource) -> None:
        """Raise ModelError when the tensor, which is not read yet, has another shape or type."""
        if self.qtypes and source.qtype not in self.qtypes:
            raise ModelError(
                f"tensor {source.name!r} is stored as {source.qtype}, its format has {' or '.join(self.qtypes)} there; "
                "the weights and their quantization_config are not of one model"
            )
        shapes = self.shapes if self.shape is None else (self.shape,)
        if shapes and tuple(source.shape) not in shapes:
            asked = " or ".join(str(list(shape)) for shape in shapes)
            raise ModelError(
                f"tensor {source.name!r} has shape {list(source.shape)}, the configuration asks for {asked}; "
                "the weights and the configuration are not of one model"
            )


class _Rearranged(ABC):
    """A `WeightSource` that follows from another one, which is read at once."""

    def __init__(self, source: WeightSource, shape: tuple[int, ...]) -> None:
        self.name, self.qtype, self.shape = source.name, source.qtype, shape
        self._source = source

    @abstractmethod
    def load(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See `WeightSource`."""

    def load_into(self, target: torch.Tensor) -> None:
        """See `WeightSource`."""
        target.copy_(self.load(target.dtype))

    def pieces(self, dtype: torch.dtype, rows: slice) -> Iterator[torch.Tensor]:
        """See `WeightSource`."""
        yield self.load(dtype)[rows]

    def __getitem__(self, index: int | slice) -> WeightSource:
        """See `WeightSource`; the whole is read for each part."""
        return _Part(self, index)


class _Part(_Rearranged):
    """The part `source[index]` of a rearranged tensor."""

    def __init__(self, source: _Rearranged, index: int | slice) -> None:
        first, *rest = source.shape
        shape = (*rest,) if isinstance(index, int) else (len(range(first)[index]), *rest)
        super().__init__(source, shape)
        self._index = index

    def load(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See `WeightSource`."""
        return self._source.load(dtype)[self._index]


class ReorderedRows(_Rearranged):
    """Row i is row ``order[i]`` of ``source``."""

    def __init__(self, source: WeightSource, order: Tensor) -> None:
        super().__init__(source, (len(order), *source.shape[1:]))
        self._order = order

    def raw_pieces(
        self, rows: slice, multiple: int = 1, columns: slice | None = None
    ) -> Iterator[np.ndarray[Any, Any]]:
        """The raw rows of a source that has them, see `octavo.gguf.weights.GGUFWeight`; one piece."""
        raw = cast(Any, self._source).raw()
        width = raw.shape[1] // self.shape[1]
        taken = slice(None) if columns is None else slice(columns.start * width, columns.stop * width)
        yield raw[self._order[rows].numpy(), taken]

    def load(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See `WeightSource`."""
        rows = self._source.load(dtype)
        return rows[self._order.to(rows.device)]  # dummies are made on the device


class Transposed(_Rearranged):
    """A weight that is stored as ``[inputs, outputs]``, as GPT-2 has it."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source, source.shape[::-1])

    def load(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See `WeightSource`."""
        return self._source.load(dtype).T.contiguous()


class Multiplied(_Rearranged):
    """The numbers of ``source`` times ``factor``, rounded once."""

    def __init__(self, source: WeightSource, factor: float) -> None:
        super().__init__(source, source.shape)
        self._factor = factor

    def load(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See `WeightSource`."""
        product = self._source.load(torch.float32).mul_(self._factor)
        return product.to(dtype or _NAMES.get(self.qtype, torch.float32))

    def pieces(self, dtype: torch.dtype, rows: slice) -> Iterator[torch.Tensor]:
        """See `WeightSource`."""
        for piece in self._source.pieces(torch.float32, rows):
            yield (piece * self._factor).to(dtype)


_FUSED_SHARED = re.compile(r"(.*\.shared_expert)\.gate_up_proj\.(\w+)")
_STACKED = re.compile(r"(.*\.experts)\.(gate_up|gate|up|down)_proj(?:[._](.+))?")


def experts_apart(
    name: str, source: WeightSource, transposed: int | None = None, interleaved: bool = False
) -> Iterator[tuple[str, WeightSource]]:
    """Split a tensor of all experts, ``experts.down_proj.weight`` [E, ...], into those of each,
    ``experts.0.down_proj.weight`` [...]; any other stays as it is. Gates and ups stored as one become two, a shared
    expert's as well.

    ``transposed``: the hidden size, if weights are stored as [E, inputs, outputs]; those whose shape shows that they
    are [E, outputs, inputs] are read as such. ``interleaved``: gates and ups take turns.
    """
    if match := _FUSED_SHARED.fullmatch(name):
        yield from _gate_and_up(match[1], match[2], source, False)
        return
    match = _STACKED.fullmatch(name)
    if match is None:
        yield name, source
        return
    experts, part, leaf = match[1], match[2], match[3] or "weight"
    for number in range(source.shape[0] if source.shape else 0):
        one = source[number]
        if transposed and leaf == "weight" and len(one.shape) == 2 and one.shape[part == "down"] == transposed:
            one = Transposed(one)
        if part == "gate_up" and one.shape:
            yield from _gate_and_up(f"{experts}.{number}", leaf, one, interleaved)
        else:
            yield f"{experts}.{number}.{part}_proj.{leaf}", one


def _gate_and_up(module: str, leaf: str, both: WeightSource, interleaved: bool) -> Iterator[tuple[str, WeightSource]]:
    rows, half = both.shape[0], both.shape[0] // 2
    for number, (part, taken) in enumerate((("gate_proj", slice(0, half)), ("up_proj", slice(half, rows)))):
        order = torch.arange(number, rows, 2, device="cpu")
        yield f"{module}.{part}.{leaf}", ReorderedRows(both, order) if interleaved else both[taken]


def copy_slot(leaf: str, param: Tensor) -> WeightSlot:
    """A slot for a parameter that is stored just as it is used."""
    return WeightSlot(0, leaf, tuple(param.shape), lambda source: fill_tensor(param, source))


def unread_slot(leaf: str) -> WeightSlot:
    """A slot for a tensor that a checkpoint may hold and nobody needs."""
    return WeightSlot(0, leaf, None, lambda source: None, optional=True)


def fill_tensor(target: Tensor, source: WeightSource, *index: slice) -> None:
    """Read ``source`` (the part of it at ``index``) into ``target``. May be called by several threads."""
    whole = target.shape == source.shape
    same_type = _NAMES.get(source.qtype, target.dtype) == target.dtype  # quantised types are decoded piece by piece
    with nullcontext() if target.device.type != "cpu" or (whole and same_type) else _one_copy:
        if whole:
            source.load_into(target)
        else:
            target.copy_(source.load(target.dtype)[index])
