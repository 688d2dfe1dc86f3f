"""A GGUF file's tensors under Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import lcm
from pathlib import Path

import numpy as np
import torch

from octavo.errors import ModelError
from octavo.gguf.dequantize import dequantize, dequantize_into
from octavo.gguf.families import INTERLEAVED
from octavo.gguf.header import GGUFFile, TensorInfo
from octavo.gguf.names import joint_type, named_tensors
from octavo.gguf.split import open_gguf

_PIECE = 1 << 20  # bytes that are read at a time: they stay in the processor's cache until they are used


class GGUFWeight:
    """See `WeightSource`; `raw` is for layers that compute on the quantised blocks themselves."""

    def __init__(self, name: str, file: GGUFFile, info: TensorInfo, heads: int | None) -> None:
        self.name, self.shape, self.qtype = name, info.shape, info.qtype
        self._file, self._info, self._heads = file, info, heads

    def raw(self) -> np.ndarray:
        """Stored bytes, uint8 [rows, row_bytes], rows in the order of the Hugging Face checkpoint."""
        raw = self._file.raw(self._info)
        return self._in_order(raw, raw.shape[-1] if len(self.shape) > 1 else raw.shape[-1] // self.shape[0])

    def raw_pieces(self, rows: slice, multiple: int = 1, columns: slice | None = None) -> Iterator[np.ndarray]:
        """`raw` of ``rows`` (start and stop given) of a matrix, some at a time and in order: a multiple of ``multiple``
        at a time, but for the last. A piece is valid until the next one. ``columns``: of these alone, whole blocks."""
        taken = slice(None) if columns is None else self._bytes_of(columns)
        head = self.shape[0] // self._heads if self._heads else 1
        if rows.start % head or rows.stop % head:  # parts of heads
            yield self.raw()[rows, taken]
            return
        unit = lcm(multiple, head)
        count = min(max(1, _PIECE // (unit * self._info.row_bytes)) * unit, rows.stop - rows.start)
        room = np.empty((count, self._info.row_bytes), np.uint8)
        for first in range(rows.start, rows.stop, max(1, count)):
            piece = room[: rows.stop - first]
            self._file.read_rows(self._info, first, piece)
            yield self._in_order(piece, self._info.row_bytes)[:, taken]

    def _bytes_of(self, columns: slice) -> slice:
        """Return the number of bytes of ``columns`` in a row; they are whole blocks."""
        first, last = (columns.start * self._info.row_bytes, columns.stop * self._info.row_bytes)
        return slice(first // self.shape[-1], last // self.shape[-1])

    def _in_order(self, raw: np.ndarray, width: int) -> np.ndarray:
        """llama.cpp stores the two halves of each rotary head interleaved: put them back one after the other. A row has
        ``width`` bytes."""
        if not self._heads:
            return raw
        rows = raw.reshape(-1, self.shape[0] // self._heads // 2, 2, width).swapaxes(1, 2)
        return np.ascontiguousarray(rows).reshape(raw.shape)

    def load(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read and dequantise the tensor as ``dtype`` (None: float32 or as stored)."""
        return dequantize(self.raw(), self.qtype, dtype).reshape(self.shape)

    def load_into(self, target: torch.Tensor) -> None:
        """Read and dequantise the tensor into ``target``, which has its shape."""
        if target.device.type != "cpu" or not target.is_contiguous():
            target.copy_(self.load(target.dtype))
            return
        raw = self.raw()
        dequantize_into(target.view(len(raw), -1), raw, self.qtype)

    def pieces(self, dtype: torch.dtype, rows: slice) -> Iterator[torch.Tensor]:
        """See `WeightSource`."""
        for raw in self.raw_pieces(rows):
            yield dequantize(raw, self.qtype, dtype)

    def __getitem__(self, index: int | slice) -> GGUFWeight:
        """See `WeightSource`."""
        stride = self._info.nbytes // self.shape[0]
        if isinstance(index, int):
            name, start, count, shape = f"{self.name}[{index}]", index, 1, self.shape[1:]
        else:
            name, start, count = f"{self.name}[{index.start}:{index.stop}]", index.start, index.stop - index.start
            shape = (count, *self.shape[1:])
        offset = self._info.offset + start * stride
        info = replace(self._info, shape=shape, offset=offset, nbytes=count * stride)
        return GGUFWeight(name, self._file, info, None)


