"""Fusing neighbouring layers where linear layers take activations quantised (int8 on CPUs).

A kernel that writes rows can quantise them as it does, and one for gates and ups can apply the activation: that saves
a pass over the rows for each. Layers and models say nothing of it; here are the pairs of layers that have such kernels.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from torch import Tensor, nn

import octavo_kernels
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import PreNormDecoderLayer
from octavo.layers.lora import RowsTwice
from octavo.layers.mlp import GatedMLP, SharedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.quantization.base import LinearBase
from octavo.layers.quantization.quantized_rows import QuantizedRowsMethod
from octavo.layers.recurrent import RecurrentDecoderLayer
from octavo_kernels.quant import QuantizedRows


def fuse_neighbours(model: nn.Module, apart: Collection[nn.Module] = ()) -> None:
    """Connect the layers of a loaded model: the numbers of terms are final once all weights are there. The layers
    ``apart`` also get the unquantised rows, and their products are kept."""
    for module in model.modules():
        if isinstance(module, PreNormDecoderLayer):
            if isinstance(module.self_attn, SelfAttention) and _take_the_same(module.self_attn.input_projs):
                _fuse_norm(module.input_layernorm, module.self_attn.input_proj, apart)
            _fuse_mlp(module.post_attention_layernorm, module.mlp, apart)
        elif isinstance(module, RecurrentDecoderLayer):
            projections = module.input_projs
            if projections and _take_the_same(projections):
                _fuse_norm(module.input_layernorm, projections[0], apart)
            _fuse_mlp(module.post_attention_layernorm, module.mlp, apart)
        elif isinstance(module, GatedMLP):
            _fuse_gate(module, apart)


def _fuse_mlp(norm: nn.Module, mlp: nn.Module, apart: Collection[nn.Module]) -> None:
    plain = mlp.shared_expert if isinstance(mlp, SharedMLP) else mlp
    if isinstance(plain, GatedMLP):
        _fuse_norm(norm, plain.gate_up_proj, apart)


def _take_the_same(linears: list[LinearBase]) -> bool:
    """Return whether one norm can write the rows of all."""
    methods = [linear.method for linear in linears]
    terms = {method.activation_terms if isinstance(method, QuantizedRowsMethod) else 0 for method in methods}
    return len(terms) == 1


def _fuse_norm(norm: nn.Module, linear: LinearBase, apart: Collection[nn.Module]) -> None:
    if isinstance(norm, RMSNorm) and isinstance(linear.method, QuantizedRowsMethod) and _takes_rows(linear.method):
        norm.activation_terms, norm.keeps_rows = linear.method.activation_terms, linear in apart


def _fuse_gate(mlp: GatedMLP, apart: Collection[nn.Module]) -> None:
    gate_up, down = mlp.gate_up_proj.method, mlp.down_proj.method
    mlp.fused = None
    if mlp.act is not octavo_kernels.silu_and_mul or mlp.down_proj.gathers:
        return
    if not isinstance(down, QuantizedRowsMethod) or not _takes_rows(down):
        return
    if mlp.gate_up_proj in apart or mlp.down_proj in apart:
        mlp.fused = partial(_gate_apart, mlp.gate_up_proj, down.activation_terms, mlp.down_proj in apart)
    elif isinstance(gate_up, QuantizedRowsMethod):
        mlp.fused = partial(gate_up.apply_gated, mlp.gate_up_proj, terms=down.activation_terms)


def _gate_apart(gate_up: nn.Module, terms: int, keeps_rows: bool, x: Tensor) -> QuantizedRows | RowsTwice:
    y = gate_up(x)
    plain = y.new_empty(len(y), y.shape[1] // 2) if keeps_rows else None
    rows = octavo_kernels.silu_and_mul_quantize(y, terms, plain)
    return rows if plain is None else RowsTwice(rows, plain)


def _takes_rows(method: QuantizedRowsMethod) -> bool:
    return method.column_order is None
