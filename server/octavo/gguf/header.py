"""Reading a GGUF file's header: metadata and the table of tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian). Arrays of
strings, which make up nearly all of a header, are only walked over; they become Python strings when somebody asks for
them.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.system.file_reading import read_into
from octavo.system.finite_numbers import finite_check

# Where a block has numbers in float16, in bytes: its scale, and its minimum or what minima are multiplied with.
_SCALES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
_INFINITY = 0x7C00


def block_check(qtype: str, block_bytes: int, what: str) -> Callable[[memoryview], None] | None:
    """Like `finite_check`, of whole blocks of a tensor of type ``qtype``; None for types that have no such numbers."""
    places = _SCALES.get(qtype)
    if places is None and qtype != "IQ1_M":
        return finite_check(qtype, what)

    def check(piece: memoryview) -> None:
        halves = np.frombuffer(piece, np.uint16).reshape(-1, block_bytes // 2)
        for numbers in [halves[:, at // 2] for at in places] if places else [_scales_of_iq1_m(halves)]:
            if (numbers & 0x7FFF).max() >= _INFINITY:
                raise ModelError(f"{what} holds NaN or infinite numbers; the file is damaged: fetch it again")

    return check


def _scales_of_iq1_m(words: np.ndarray) -> np.ndarray:
    """Return the scale of each block of uint16 [blocks, 28]: the top 4 bits of each of the last four words."""
    four: np.ndarray = words[:, 24:28] >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    scales: np.ndarray = np.bitwise_or.reduce(four, axis=1)
    return scales


_SCALARS = {  # GGUF value type -> struct code
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_UNPACK = {kind: struct.Struct("<" + code) for kind, code in _SCALARS.items()}
_U64 = struct.Struct("<Q").unpack_from
_MAX_DIMS = 4

# ggml tensor type -> (name, values a block, bytes a block). The file stores the number alone.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: ``shape`` has the fastest dimension last (torch's order), ``offset`` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    qtype: str
    offset: int
    nbytes: int
    block_bytes: int
    part: Path | None = None  # the file that it lies in, where that is another one of the model's

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, that is of the last dimension."""
        return self.nbytes // max(1, prod(self.shape[:-1]))


class _StringArray:
    """Strings that are read from the file on access."""

    def __init__(self, data: mmap.mmap, offset: int, count: int) -> None:
        self.data, self.offset, self.count = data, offset, count

    def decode(self) -> list[str]:
        out, at, data = [], self.offset, self.data
        for _ in range(self.count):
            (length,) = _U64(data, at)
            at += 8 + length
            out.append(data[at - length : at].decode("utf-8", "replace"))
        return out


