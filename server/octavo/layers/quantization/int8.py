"""Weights in 8 or fewer bits with int8 activations, for CPUs (see octavo_kernels.quant).

A GGUF tensor keeps the file's own codes, of 2 to 8 bits (`octavo_kernels.packing.GGUF_TYPES`); anything else is rounded
to 8 bits, in groups of 32 columns.
Activations are quantised row by row as they come, so a row's result does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.errors import ConfigError
from octavo.layers.quantization.base import ExpertsBase, LinearBase, LinearMethod, MoEMethod, QuantizationConfig, Shard
from octavo.layers.quantization.experts import PackedMoEMethod
from octavo.layers.quantization.quantized_rows import QuantizedRowsMethod
from octavo.layers.weights import WeightSlot, WeightSource, fill_tensor
from octavo_kernels.cpu import quantized_head
from octavo_kernels.packing import (
    GGUF_TYPES,
    block_width,
    concat,
    fits_row_scales,
    pack_gguf,
    pack_row_scaled,
    pack_w8_pieces,
    packed_kind,
    packed_nbytes,
)
from octavo_kernels.quant import BLOCK, BY_ROW, Kind, PackedLinear, QuantizedRows, part_nbytes
from octavo_kernels.weight_memory import empty_weight

# Logits this far below the best one are those of tokens e times less likely: 8 bits move them by some hundredths.
HEAD_MARGIN = 1.0


def create_bias(layer: LinearBase) -> None:
    """Create the bias in float32, as the kernels add it: one converted while a step is recorded would be gone at
    replay."""
    if layer.has_bias:
        layer.bias = nn.Parameter(torch.empty(layer.output_size, dtype=torch.float32), requires_grad=False)


class Int8LinearMethod(QuantizedRowsMethod):
    """One layer's weight as a `PackedLinear`.

    ``activation_terms`` 2: activations of 15 bits, 1: of 8 bits; so many at least, if the weights have to be rounded
    too, ``terms_if_rounded``. ``margin``: see `PackedLinear`.
    """

    def __init__(self, activation_terms: int = 2, margin: float = 0.0, terms_if_rounded: int = 1) -> None:
        self.activation_terms, self.margin, self.terms_if_rounded = activation_terms, margin, terms_if_rounded
        self.packed: PackedLinear | None = None
        self._parts: dict[int, PackedLinear] = {}
        self._room: list[Tensor] = []  # for each part's bytes, side by side, where all are of one kind

    def create_weights(self, layer: LinearBase, dtype: torch.dtype) -> None:
        """See `LinearMethod`. The packed bytes are made now if the stored tensors become all of one kind, else as they
        come."""
        create_bias(layer)
        if self.activation_terms == BY_ROW:
            return
        kept = [
            qtype if qtype is not None and self._keeps(qtype, shard) else None
            for qtype, shard in zip(layer.stored_types, layer.shards, strict=True)
        ]
        if len({packed_kind(qtype) for qtype in kept}) == 1:
            sizes = [packed_nbytes(shard.num_rows, layer.input_size, kept[0]) for shard in layer.shards]
            self._room = list(empty_weight([sum(sizes)], torch.uint8).split(sizes))

    def weight_slots(self, layer: LinearBase, part: int, shard: Shard) -> Iterator[WeightSlot]:
        """See `LinearMethod`."""

        def packed_bytes(qtype: str) -> int:
            columns = shard.columns.stop - shard.columns.start
            if self.activation_terms == BY_ROW:
                return part_nbytes(shard.num_rows, columns, Kind(8, by_row=True))
            return packed_nbytes(shard.num_rows, columns, qtype if self._keeps(qtype, shard) else None)

        yield WeightSlot(part, "weight", shard.shape, lambda source: self._pack(part, shard, source), packed_bytes)
        if layer.bias is not None:
            rows = layer.bias[shard.offset : shard.offset + shard.num_rows]
            yield WeightSlot(part, "bias", shard.shape[:1], lambda source: fill_tensor(rows, source, shard.rows))

    def _pack(self, part: int, shard: Shard, source: WeightSource) -> None:
        shape = (shard.num_rows, shard.columns.stop - shard.columns.start)
        room = self._room[part] if self._room else None
        if self._keeps(source.qtype, shard):
            rows = cast(Any, source).raw_pieces(shard.rows, BLOCK, None if shard.has_whole_rows else shard.columns)
            self._parts[part] = pack_gguf(rows, source.qtype, shape, self.activation_terms, room)
            return
        values = (piece[:, shard.columns] for piece in source.pieces(torch.float32, shard.rows))
        if self.activation_terms == BY_ROW:
            rows, numbers = zip(*map(_round_rows, values), strict=True)
            self._parts[part] = pack_row_scaled(torch.cat(rows), torch.cat(numbers))
            return
        self.activation_terms = max(self.activation_terms, self.terms_if_rounded)
        self._parts[part] = pack_w8_pieces(values, shape, self.activation_terms, room)

    def _keeps(self, qtype: str, shard: Shard) -> bool:
        """True if a tensor's own codes are kept, of types that are packed as they are. Raises ConfigError if columns
        are split within a block, whose numbers would have to be rounded anew."""
        if self.activation_terms == BY_ROW or qtype not in GGUF_TYPES:
            return False
        width, block = shard.shape[1], block_width(qtype)
        if any(column % block for column in (shard.columns.start, shard.columns.stop) if column != width):
            ranks, blocks = round(width / (shard.columns.stop - shard.columns.start)), width // block
            raise ConfigError(
                f"{width} columns in {blocks} blocks of {block} ({qtype}) cannot be split over {ranks} ranks; "
                "deal experts whole with --enable-expert-parallel, choose a tensor parallel size that divides "
                f"{blocks}, or --quantization none"
            )
        return True

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """See `LinearMethod`."""
        parts = [replace(self._parts[part], activation_terms=self.activation_terms) for part in sorted(self._parts)]
        self.packed = replace(concat(parts), margin=self.margin)
        self._parts.clear()
        self._room.clear()
        for number, part in enumerate(self.packed.parts):
            layer.register_buffer(f"packed_{number}", part.data, persistent=False)

    def weight_kinds(self, layer: LinearBase) -> list[tuple[Tensor, str]]:
        """See `LinearMethod`."""
        assert self.packed is not None
        parts = {id(part.data): part.stored_as for part in self.packed.parts}
        return [(tensor, parts.get(id(tensor), kind)) for tensor, kind in super().weight_kinds(layer)]

    def apply(self, layer: LinearBase, x: Tensor | QuantizedRows, bias: Tensor | None) -> Tensor:
        """See `LinearMethod`."""
        assert self.packed is not None
        return octavo_kernels.quantized_linear(x, self.packed, bias)

    def find_best(self, x: Tensor, wants_logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """See `QuantizedRowsMethod`."""
        assert self.packed is not None
        return quantized_head(x, self.packed, wants_logits) if self.packed.margin else None

    def apply_gated(self, layer: LinearBase, x: Tensor | QuantizedRows, terms: int) -> QuantizedRows:
        """See `QuantizedRowsMethod`."""
        assert self.packed is not None
        if layer.bias is not None:
            return octavo_kernels.silu_and_mul_quantize(self.apply(layer, x, layer.bias), terms)
        rows = x if isinstance(x, QuantizedRows) else octavo_kernels.quantize_rows(x, self.activation_terms)
        return octavo_kernels.gated_linear_quantize(rows, self.packed, terms)

    def keeps_values(self, qtype: str) -> bool:
        """See `PackedMethod`: where the file's own codes are kept."""
        return qtype in GGUF_TYPES

    @property
    def held(self) -> PackedLinear:
        """See `PackedMethod`."""
        assert self.packed is not None
        return self.packed

    def embed(self, ids: Tensor, dtype: torch.dtype, first: int | None = None) -> Tensor:
        """See `PackedMethod`."""
        assert self.packed is not None
        return octavo_kernels.quantized_embedding(ids, self.packed, dtype, first)


