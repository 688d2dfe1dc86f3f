"""Reading safetensors files tensor by tensor, each straight into its own memory.

The `safetensors` package maps files (see `reading` for why that is avoided); the format itself is a length, a JSON
header and bytes: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from octavo.errors import ModelError
from octavo.loader.staging import staging
from octavo.system.file_reading import read_into
from octavo.system.finite_numbers import finite_check

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "F8_E8M0": torch.uint8,
    "BOOL": torch.bool,
}
_PIECE = 1 << 20  # bytes that are read at a time: they stay in the processor's cache until they are used
_MAX_HEADER = 100 << 20  # the package's own limit


class SafetensorsWeight:
    """A `WeightSource` in a file: ``nbytes`` from byte ``offset`` on."""

    def __init__(self, path: Path, name: str, qtype: str, shape: tuple[int, ...], offset: int, nbytes: int) -> None:
        self.name, self.qtype, self.shape = name, qtype, shape
        self._path, self._offset, self._nbytes = path, offset, nbytes

    def load(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See `WeightSource`."""
        tensor = torch.empty(self.shape, dtype=_DTYPES[self.qtype])
        self._read(tensor)
        return tensor if dtype is None else tensor.to(dtype)

    def load_into(self, target: torch.Tensor) -> None:
        """See `WeightSource`: read straight into it, or through `staging` to another device or dtype."""
        if target.device.type == "cpu" and target.is_contiguous() and target.dtype == _DTYPES[self.qtype]:
            self._read(target.detach())
        elif target.device.type in ("cpu", "cuda") and target.is_contiguous():
            staging(target.device).fill(target.detach().view(-1), _DTYPES[self.qtype], self._read_from)
        else:
            target.copy_(self.load(target.dtype))

    def pieces(self, dtype: torch.dtype, rows: slice) -> Iterator[torch.Tensor]:
        """See `WeightSource`: of at most `_PIECE` bytes, or a row."""
        stored, width = _DTYPES[self.qtype], prod(self.shape[1:])
        count = max(1, _PIECE // max(1, width * stored.itemsize))
        room = torch.empty(min(count, rows.stop - rows.start), *self.shape[1:], dtype=stored)
        for first in range(rows.start, rows.stop, count):
            piece = room[: min(count, rows.stop - first)]
            if piece.numel():
                self._read_from(piece.view(-1).view(torch.uint8).numpy().data, first * width * stored.itemsize)
            yield piece.to(dtype)

    def __getitem__(self, index: int | slice) -> SafetensorsWeight:
        """See `WeightSource`."""
        row = self._nbytes // max(1, self.shape[0])
        if isinstance(index, int):
            name, start, shape = f"{self.name}[{index}]", index, self.shape[1:]
        else:
            name, start = f"{self.name}[{index.start}:{index.stop}]", index.start
            shape = (index.stop - index.start, *self.shape[1:])
        nbytes = prod(shape) * _DTYPES[self.qtype].itemsize
        return SafetensorsWeight(self._path, name, self.qtype, shape, self._offset + start * row, nbytes)

    def _read(self, tensor: torch.Tensor) -> None:
        if self._nbytes:
            self._read_from(tensor.view(-1).view(torch.uint8).numpy().data)

    def _read_from(self, buffer: memoryview, first: int = 0) -> None:
        what = f"tensor {self.name!r}"
        read_into(buffer, self._path, self._offset + first, what, finite_check(self.qtype, what))


class SafetensorsFile:
    """The table of one file. Raises ModelError when it is cut short, damaged or of an unknown type."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._size = file.seek(0, 2)
                file.seek(0)
                length = int.from_bytes(file.read(8), "little")
                if self._size < 8 or length > min(_MAX_HEADER, self._size - 8):
                    raise self._damaged(f"its header should take {length} bytes, the file has {self._size}")
                header = file.read(length)
        except OSError as error:
            raise ModelError(f"cannot read {self.path}: {error.strerror or error}") from None
        try:
            self.header: dict[str, Any] = json.loads(header)
            self.header.pop("__metadata__", None)
        except (ValueError, AttributeError, RecursionError):
            raise self._damaged("its header is not JSON") from None
        self._start = 8 + length

    def sources(self) -> Iterator[SafetensorsWeight]:
        """Every tensor, in the order of the header. Raises ModelError for an entry that cannot be."""
        for name, entry in self.header.items():
            try:
                qtype, shape = entry["dtype"], tuple(map(int, entry["shape"]))
                first, last = map(int, entry["data_offsets"])
            except (TypeError, KeyError, ValueError, OverflowError):
                raise self._damaged(f"the entry of tensor {name!r} is not complete") from None
            if qtype not in _DTYPES:
                raise ModelError(f"{self.path}: tensor {name!r} has type {qtype!r}; known are {', '.join(_DTYPES)}")
            if first < 0 or min(shape, default=0) < 0 or last - first != prod(shape) * _DTYPES[qtype].itemsize:
                raise self._damaged(f"tensor {name!r} has {last - first} bytes for shape {list(shape)} of {qtype}")
            if self._start + last > self._size:
                raise self._damaged(f"tensor {name!r} ends at byte {self._start + last}, the file has {self._size}")
            yield SafetensorsWeight(self.path, name, qtype, shape, self._start + first, last - first)

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is not a whole safetensors file: {what}; fetch it again")
