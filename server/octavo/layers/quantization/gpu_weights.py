"""Codes of 4 or 8 bits on a GPU, multiplied with activations of 16 bits, or of 8 where these are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.layers.quantization.base import LinearBase, LinearMethod, Shard
from octavo.layers.quantization.canonical import FloatCodes, GroupCodes, GroupScaled, StoredWeight, TableCodes
from octavo.layers.quantization.fp4 import E2M1
from octavo.layers.quantization.scaled_weight import device_multiplies, joined, scaled_of
from octavo.layers.quantization.weight_format import WeightFormat
from octavo.layers.weights import WeightSlot, fill_tensor
from octavo_kernels import ScaledWeight
from octavo_kernels.group_weight import FORMS, TILE, WORDS, GroupWeight, block_columns, group_problem
from octavo_kernels.packing import pack_group_weight
from octavo_kernels.scaled_weight import BLOCK

DTYPES = (torch.bfloat16, torch.float16)  # of activations that there are kernels for
Piece = GroupWeight | ScaledWeight | Tensor  # of a layer's weight


def form_of(weight: StoredWeight) -> str | None:
    """The form in which a GPU's kernels take the codes of ``weight`` (`GroupWeight`), None if they do not."""
    form = None
    if isinstance(weight, GroupCodes):
        form = {4: "int4", 8: "int8"}.get(weight.bits)
    elif isinstance(weight, FloatCodes):
        form = "e4m3"
    elif isinstance(weight, TableCodes) and torch.equal(weight.table, E2M1):
        form = "e2m1"
    if form is None or not isinstance(weight, GroupScaled):
        return None
    return form if group_problem(form, weight.shape[1], weight.group) is None else None


def pack(weight: GroupScaled, form: str, device: torch.device) -> GroupWeight:
    """The weight on ``device``. Scales that are powers of two, of 32 columns each, become exponents."""
    zeros, order = (weight.zeros, weight.order) if isinstance(weight, GroupCodes) else (None, None)
    scales = weight.scales
    if form == "e2m1" and scales.dtype == torch.float32:
        mantissas, exponents = torch.frexp(scales)
        if bool((mantissas == 0.5).all()) and bool((exponents >= -126).all()):
            scales = (exponents + 126).to(torch.uint8)
    codes = weight.codes.view(torch.uint8)
    return pack_group_weight(codes, scales, zeros, order, form=form, group=weight.group, device=device)


