"""Experts as GPUs hold them: what every expert's own linear layers would compute, whatever their format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import octavo_kernels
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.base import ExpertsBase, ExpertSettings, LinearBase, LinearMethod, QuantizationConfig
from octavo.layers.quantization.canonical import GroupCodes
from octavo.layers.quantization.gpu_weights import GPUWeightMethod
from octavo.layers.quantization.online import OnlineConfig
from octavo.layers.quantization.stacked_experts import StackedMoEMethod
from octavo.loader.safetensors_reader import SafetensorsFile
from octavo_kernels import GroupWeight, ScaledWeight, StackedWeight

HIDDEN, INNER, EXPERTS = 64, 128, 3


def layer_of(config: QuantizationConfig, inner: int) -> ExpertsBase:
    layer = ExpertsBase(ExpertSettings(EXPERTS, HIDDEN, inner, bias=True), TensorParallel())
    layer.create_weights(StackedMoEMethod(config, "mlp.experts"), torch.float32)
    return layer


def checked(layer: ExpertsBase, values: dict[str, torch.Tensor], biases: dict[str, torch.Tensor], atol: float) -> None:
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(5))
    ids, weights = octavo_kernels.topk_route(torch.randn(6, EXPERTS, generator=torch.Generator().manual_seed(6)), 2)
    out = layer.method.apply(layer, x, ids, weights, None, None)
    expected = torch.zeros_like(x)
    for row in range(6):
        for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
            gate, up = (
                x[row] @ values[f"{expert}.{name}"].T + biases[f"{expert}.{name}"] for name in ("gate_proj", "up_proj")
            )
            inner = torch.nn.functional.silu(gate) * up
            expected[row] += weight * (inner @ values[f"{expert}.down_proj"].T + biases[f"{expert}.down_proj"])
    torch.testing.assert_close(out, expected, atol=atol * expected.abs().max().item(), rtol=0)


def random_of(inner: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(inner)
    shapes = {"gate_proj": (inner, HIDDEN), "up_proj": (inner, HIDDEN), "down_proj": (HIDDEN, inner)}
    names = {f"{number}.{name}": shape for number in range(EXPERTS) for name, shape in shapes.items()}
    values = {name: torch.randn(*shape, generator=g) * shape[1] ** -0.5 for name, shape in names.items()}
    return values, {name: torch.randn(shape[0], generator=g) / 4 for name, shape in names.items()}


def linears(layer: ExpertsBase) -> dict[str, LinearBase]:
    return {name: module for name, module in layer.named_modules() if isinstance(module, LinearBase)}


def test_experts_rounded_to_8_bits_while_loading(tmp_path: Path) -> None:
    layer = layer_of(OnlineConfig("int8", torch.device("cpu")), INNER)
    values, biases = random_of(INNER)
    save_file(
        {f"{n}.weight": t for n, t in values.items()} | {f"{n}.bias": t for n, t in biases.items()}, tmp_path / "w"
    )
    sources = {source.name: source for source in SafetensorsFile(tmp_path / "w").sources()}
    for name, linear in linears(layer).items():
        for slot in linear.weight_slots():
            slot.load(sources[f"{name}.{slot.leaf}"])
        linear.method.process_weights_after_loading(linear)
    layer.method.process_weights_after_loading(layer)
    held = layer.method.held
    assert isinstance(held.gate_up, StackedWeight) and isinstance(held.gate_up.weight, ScaledWeight)
    assert not linears(layer), "what each expert held is let go"
    assert {id(tensor) for tensor, _ in layer.method.weight_kinds(layer)} >= {id(held.gate_up.weight.values)}
    checked(layer, values, biases, 0.03)


class Codes(QuantizationConfig):
    name = "codes"

    def linear_method(self, name: str, layer: LinearBase) -> LinearMethod:
        return GPUCodes()


class GPUCodes(GPUWeightMethod):
    def weight_slots(self, layer, part, shard):
        return iter(())


@pytest.mark.parametrize("inner", [INNER, 48])
@pytest.mark.parametrize("ordered", [False, True])
def test_codes_stay_codes_where_tiles_are_whole(inner: int, ordered: bool) -> None:
    """Inner sizes that are no multiple of a tile, and columns in orders of their own, become values."""
    layer = layer_of(Codes(), inner)
    values, biases = random_of(inner)
    g = torch.Generator().manual_seed(1)
    for name, linear in linears(layer).items():
        rows, columns = values[name].shape
        codes = torch.randint(0, 16, (rows, columns), generator=g, dtype=torch.uint8)
        scales = torch.rand(rows, columns // 16, generator=g) / 32
        zeros = torch.randint(6, 10, scales.shape, generator=g, dtype=torch.uint8) if "up" in name else None
        order = torch.randperm(columns, generator=g) if ordered else None
        stored = GroupCodes(codes=codes, scales=scales, group=16, zeros=zeros, order=order, bits=4)
        values[name] = stored.dequantize(torch.float32)
        linear.method.keep(0, stored)
        linear.bias.copy_(biases[name])
        linear.method.process_weights_after_loading(linear)
    layer.method.process_weights_after_loading(layer)
    kept = isinstance(layer.method.held.gate_up, StackedWeight)
    assert kept == (inner == INNER and not ordered)
    if kept:
        assert isinstance(layer.method.held.gate_up.weight, GroupWeight)
        assert "int4" in {kind for _, kind in layer.method.weight_kinds(layer)}
    checked(layer, values, biases, 1e-5)