class _Metadata(Mapping[str, Any]):
    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _StringArray):
            value = self._values[key] = value.decode()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class GGUFFile:
    """``metadata``: key -> value (arrays as numpy arrays, lists of str); ``tensors``: name -> TensorInfo.

    Raises ModelError when the file is not GGUF, is cut short, or holds a tensor of a type that is not known.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.digest = ""  # of all headers, where a model has several files
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, 2)
                if size < 24:
                    raise ModelError(f"{self.path} is not a GGUF file: it has only {size} bytes; fetch it again")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"cannot read {self.path}: {error.strerror or error}") from None
        self._at = 0
        try:
            self._read_header()
        except (struct.error, IndexError, ValueError, TypeError, OverflowError, MemoryError, RecursionError):
            raise ModelError(
                f"{self.path} is not a whole GGUF file: its header is cut short or damaged at byte {self._at} "
                f"of {size}; fetch it again"
            ) from None

    @property
    def architecture(self) -> str:
        """The value of general.architecture, '' if there is none."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def header_bytes(self) -> int:
        """Bytes of the header."""
        return self._at

    def header_sha256(self) -> str:
        """SHA-256 of the header's bytes, in hex."""
        return self.digest or hashlib.sha256(self._data[: self._at]).hexdigest()

    def add_part(self, part: GGUFFile) -> None:
        """Have the tensors of another file of the same model, too."""
        self.tensors |= {name: replace(info, part=part.path) for name, info in part.tensors.items()}

    def raw(self, info: TensorInfo) -> np.ndarray:
        """The tensor's bytes, uint8 [rows, row_bytes], freshly read."""
        rows = np.empty((info.nbytes // info.row_bytes, info.row_bytes), np.uint8)
        self.read_rows(info, 0, rows)
        return rows

    def read_rows(self, info: TensorInfo, first: int, rows: np.ndarray) -> None:
        """Fill ``rows`` uint8 [n, row_bytes], contiguous, with the bytes of the tensor's rows ``first`` ..."""
        what = f"tensor {info.name!r}"
        offset = info.offset + first * info.row_bytes
        check = block_check(info.qtype, info.block_bytes, what)
        read_into(rows.reshape(-1).data, info.part or self.path, offset, what, check, info.block_bytes)

    def _read_header(self) -> None:
        size = len(self._data)
        magic, version, num_tensors, num_values = struct.unpack_from("<4sIQQ", self._data, 0)
        if magic != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
        if version not in (2, 3):
            hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise ModelError(f"{self.path}: GGUF version {version} is not supported{hint}; versions 2 and 3 are")
        self._at = 24
        values = {}
        for _ in range(num_values):
            key = self._string()
            values[key] = self._value(self._number("I"))
        self.metadata = _Metadata(values)

        found = []
        for _ in range(num_tensors):
            name = self._string()
            num_dims = self._number("I")
            if num_dims > _MAX_DIMS:
                raise ValueError(num_dims)
            shape = tuple(self._number("Q") for _ in range(num_dims))[::-1]
            if 0 in shape:
                raise ValueError(shape)
            kind = self._number("I")
            found.append((name, shape, kind, self._number("Q")))
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(alignment)
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in found:
            if kind not in TENSOR_TYPES:
                raise ModelError(
                    f"{self.path}: tensor {name!r} has GGUF type {kind}, which this version does not know; "
                    f"known are {', '.join(t[0] for t in TENSOR_TYPES.values())}; use a file quantised to one of these"
                )
            qtype, block, block_bytes = TENSOR_TYPES[kind]
            if (shape[-1] if shape else 1) % block:
                raise ModelError(
                    f"{self.path}: tensor {name!r} has rows of {shape[-1]} values, not a multiple of {qtype}'s "
                    f"{block}; the file is damaged: fetch it again"
                )
            nbytes = prod(shape) // block * block_bytes
            if start + offset + nbytes > size:
                raise ModelError(
                    f"{self.path} is cut short: tensor {name!r} ends at byte {start + offset + nbytes} "
                    f"but the file has {size}; fetch it again"
                )
            self.tensors[name] = TensorInfo(name, shape, qtype, start + offset, nbytes, block_bytes)

    def _number(self, code: str) -> int:
        value: int = struct.unpack_from("<" + code, self._data, self._at)[0]
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._number("Q")
        if length > len(self._data) - self._at:
            raise ValueError(length)
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _UNPACK:
            raise ValueError(kind)
        (value,) = _UNPACK[kind].unpack_from(self._data, self._at)
        self._at += _UNPACK[kind].size
        return value

    def _array(self) -> Any:
        kind, count = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            return [self._array() for _ in range(count)]
        if kind == _STRING:
            if count * 8 > len(self._data) - self._at:
                raise ValueError(count)
            start, at, data, size = self._at, self._at, self._data, len(self._data)
            for _ in range(count):
                at += 8 + _U64(data, at)[0]
            if at > size:
                raise ValueError(at)
            self._at = at
            return _StringArray(data, start, count)
        if kind not in _UNPACK:
            raise ValueError(kind)
        dtype = np.dtype("<" + _SCALARS[kind]) if kind != 7 else np.dtype(bool)
        values = np.frombuffer(self._data, dtype, count=count, offset=self._at)
        self._at += values.nbytes
        return values
