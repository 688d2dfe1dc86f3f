"""Ways to hold the weights of experts (see `MoEMethod`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.errors import ConfigError, ModelError
from octavo.layers.quantization.base import ExpertsBase, LinearBase, MoEMethod, QuantizationConfig, Shard
from octavo.layers.quantization.packed_method import PackedMethod
from octavo.layers.quantization.quantized_rows import QuantizedRowsMethod
from octavo.layers.weights import WeightSlot, WeightSource, fill_tensor
from octavo_kernels.dense import DenseWeight
from octavo_kernels.moe import Experts, ExpertTable, StackedWeight, expert_table
from octavo_kernels.quant import PackedLinear


class ExpertsMethod(MoEMethod):
    """A method whose weights are `octavo_kernels.Experts`."""

    held: Experts | None = None

    def apply(
        self, layer: ExpertsBase, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        """See `MoEMethod`."""
        assert self.held is not None
        return octavo_kernels.fused_moe(x, ids, weights, self.held, shared, gate, layer.tp.part_dtype(x))

    def row_counts(self, layer: ExpertsBase, k: int) -> list[int]:
        """See `MoEMethod`."""
        assert self.held is not None
        return octavo_kernels.moe_row_counts(self.held, k)

    def hold(
        self,
        layer: ExpertsBase,
        gate_up: Tensor | ExpertTable | StackedWeight,
        down: Tensor | ExpertTable | StackedWeight,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> None:
        """Take the weights in the kernels' form."""
        how = layer.settings
        down_bias = down_bias if layer.adds_bias else None
        self.held = Experts(gate_up, down, gate_up_bias, down_bias, how.activation, how.limit, how.weighs_input)


class UnquantizedMoEMethod(ExpertsMethod):
    """``w13 [E, 2 I, H]``, gates (ups once more, where there are none) before ups, and ``w2 [E, H, I]`` of this rank's
    experts in the dtype of activations, as parameters; biases float32 ``w13_bias [E, 2 I]`` and ``w2_bias [E, H]``."""

    def create_weights(self, layer: ExpertsBase, dtype: torch.dtype) -> None:
        """See `MoEMethod`."""
        settings, inner = layer.settings, layer.inner_size
        count, hidden = len(layer.numbers), settings.hidden_size

        def empty(name: str, *shape: int, of: torch.dtype = dtype) -> Tensor:
            layer.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=of), requires_grad=False))
            return layer.get_parameter(name)

        weights = empty("w13", count, 2 * inner, hidden), empty("w2", count, hidden, inner)
        if not settings.bias:
            self.hold(layer, *weights, None, None)
            return
        biases = [
            empty(f"{name}_bias", *w.shape[:2], of=torch.float32)
            for name, w in zip(("w13", "w2"), weights, strict=True)
        ]
        self.hold(layer, *weights, *biases)

    def weight_slots(self, layer: ExpertsBase) -> Iterator[WeightSlot]:
        """See `MoEMethod`."""
        settings, inner, parameters = layer.settings, layer.inner_size, dict(layer.named_parameters())
        mine, whole = layer.columns, slice(0, settings.hidden_size)
        shape, ups = (settings.inner_size, settings.hidden_size), slice(inner, 2 * inner)
        gates = slice(0, inner)
        places = [
            ("up_proj", "w13", [ups] if settings.gated else [gates, ups], shape, (mine, whole)),
            ("down_proj", "w2", [whole], shape[::-1], (whole, mine)),
        ]
        if settings.gated:
            places.append(("gate_proj", "w13", [gates], shape, (mine, whole)))
        for place, number in enumerate(layer.numbers):
            for name, own, rows, stored, taken in places:
                targets = [parameters[own][place, some] for some in rows]
                yield WeightSlot(0, f"{number}.{name}.weight", stored, partial(_fill, targets, taken))
                if settings.bias:
                    targets = [parameters[f"{own}_bias"][place, some] for some in rows]
                    yield WeightSlot(0, f"{number}.{name}.bias", stored[:1], partial(_fill, targets, taken[:1]))


