"""Linear layers that are filled from the weights of a quantised checkpoint.

Each checkpoint module of a merged layer has a `WeightFormat` of its own, or none where it is stored as a plain weight.
What a layer keeps of them depends on the device: codes that its kernels multiply, or the values in the dtype of the
activations. Parts of different formats are correct either way; a layer with a plain part keeps values, as that part's
16 bits were wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

import octavo_kernels
from octavo.errors import ConfigError, ModelError
from octavo.layers.quantization.base import ExpertsBase, LinearBase, LinearMethod, MoEMethod, QuantizationConfig, Shard
from octavo.layers.quantization.canonical import GroupCodes, StoredWeight, TableCodes, row_pieces
from octavo.layers.quantization.dense import DenseConfig, DenseLinearMethod
from octavo.layers.quantization.experts import PackedMoEMethod
from octavo.layers.quantization.gpu_weights import DTYPES, GPUWeightMethod, device_bytes
from octavo.layers.quantization.int8 import Int8Config, Int8LinearMethod, create_bias
from octavo.layers.quantization.packed import keeps_codes, pack_stored
from octavo.layers.quantization.scaled_weight import TYPES
from octavo.layers.quantization.stacked_experts import StackedMoEMethod
from octavo.layers.quantization.unquantized import UnquantizedConfig, UnquantizedLinearMethod
from octavo.layers.quantization.weight_format import CheckpointFormat, StoredModule, WeightFormat
from octavo.layers.weights import TensorGroup, WeightSlot, WeightSource
from octavo_kernels.packing import fits_row_scales
from octavo_kernels.quant import BY_ROW, QuantizedRows, part_nbytes

Formats = Sequence[WeightFormat | None]  # of the checkpoint modules that a layer holds


class CodesLinearMethod(GPUWeightMethod):
    """The file's own codes, for a GPU's kernels; activations of 8 bits where all parts are made for these."""

    def __init__(self, formats: Formats) -> None:
        types = {format_.activations if format_ is not None else None for format_ in formats}
        super().__init__(TYPES.get(types.pop() or "") if len(types) == 1 else None)
        self._formats = formats

    def weight_slots(self, layer: LinearBase, part: int, shard: Shard) -> Iterator[WeightSlot]:
        """See `LinearMethod`."""
        format_ = self._formats[part]
        assert format_ is not None
        columns = shard.columns.stop - shard.columns.start
        nbytes = device_bytes(format_, shard.num_rows, columns, self.is_expert)
        if part == 0 and format_.device_codes is not None and format_.device_codes.ordered and not self.is_expert:
            nbytes += 8 * columns  # their order, which all parts share
        yield from _slots(format_, part, shard, partial(self.keep, part), nbytes)
        yield from _bias_slots(self.bias_slots(layer, part, shard), layer, part, shard)


class DequantizedLinearMethod(UnquantizedLinearMethod):
    """The weights' values in the dtype of the activations."""

    def __init__(self, formats: Formats) -> None:
        super().__init__()
        self._formats = formats

    def weight_slots(self, layer: LinearBase, part: int, shard: Shard) -> Iterator[WeightSlot]:
        """See `LinearMethod`."""
        format_ = self._formats[part]
        if format_ is None:
            yield from super().weight_slots(layer, part, shard)
            return
        rows = layer.weight[shard.offset : shard.offset + shard.num_rows]
        yield from _slots(format_, part, shard, partial(_dequantize, rows, shard.columns), values=True)
        yield from _bias_slots(super().weight_slots(layer, part, shard), layer, part, shard)


class DequantizedDenseMethod(DenseLinearMethod):
    """The same for the CPU's kernels; a plain part keeps its own bits."""

    def __init__(self, formats: Formats, like: DenseLinearMethod) -> None:
        super().__init__(like.types, like.out_dtype)
        self._formats = formats

    def weight_slots(self, layer: LinearBase, part: int, shard: Shard) -> Iterator[WeightSlot]:
        """See `LinearMethod`."""
        format_ = self._formats[part]
        if format_ is None:
            yield from super().weight_slots(layer, part, shard)
            return
        yield from _slots(format_, part, shard, partial(self._fill_with_values, shard), values=True)
        yield from _bias_slots(super().weight_slots(layer, part, shard), layer, part, shard)

    def _fill_with_values(self, shard: Shard, weight: StoredWeight) -> None:
        dtype = self.types.held(None)
        pieces = (weight.values(rows)[:, shard.columns] for rows in row_pieces(weight.shape[0]))
        self.fill(shard, (piece.to(dtype) for piece in pieces))


