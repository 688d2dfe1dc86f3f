"""A GGUF file's tensors under Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from pathlib import Path

import numpy as np
import torch

from octavo.errors import ModelError
from octavo.gguf.dequantize import dequantize, dequantize_into
from octavo.gguf.families import INTERLEAVED, TENSORS, layers_of, layout_of
from octavo.gguf.header import GGUFFile, TensorInfo

_TOP = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_PIECE = 1 << 20  # bytes that are read at a time: they stay in the processor's cache until they are used
# Part of the configuration, not of the weights.
_DERIVED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def hf_name(name: str, layout: str) -> str | None:
    """The checkpoint name of a GGUF tensor in a file of that `layout_of`; None where there is none."""
    parts = _LAYER | TENSORS.get(layout, {})
    if match := re.fullmatch(r"blk\.(\d+)\.exp_probs_b\.bias", name):
        return f"model.layers.{match[1]}.mlp.gate.e_score_correction_bias"
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{parts[part]}.{kind}" if part in parts else None
    if match := re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight", name):  # Mixtral's first files
        return f"model.layers.{match[1]}.mlp.experts.{match[3]}.{match[2]}_proj.weight"
    base, _, kind = name.rpartition(".")
    return f"{_TOP[base]}.{kind}" if base in _TOP else None


class GGUFWeight:
    """See `WeightSource`; `raw` is for layers that compute on the quantised blocks themselves."""

    def __init__(self, name: str, file: GGUFFile, info: TensorInfo, heads: int | None) -> None:
        self.name, self.shape, self.qtype = name, info.shape, info.qtype
        self._file, self._info, self._heads = file, info, heads

    def raw(self) -> np.ndarray:
        """Stored bytes, uint8 [rows, row_bytes], rows in the order of the Hugging Face checkpoint."""
        raw = self._file.raw(self._info)
        return self._in_order(raw, raw.shape[-1] if len(self.shape) > 1 else raw.shape[-1] // self.shape[0])

    def raw_pieces(self, rows: slice, multiple: int = 1) -> Iterator[np.ndarray]:
        """`raw` of ``rows`` (start and stop given) of a matrix, some at a time and in order: a multiple of ``multiple``
        at a time, but for the last. A piece is valid until the next one."""
        head = self.shape[0] // self._heads if self._heads else 1
        if rows.start % head or rows.stop % head:  # parts of heads
            yield self.raw()[rows]
            return
        unit = lcm(multiple, head)
        count = min(max(1, _PIECE // (unit * self._info.row_bytes)) * unit, rows.stop - rows.start)
        room = np.empty((count, self._info.row_bytes), np.uint8)
        for first in range(rows.start, rows.stop, max(1, count)):
            piece = room[: rows.stop - first]
            self._file.read_rows(self._info, first, piece)
            yield self._in_order(piece, self._info.row_bytes)

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


def gguf_weights(path: str | Path) -> Iterator[tuple[str, GGUFWeight]]:
    """Name and source of every tensor of the file at ``path``. Raises ModelError for a tensor without a place."""
    file = GGUFFile(path)
    arch = file.architecture
    heads = int(np.max(file.metadata.get(f"{arch}.attention.head_count", 0)))
    kv_heads = int(np.max(file.metadata.get(f"{arch}.attention.head_count_kv", heads)))
    layers, further = layers_of(file), file.metadata.get(f"{arch}.nextn_predict_layers")
    layout = layout_of(file)
    for info in file.tensors.values():
        layer = re.match(r"blk\.(\d+)\.", info.name)
        if info.name in _DERIVED or (layer and further and int(layer[1]) >= layers):
            continue
        if info.name.endswith("ffn_gate_inp_shexp.weight") and len(info.shape) == 1:
            info = replace(info, shape=(1, *info.shape))
        name = hf_name(info.name, layout)
        if name is None:
            raise ModelError(f"{path}: tensor {info.name!r} is not part of architecture {arch!r}")
        interleaved = None
        if arch in INTERLEAVED:
            interleaved = heads if ".q_proj." in name else kv_heads if ".k_proj." in name else None
            rows = info.shape[0] if info.shape else 1
            if interleaved and rows % (2 * interleaved):
                raise ModelError(
                    f"{path}: tensor {info.name!r} has {rows} rows, which are not {interleaved} heads of an "
                    "even size; the file is damaged: fetch it again"
                )
        yield name, GGUFWeight(name, file, info, interleaved)