def _fill(targets: list[Tensor], taken: tuple[slice, ...], source: WeightSource) -> None:
    for target in targets:
        fill_tensor(target, source, *taken)


class ExpertLinears(nn.Module):
    """One expert's projections as linear layers, of which this rank has the part that a dense MLP's have."""

    def __init__(self, layer: ExpertsBase) -> None:
        super().__init__()
        settings, mine, tp = layer.settings, layer.columns, layer.tp
        whole = slice(0, settings.hidden_size)
        shape = settings.inner_size, settings.hidden_size
        if settings.gated:
            self.gate_proj = LinearBase([Shard(shape, mine, whole, 0)], settings.bias, tp)
        self.up_proj = LinearBase([Shard(shape, mine, whole, 0)], settings.bias, tp)
        self.down_proj = LinearBase([Shard(shape[::-1], whole, mine, 0)], settings.bias, tp)
        for linear in self.layers():
            linear.takes_row_scales = False

    def layers(self) -> list[LinearBase]:
        """The layers of gates, ups and downs; of ups twice where there are no gates."""
        return [getattr(self, "gate_proj", self.up_proj), self.up_proj, self.down_proj]


class PackedMoEMethod(ExpertsMethod):
    """Experts for the CPU's kernels: the weights of each expert as linear layers' ones, in whatever form ``config``
    holds those; the kernels find them by address.

    All formats that linear layers are read from are thereby experts' formats.
    """

    def __init__(self, config: QuantizationConfig, name: str) -> None:
        self._config, self._name = config, name

    def create_weights(self, layer: ExpertsBase, dtype: torch.dtype) -> None:
        """See `MoEMethod`."""
        stored = layer.stored_types
        # The kernels multiply experts of one dtype: where tensors differ, that of the model.
        for names in (layer.projections[:-1], layer.projections[-1:]):
            if len({types[name] for types in stored for name in names}) != 1:
                stored = [types | dict.fromkeys(names) for types in stored]
        for number in layer.numbers:
            expert = ExpertLinears(layer)
            layer.add_module(str(number), expert)
            for name in layer.projections:
                linear = expert.get_submodule(name)
                assert isinstance(linear, LinearBase)
                linear.stored_types = [stored[number][name]]
                linear.create_weights(self._config.linear_method(f"{self._name}.{number}.{name}", linear), dtype)

    def process_weights_after_loading(self, layer: ExpertsBase) -> None:
        """See `MoEMethod`. Raises ConfigError or ModelError for weights that the kernels cannot take by address."""
        linears = [layer.get_submodule(str(number)).layers() for number in layer.numbers]  # type: ignore[operator]
        gates, ups, downs = ([self._held(expert[part]) for expert in linears] for part in range(3))
        try:
            gate_up, down = expert_table(_of_one_kind(gates, ups)), expert_table(_of_one_kind(downs))
        except ValueError as error:
            raise ConfigError(f"{self._name}: {error}; use --quantization none") from None
        biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if layer.settings.bias:
            gate_up_bias = torch.stack([torch.cat([gate.bias, up.bias]) for gate, up, _ in linears])
            biases = gate_up_bias.float(), torch.stack([linear.bias for *_, linear in linears]).float()
        self.hold(layer, gate_up, down, *biases)

    def _held(self, linear: LinearBase) -> DenseWeight | PackedLinear:
        method = linear.method
        if not isinstance(method, PackedMethod):
            raise ConfigError(f"{self._name}: experts cannot be held as {self._config.name} on this device")
        if isinstance(method, QuantizedRowsMethod) and method.column_order is not None:
            raise ModelError(
                f"{self._name}: experts with act order (desc_act, g_idx) have no kernel; use --quantization none"
            )
        return method.held


def _of_one_kind(*parts: list[DenseWeight | PackedLinear]) -> list[list[DenseWeight | PackedLinear]]:
    """The same weights, all of which take rows of as many terms as one of them needs."""
    terms = [weight.activation_terms for part in parts for weight in part if isinstance(weight, PackedLinear)]
    return [
        [replace(w, activation_terms=max(terms)) if isinstance(w, PackedLinear) else w for w in part] for part in parts
    ]