class PackedLinearMethod(Int8LinearMethod):
    """The file's own codes, where the CPU's kernels have their kind; 8-bit codes of the values where not.

    Columns in act order stay in it: rows of activations are brought into the same order (``column_order``).
    """

    def __init__(self, formats: Formats, names: Sequence[str], layer: LinearBase, like: Int8LinearMethod) -> None:
        super().__init__(max(1, like.activation_terms), like.margin, like.terms_if_rounded)
        self._formats, self._names = formats, names
        fits = layer.takes_row_scales and not like.margin and fits_row_scales(layer.input_size)
        if fits and all(format_ is not None and format_.has_row_scales for format_ in formats):
            self.activation_terms = BY_ROW
        self._orders: dict[int, Tensor | None] = {}

    def create_weights(self, layer: LinearBase, dtype: torch.dtype) -> None:
        """See `LinearMethod`; the weight is made when its kind is known, of the stored tensors."""
        create_bias(layer)

    def weight_slots(self, layer: LinearBase, part: int, shard: Shard) -> Iterator[WeightSlot]:
        """See `LinearMethod`."""
        format_ = self._formats[part]
        assert format_ is not None
        nbytes = part_nbytes(shard.num_rows, shard.columns.stop - shard.columns.start, format_.packed_kind)
        yield from _slots(format_, part, shard, partial(self._keep, part), nbytes)
        yield from _bias_slots(super().weight_slots(layer, part, shard), layer, part, shard)

    def _keep(self, part: int, weight: StoredWeight) -> None:
        self._orders[part] = weight.order if isinstance(weight, GroupCodes) else None
        if self.activation_terms == BY_ROW:
            pass  # rows with one scale have as many bits as they need
        elif isinstance(weight, TableCodes) or not keeps_codes(weight):
            # What 8 bits lose twice shows: FP8's SmolLM2 agrees with its values on 96.6 % with one term, on 97.2 % so.
            # Tables need it as well: MXFP4's SmolLM2 agrees on 96.7 % with one term.
            self.activation_terms = 2
        elif isinstance(weight, GroupCodes) and weight.zeros is None:
            # There are more near ties without zero points, so that one layer more needs its second term: GPTQ's SmolLM2
            # agrees with its values on 97.4 % of its best tokens so and on 96.3 % without, AWQ's on 97.9 % without.
            self.activation_terms = max(self.activation_terms, self.terms_if_rounded)
        self._parts[part] = pack_stored(weight, self.activation_terms)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """See `LinearMethod`. Raises ModelError where parts of a merged layer have different orders."""
        super().process_weights_after_loading(layer)
        first, *others = (self._orders[part] for part in sorted(self._orders))
        if not all(_is_same_order(first, other) for other in others):
            raise ModelError(
                f"the weights of {', '.join(self._names)} have different act orders (g_idx), which the packed kernels "
                "cannot multiply as one; use --quantization none"
            )
        self.column_order = first

    def apply(self, layer: LinearBase, x: Tensor | QuantizedRows, bias: Tensor | None) -> Tensor:
        """See `LinearMethod`."""
        return super().apply(layer, self._in_order(x), bias)

    def apply_gated(self, layer: LinearBase, x: Tensor | QuantizedRows, terms: int) -> QuantizedRows:
        """See `QuantizedRowsMethod`."""
        return super().apply_gated(layer, self._in_order(x), terms)

    def _in_order(self, x: Tensor | QuantizedRows) -> Tensor | QuantizedRows:
        if self.column_order is None:
            return x
        assert isinstance(x, Tensor)
        return octavo_kernels.take_columns(x, self.column_order)