class LatentProjection:
    """See `WeightSource`: what makes all heads' keys and values of latents, ``[Hq (N + V), L]``, of a file that holds
    it as ``keys [Hq, L, N]`` and ``values [Hq, V, L]``."""

    def __init__(self, name: str, keys: GGUFWeight, values: GGUFWeight, rows: int | slice = slice(None)) -> None:
        self.name, self._keys, self._values, self._rows = name, keys, values, rows
        self.qtype = joint_type(keys.qtype, values.qtype)
        heads, latent, size = keys.shape
        number = range(heads * (size + values.shape[1]))
        self.shape: tuple[int, ...] = (latent,) if isinstance(rows, int) else (len(number[rows]), latent)

    def load(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See `WeightSource`."""
        keys, values = self._keys.load(dtype), self._values.load(dtype)
        whole = torch.cat([keys.transpose(1, 2), values], dim=1)
        return whole.reshape(-1, keys.shape[1])[self._rows]

    def load_into(self, target: torch.Tensor) -> None:
        """See `WeightSource`."""
        target.copy_(self.load(target.dtype))

    def pieces(self, dtype: torch.dtype, rows: slice) -> Iterator[torch.Tensor]:
        """See `WeightSource`."""
        yield self.load(dtype)[rows]

    def __getitem__(self, index: int | slice) -> LatentProjection:
        """See `WeightSource`; the whole is read for each part."""
        heads, _, size = self._keys.shape
        part = range(heads * (size + self._values.shape[1]))[self._rows][index]  # type: ignore[index]
        rows = part if isinstance(part, int) else slice(part.start, part.stop)
        return LatentProjection(self.name, self._keys, self._values, rows)


def _latent_projections(path: str | Path, weights: Iterable[tuple[str, GGUFWeight]]) -> Iterator[tuple[str, Weight]]:
    """``weights`` with ``k_b_proj`` and ``v_b_proj`` of each layer as one ``kv_b_proj``. Raises ModelError where they
    are not of one size."""
    halves: dict[str, dict[str, GGUFWeight]] = {}
    whole = set()
    for name, weight in weights:
        match = re.fullmatch(r"(.*\.self_attn\.)(k|v)_b_proj\.weight", name)
        if match is None:
            whole.add(name)
            yield name, weight
        else:
            halves.setdefault(f"{match[1]}kv_b_proj.weight", {})[match[2]] = weight
    for name, parts in halves.items():
        if name in whole:  # some files hold both
            continue
        shapes = [part.shape for part in parts.values()]
        if len(parts) != 2 or any(len(shape) != 3 for shape in shapes) or parts["k"].shape[:2] != parts["v"].shape[::2]:
            found = ", ".join(f"attn_{part}_b {list(weight.shape)}" for part, weight in parts.items())
            raise ModelError(
                f"{path}: keys and values of {name!r} are {found}, not attn_k_b [heads, latent, key] and attn_v_b "
                "[heads, value, latent]; the file is damaged: fetch it again"
            )
        yield name, LatentProjection(name, parts["k"], parts["v"])


Weight = GGUFWeight | LatentProjection


def gguf_weights(path: str | Path) -> Iterator[tuple[str, Weight]]:
    """Name and source of every tensor of the file at ``path``. Raises ModelError for a tensor without a place."""
    return _latent_projections(path, _stored_weights(path))


def gguf_tensor(path: str | Path, name: str) -> GGUFWeight:
    """The tensor that the file at ``path`` calls ``name``, which is no part of the layers. Raises ModelError."""
    file = open_gguf(path)
    if name not in file.tensors:
        raise ModelError(f"{path}: tensor {name!r} is missing; the file is damaged: fetch it again")
    return GGUFWeight(name, file, file.tensors[name], None)


def _stored_weights(path: str | Path) -> Iterator[tuple[str, GGUFWeight]]:
    file = open_gguf(path)
    arch = file.architecture
    heads = int(np.max(file.metadata.get(f"{arch}.attention.head_count", 0)))
    kv_heads = int(np.max(file.metadata.get(f"{arch}.attention.head_count_kv", heads)))
    for name, info in named_tensors(file):
        interleaved = None
        if arch in INTERLEAVED:
            interleaved = heads if ".q_proj." in name else kv_heads if ".k_proj." in name else None
            rows = info.shape[0] if info.shape else 1
            if interleaved and rows % (2 * interleaved):
                raise ModelError(
                    f"{path}: tensor {info.name!r} has {rows} rows, which are not {interleaved} heads of an "
                    "even size; the file is damaged: fetch it again"
                )
        yield name, GGUFWeight(info.name, file, info, interleaved)