def device_bytes(format_: WeightFormat, rows: int, columns: int, stacked: bool, size: int = 2) -> int:
    """The bytes of a weight in ``format_`` on a GPU, kept as by `GPUWeightMethod.keep`; ``size``: bytes of a value.
    ``stacked``: one of experts' weights, which `StackedMoEMethod` joins if they fill tiles."""
    how = format_.device_codes
    if how is None:
        return size * rows * columns
    group, by_row = how.group or columns, not 0 < how.group < columns
    multiplies = by_row or (format_.activations == "fp8" and group == BLOCK)
    if format_.activations is not None and multiplies:
        return rows * (columns + 4 * -(-columns // group))
    form, joins = {4: "int4", 8: "int8"}[how.bits], rows % TILE == 0 and not how.ordered
    if group_problem(form, columns, group) is not None or (stacked and not joins):
        return size * rows * columns
    codes = -(-rows // TILE) * TILE * -(-columns // block_columns(form)) * 4 * WORDS
    return codes + rows * -(-columns // group) * how.scale_bytes


class GPUWeightMethod(LinearMethod):
    """One layer's weight as one piece, or as several where the parts of a merged layer differ.

    ``activations`` is the 8-bit type that activations may be rounded to, None: they may not. A part in groups that have
    no kernel is kept as a matrix in the dtype of the activations.
    """

    is_expert = False  # one of those that `StackedMoEMethod` joins

    def __init__(self, activations: torch.dtype | None = None) -> None:
        self.weights: list[Piece] = []
        self._activations = activations
        self._parts: dict[int, Piece] = {}
        self._dtype, self._device = torch.bfloat16, torch.device("cpu")

    def create_weights(self, layer: LinearBase, dtype: torch.dtype) -> None:
        """See `LinearMethod`; the weight itself is made of the stored tensors."""
        self._dtype, self._device = dtype, torch.get_default_device()
        if layer.has_bias:
            layer.bias = nn.Parameter(torch.empty(layer.output_size, dtype=dtype), requires_grad=False)

    def bias_slots(self, layer: LinearBase, part: int, shard: Shard) -> Iterator[WeightSlot]:
        """The slot of a part's bias, if there is one."""
        if layer.bias is not None:
            rows = layer.bias[shard.offset : shard.offset + shard.num_rows]
            yield WeightSlot(part, "bias", shard.shape[:1], lambda source: fill_tensor(rows, source, shard.rows))

    def keep(self, part: int, weight: StoredWeight) -> None:
        """Take what part ``part`` of the layer is filled with."""
        if self._activations is not None and device_multiplies(self._activations, self._device):
            scaled = scaled_of(weight, self._activations, self._device)
            if scaled is not None:
                self._parts[part] = scaled
                return
        form = form_of(weight)
        if form is None or not isinstance(weight, GroupScaled):
            self._parts[part] = weight.dequantize(self._dtype).to(self._device)
        else:
            self._parts[part] = pack(weight, form, self._device)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """See `LinearMethod`."""
        for number in sorted(self._parts):
            part = self._parts[number]
            both = _joined(self.weights[-1], part) if self.weights else None
            if both is not None:
                self.weights[-1] = both
            else:
                self.weights.append(part)
        self._parts.clear()
        for number, weight in enumerate(self.weights):
            for name, tensor in _tensors_of(weight).items():
                layer.register_buffer(f"{name}_{number}", tensor, persistent=False)

    def weight_kinds(self, layer: LinearBase) -> list[tuple[Tensor, str]]:
        """See `LinearMethod`: scales and zero points count to their codes."""
        packed = (weight for weight in self.weights if isinstance(weight, GroupWeight))
        forms = {id(tensor): weight.form for weight in packed for tensor in weight.tensors.values()}
        return [(tensor, forms.get(id(tensor), kind)) for tensor, kind in super().weight_kinds(layer)]

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `LinearMethod`."""
        if len(self.weights) == 1:
            return _product(x, self.weights[0], bias)
        out = torch.cat([_product(x, weight, None) for weight in self.weights], dim=1)
        return out if bias is None else out + bias

    def warm_up(self, layer: LinearBase, max_rows: int) -> None:
        """See `LinearMethod`."""
        for rows in sorted({min(rows, max_rows) for weight in self.weights for rows in _row_counts(weight)}):
            x = torch.zeros(rows, layer.input_size, dtype=self._dtype, device=self._device)
            self.apply(layer, x, layer.bias)


def _product(x: Tensor, weight: Piece, bias: Tensor | None) -> Tensor:
    if isinstance(weight, GroupWeight):
        return octavo_kernels.group_linear(x, weight, bias)
    if isinstance(weight, ScaledWeight):
        return octavo_kernels.scaled_linear(x, weight, bias)
    return octavo_kernels.linear(x, weight, bias)


def _row_counts(weight: Piece) -> list[int]:
    if isinstance(weight, GroupWeight):
        return octavo_kernels.group_row_counts(weight)
    return octavo_kernels.scaled_row_counts(weight) if isinstance(weight, ScaledWeight) else []


def _tensors_of(weight: Piece) -> dict[str, Tensor]:
    if isinstance(weight, GroupWeight):
        return weight.tensors
    return {"values": weight} if isinstance(weight, Tensor) else {"values": weight.values, "scales": weight.scales}


def _joined(a: Piece, b: Piece) -> Piece | None:
    """Channels of ``a``, then those of ``b``, in one piece; None where they do not go together."""
    if isinstance(a, ScaledWeight) and isinstance(b, ScaledWeight):
        return joined(a, b)
    if isinstance(a, GroupWeight) and isinstance(b, GroupWeight) and are_alike(a, b):
        return joined_groups([a, b])
    return None


def are_alike(a: GroupWeight, b: GroupWeight) -> bool:
    """True if ``b`` can follow ``a`` in one weight."""
    kinds = [(w.form, w.group, w.scales.dtype, w.order is None) for w in (a, b)]
    same_order = a.order is None or b.order is None or torch.equal(a.order, b.order)
    return kinds[0] == kinds[1] and a.channels % TILE == 0 and same_order


def joined_groups(weights: Sequence[GroupWeight]) -> GroupWeight:
    """The channels of all ``weights``, which are alike, in one weight."""
    codes, zeros = torch.cat([w.codes for w in weights]), None
    scales = torch.cat([w.scales for w in weights], dim=1)
    if any(w.zeros is not None for w in weights):
        zeros = torch.cat([_zeros_of(w) for w in weights], dim=1)
    return replace(weights[0], codes=codes, scales=scales, zeros=zeros, channels=sum(w.channels for w in weights))


def _zeros_of(weight: GroupWeight) -> Tensor:
    if weight.zeros is not None:
        return weight.zeros
    return torch.full_like(weight.scales, 1 << (FORMS[weight.form] - 1), dtype=torch.uint8)
