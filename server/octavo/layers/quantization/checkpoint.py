"""Linear layers that are filled from the weights of a quantised checkpoint.

Each checkpoint module of a merged layer has a `WeightFormat` of its own, or none where it is stored as a plain weight.
What a layer keeps of them depends on the device: codes that its kernels multiply, or the values in the dtype of the
activations. Parts of unlike formats are right either way; a layer with a plain part keeps values, as that part's
16 bits were wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from octavo.layers.quantization.base import LinearBase, LinearMethod, QuantizationConfig, Shard
from octavo.layers.quantization.canonical import StoredWeight
from octavo.layers.quantization.int8 import Int8Config, Int8LinearMethod
from octavo.layers.quantization.packed import pack_stored
from octavo.layers.quantization.unquantized import UnquantizedLinearMethod
from octavo.layers.quantization.weight_format import CheckpointFormat, StoredModule, WeightFormat
from octavo.layers.weights import TensorGroup, WeightSlot, WeightSource
from octavo_kernels.quant import part_nbytes

Formats = Sequence[WeightFormat | None]  # of the checkpoint modules that a layer holds


class DequantizedLinearMethod(UnquantizedLinearMethod):
    """The weights' values in the dtype of the activations."""

    def __init__(self, formats: Formats) -> None:
        super().__init__()
        self._formats = formats

    def weight_slots(self, layer: LinearBase, part: int, shard: Shard) -> Iterator[WeightSlot]:
        """See `LinearMethod`."""
        format_ = self._formats[part]
        for slot in super().weight_slots(layer, part, shard):
            if slot.leaf != "weight" or format_ is None:
                yield slot
            else:
                rows = layer.weight[shard.offset : shard.offset + shard.num_rows]
                yield from _slots(format_, part, shard, partial(_dequantize, rows))


class PackedLinearMethod(Int8LinearMethod):
    """The file's own codes, where the CPU's kernels have their kind; 8-bit codes of the values where not."""

    def __init__(self, formats: Formats, like: Int8LinearMethod) -> None:
        super().__init__(like.activation_terms, like.margin)
        self._formats = formats

    def weight_slots(self, layer: LinearBase, part: int, shard: Shard) -> Iterator[WeightSlot]:
        """See `LinearMethod`."""
        format_ = self._formats[part]
        assert format_ is not None
        for slot in super().weight_slots(layer, part, shard):
            if slot.leaf != "weight":
                yield slot
                continue
            columns = shard.columns.stop - shard.columns.start
            nbytes = part_nbytes(shard.num_rows, columns, *format_.packed_kind)
            yield from _slots(format_, part, shard, partial(self._keep, part), nbytes)

    def _keep(self, part: int, weight: StoredWeight) -> None:
        self._parts[part] = pack_stored(weight, self.activation_terms)


def _slots(
    format_: WeightFormat, part: int, shard: Shard, take: Callable[[StoredWeight], None], nbytes: int = 0
) -> Iterator[WeightSlot]:
    """Of one checkpoint module: read together, this rank's part of it given to ``take``; ``nbytes`` is what it keeps
    beside the layer's parameters."""

    def load(sources: Mapping[str, WeightSource]) -> None:
        take(format_.read(sources, *shard.shape).take(shard.rows, shard.columns))

    group = TensorGroup(load)
    for number, leaf in enumerate(format_.leaves(*shard.shape)):
        extra = partial(_same_for_any_type, nbytes if number == 0 else 0)
        yield WeightSlot(part, leaf.name, leaf.shape, _read_by_group, extra, leaf.optional, leaf.qtypes, group)


def _same_for_any_type(nbytes: int, qtype: str) -> int:
    return nbytes


def _dequantize(target: Tensor, weight: StoredWeight) -> None:
    weight.dequantize_into(target)


def _read_by_group(source: WeightSource) -> None:
    raise AssertionError(f"{source.name} is read with the rest of its group")


class CheckpointConfig(QuantizationConfig):
    """Of a quantised checkpoint whose linear modules are ``modules``, by the names that they have here; ``parts`` names
    those of a merged layer. ``packed``: weights are kept as codes, for the CPU's kernels."""

    def __init__(
        self,
        checkpoint: CheckpointFormat,
        modules: Mapping[str, StoredModule],
        parts: Mapping[str, Sequence[str]],
        packed: bool,
    ) -> None:
        self.name, self.packed = checkpoint.name, packed
        self._checkpoint, self._modules, self._parts = checkpoint, modules, parts
        self._plain = Int8Config() if packed else None

    def linear_method(self, name: str, layer: LinearBase) -> LinearMethod:
        """See `QuantizationConfig`."""
        formats = [self._format(module) for module in self._part_names(name)]
        if all(format_ is None for format_ in formats):
            return self._plain.linear_method(name, layer) if self._plain else UnquantizedLinearMethod()
        if self._plain is None or any(format_ is None for format_ in formats):
            return DequantizedLinearMethod(formats)
        like = self._plain.linear_method(name, layer)
        assert isinstance(like, Int8LinearMethod)
        return PackedLinearMethod(formats, like)

    def _part_names(self, name: str) -> list[str]:
        parent, dot, own = name.rpartition(".")
        return [parent + dot + part for part in self._parts.get(own, [own])]

    def _format(self, name: str) -> WeightFormat | None:
        module = self._modules.get(name) or StoredModule(name, {})
        return self._checkpoint.weight_format(module)