def _round_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 ``[N, K]`` around 128 and scales float32 ``[N]`` of some rows. Raises ValueError where they are not
    finite."""
    highest = values.abs().amax(dim=1)
    if not bool(highest.isfinite().all()):
        raise ValueError("weight: holds values that are not finite: they cannot be held in 8 bits")
    inverse = torch.where(highest > 0, 127.0 / highest, torch.zeros_like(highest))
    codes = (values * inverse[:, None]).round_().clamp_(-127, 127).add_(Kind(8).zero).to(torch.uint8)
    return codes, highest / 127


class Int8Config(QuantizationConfig):
    """8 or 4 bits everywhere, with finer activations where they matter most.

    ``per_channel``: linear layers have one scale a channel and take rows with one scale, whose products are plain sums
    of integers. The head and experts keep their groups.
    """

    name = "int8"

    def __init__(self, per_channel: bool = False) -> None:
        self.per_channel = per_channel

    def linear_method(self, name: str, layer: LinearBase) -> LinearMethod:
        """See `QuantizationConfig`."""
        if layer.has_many_rows and fits_row_scales(layer.input_size):
            # One scale a row, whose sums stay integers: 1.3 times the texts a second. Not where values behind an
            # activation come in, a few of which are large: MiniLM's cosine to float32 is 0.9989 with it, else 0.9995.
            return Int8LinearMethod(1 if name.endswith(("fc2", "down_proj")) else BY_ROW)
        if name.endswith("lm_head"):
            return Int8LinearMethod(activation_terms=2, margin=HEAD_MARGIN)
        if self.per_channel and layer.takes_row_scales and fits_row_scales(layer.input_size):
            return Int8LinearMethod(BY_ROW)
        terms_if_rounded = 2 if name.endswith("down_proj") else 1
        return Int8LinearMethod(2 if _needs_precision(name) else 1, terms_if_rounded=terms_if_rounded)

    def moe_method(self, name: str, layer: ExpertsBase) -> MoEMethod:
        """See `QuantizationConfig`."""
        return PackedMoEMethod(self, name)


def _needs_precision(name: str) -> bool:
    """True if the layer at module path ``name`` takes activations of 15 bits instead of 8.

    The head's errors go straight into the logits, those before attention into exponentials, and the first layer's
    inputs are the embeddings as they are, with the widest spread within a group. With 8 bits everywhere the embedded
    model agrees with its float32 self on 96.2 % of its best tokens (KL 3.6e-3 nats), with these layers at 15 bits on
    98.0 % (1.3e-3), and at 15 bits everywhere on all of them for 1.6 times the arithmetic. If the weights lose to 8
    bits as well, one more layer is needed to keep to 97 %: the one that adds to the residual, and has the widest
    inputs.
    """
    return name.endswith("qkv_proj") or "layers.0." in name