def _is_same_order(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _slots(
    format_: WeightFormat,
    part: int,
    shard: Shard,
    take: Callable[[StoredWeight], None],
    nbytes: int = 0,
    values: bool = False,
) -> Iterator[WeightSlot]:
    """Slots of one checkpoint module: read together, this rank's part of it given to ``take``, which keeps ``nbytes``
    beside the layer's parameters. ``values``: whole rows are read and columns of the values taken, so that no group is
    cut."""

    def load(sources: Mapping[str, WeightSource]) -> None:
        try:
            rows = shard.rows if shard.order is None else shard.order[shard.rows]
            columns = slice(0, shard.shape[1]) if values else shard.columns
            weight = format_.read(sources, *shard.shape).take(rows, columns)
            take(weight if shard.factor == 1.0 else weight.multiplied(shard.factor))
        except ValueError as error:
            name = next(iter(sources.values())).name
            raise ModelError(f"tensor {name!r} and what belongs to it cannot be packed: {error}") from None

    group = TensorGroup(load, prod(shard.shape))
    for number, leaf in enumerate(format_.leaves(*shard.shape)):
        extra = partial(_same_for_any_type, nbytes if number == 0 else 0)
        yield WeightSlot(part, leaf.name, None, _read_by_group, extra, leaf.optional, leaf.qtypes, group, leaf.shapes)


def _bias_slots(slots: Iterator[WeightSlot], layer: LinearBase, part: int, shard: Shard) -> Iterator[WeightSlot]:
    """The slots of a bias among a plain layer's. Many tools write a bias of zeros for layers that have none."""
    if layer.has_bias:
        yield from (slot for slot in slots if slot.leaf == "bias")
    else:
        yield WeightSlot(part, "bias", shard.shape[:1], _check_zeros, optional=True)


def _check_zeros(source: WeightSource) -> None:
    if bool(source.load(torch.float32).any()):
        raise ModelError(f"tensor {source.name!r} is a bias, and config.json's model has none there; use its own files")


def _same_for_any_type(nbytes: int, qtype: str) -> int:
    return nbytes


def _dequantize(target: Tensor, columns: slice, weight: StoredWeight) -> None:
    if columns == slice(0, weight.shape[1]):
        weight.dequantize_into(target)
        return
    for rows in row_pieces(weight.shape[0]):
        target[rows] = weight.values(rows)[:, columns].to(target.dtype).to(target.device)


def _read_by_group(source: WeightSource) -> None:
    raise AssertionError(f"{source.name} is read with the rest of its group")


class CheckpointConfig(QuantizationConfig):
    """A quantised checkpoint whose linear modules are ``modules``, by their names here; ``parts`` names those of a
    merged layer. ``packed``: weights are kept as codes, for the CPU's kernels; ``on_gpu``: for a GPU's, with
    activations of 16 bits. Weights kept as values are held as ``values`` has it."""

    def __init__(
        self,
        checkpoint: CheckpointFormat,
        modules: Mapping[str, StoredModule],
        parts: Mapping[str, Sequence[str]],
        packed: bool,
        values: DenseConfig | UnquantizedConfig,
        on_gpu: bool = False,
    ) -> None:
        self.name, self.packed, self._on_gpu = checkpoint.name, packed, on_gpu
        self._checkpoint, self._modules, self._parts, self._values = checkpoint, modules, parts, values
        self._plain = Int8Config() if packed else None

    def linear_method(self, name: str, layer: LinearBase) -> LinearMethod:
        """See `QuantizationConfig`."""
        names = self._part_names(name)
        formats = [self._format(part, shard) for part, shard in zip(names, layer.shards, strict=True)]
        if all(format_ is None for format_ in formats):
            return (self._plain or self._values).linear_method(name, layer)
        if self._on_gpu and None not in formats and torch.get_default_dtype() in DTYPES:
            return CodesLinearMethod(formats)
        if self._plain is None or any(format_ is None for format_ in formats):
            like = self._values.linear_method(name, layer)
            if isinstance(like, DenseLinearMethod):
                return DequantizedDenseMethod(formats, like)
            return DequantizedLinearMethod(formats)
        packed = self._plain.linear_method(name, layer)
        assert isinstance(packed, Int8LinearMethod)
        return PackedLinearMethod(formats, names, layer, packed)

    def moe_method(self, name: str, layer: ExpertsBase) -> MoEMethod:
        """See `QuantizationConfig`."""
        if self._on_gpu:
            return StackedMoEMethod(self, name)
        if not (self.packed or isinstance(self._values, DenseConfig)):
            raise ConfigError(
                f"experts that are stored as {self.name} cannot be held as float16 on a CPU; use --dtype bfloat16, or "
                "leave out --quantization none"
            )
        return PackedMoEMethod(self, name)

    def _part_names(self, name: str) -> list[str]:
        parent, dot, own = name.rpartition(".")
        return [parent + dot + part for part in self._parts.get(own, [own])]

    def _format(self, name: str, shard: Shard) -> WeightFormat | None:
        module = self._modules.get(name) or StoredModule(name, {})
        found = self._checkpoint.weight_format(module)
        try:
            if found is not None:
                found.leaves(*shard.shape)
        except ModelError as error:
            raise ModelError(f"the weight of {module.name!r} and its quantization_config disagree: {error}") from None
        return found
