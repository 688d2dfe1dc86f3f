"""Mixtures of experts on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels import reference
from octavo_kernels.cpu.elementwise import ACTIVATIONS
from octavo_kernels.cpu.library import DTYPES, WEIGHT_DTYPES, Library, as_contiguous, get_library, threads_for
from octavo_kernels.cpu.quant import quantize_rows
from octavo_kernels.dense import DenseWeight
from octavo_kernels.moe import Experts, ExpertTable, check_route
from octavo_kernels.quant import PackedLinear, empty_rows

_ROUTINGS = {"softmax": 0, "sigmoid": 1}  # csrc/moe_ops.h: enum routing
_ACTIVATIONS = {**ACTIVATIONS, "clamped_swiglu": 4}  # csrc/elementwise_ops.h: enum activation
_TILE_WIDTH = 32  # packed rows are padded to whole tiles where there are any: csrc/dense_tiles.h


def topk_route(
    logits: Tensor,
    k: int,
    kind: str = "softmax",
    bias: Tensor | None = None,
    groups: tuple[int, int] | None = None,
    renormalise: bool = False,
    scale: float = 1.0,
    expert_scale: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """See `octavo_kernels.topk_route`."""
    library = get_library()
    if library is None or logits.dtype != torch.float32:
        return reference.topk_route(logits, k, kind, bias, groups, renormalise, scale, expert_scale, first)
    check_route(logits, k, kind, groups)
    logits = as_contiguous(logits)
    bias = None if bias is None else as_contiguous(bias, torch.float32)
    expert_scale = None if expert_scale is None else as_contiguous(expert_scale, torch.float32)
    rows, experts = logits.shape
    ids, weights = torch.empty((rows, k), dtype=torch.int32), torch.empty((rows, k))
    op = library.pack(
        "topk_route",
        logits.data_ptr(),
        *_optional(bias, expert_scale),
        ids.data_ptr(),
        weights.data_ptr(),
        rows,
        experts,
        k,
        _ROUTINGS[kind],
        *(groups or (0, 0)),
        renormalise,
        first,
        scale,
    )
    library.run(op, threads_for(16 * logits.numel()))
    return ids, weights


def fused_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `octavo_kernels.fused_moe`."""
    library, dtype = get_library(), out_dtype or x.dtype
    takes = x.dtype in DTYPES and dtype in (x.dtype, torch.float32) and isinstance(experts.gate_up, ExpertTable)
    if library is None or not takes:
        return reference.fused_moe(x, ids, weights, experts, shared, shared_gate, out_dtype)
    assert isinstance(experts.gate_up, ExpertTable)
    x, ids, weights = as_contiguous(x), as_contiguous(ids, torch.int32), as_contiguous(weights, torch.float32)
    if x.shape[1] != experts.gate_up.width:
        raise ValueError(f"x: rows of {x.shape[1]} values do not fit experts of width {experts.gate_up.width}")
    plan = torch.empty(2 + 2 * experts.num_experts + ids.numel(), dtype=torch.int32)
    op = library.pack("sort_choices", ids.data_ptr(), plan.data_ptr(), len(x), experts.num_experts, ids.shape[1])
    library.run(op, threads=1)
    compute = _packed if isinstance(experts.gate_up.parts[0][0], PackedLinear) else _dense
    results = compute(library, x, plan, weights, experts)
    out = torch.empty(x.shape, dtype=dtype)
    shared = None if shared is None else as_contiguous(shared, x.dtype)
    gate = None if shared_gate is None else as_contiguous(shared_gate, torch.float32)
    op = library.pack(
        "add_choices",
        results.data_ptr(),
        *_optional(None if experts.weighs_input else weights, ids, shared, gate),
        out.data_ptr(),
        len(x),
        ids.shape[1],
        experts.num_experts,
        x.shape[1],
        DTYPES[x.dtype],
        DTYPES[dtype],
    )
    library.run(op, threads_for(results.numel()))
    return out


def _packed(library: Library, x: Tensor, plan: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """float32 [T, k, H]: what the chosen experts give."""
    gates_ups, down = experts.gate_up, experts.down
    assert isinstance(gates_ups, ExpertTable) and isinstance(down, ExpertTable)
    gate, last = gates_ups.parts[0][0], down.parts[0][0]
    assert isinstance(gate, PackedLinear) and isinstance(last, PackedLinear)
    terms, out_terms, (count, k) = gate.activation_terms, last.activation_terms, weights.shape
    rows = quantize_rows(x, terms)
    sorted_rows = empty_rows(count * k, terms, x.shape[1], x.dtype)
    inner = empty_rows(count * k, out_terms, down.width, x.dtype)
    library.run(
        library.pack(
            "quantized_experts_gated",
            rows.pairs.data_ptr(),
            rows.meta.data_ptr(),
            plan.data_ptr(),
            *_addresses(gates_ups),
            *_optional(experts.gate_up_bias, weights if experts.weighs_input else None),
            sorted_rows.pairs.data_ptr(),
            sorted_rows.meta.data_ptr(),
            inner.pairs.data_ptr(),
            inner.meta.data_ptr(),
            count,
            experts.num_experts,
            k,
            down.width,
            gate.groups,
            terms,
            out_terms,
            _ACTIVATIONS[experts.activation],
            DTYPES[x.dtype],
            experts.limit,
        )
    )
    out = torch.empty((count, k, down.channels))
    library.run(
        library.pack(
            "quantized_experts_down",
            inner.pairs.data_ptr(),
            inner.meta.data_ptr(),
            plan.data_ptr(),
            *_addresses(down),
            *_optional(experts.down_bias),
            out.data_ptr(),
            count,
            experts.num_experts,
            k,
            down.channels,
            last.groups,
            out_terms,
        )
    )
    return out


def _dense(library: Library, x: Tensor, plan: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """float32 [T, k, H]: what the chosen experts give."""
    gates_ups, down = experts.gate_up, experts.down
    assert isinstance(gates_ups, ExpertTable) and isinstance(down, ExpertTable)
    count, k = weights.shape
    x_dtype = DTYPES[x.dtype]
    gate_dtype, down_dtype = _dtype(gates_ups), _dtype(down)
    room = _room(count * k, x.shape[1])
    inner = torch.empty((count * k, down.width), dtype=x.dtype)
    library.run(
        library.pack(
            "dense_experts_gated",
            x.data_ptr(),
            plan.data_ptr(),
            *_addresses(gates_ups),
            *_optional(experts.gate_up_bias, weights if experts.weighs_input else None),
            room.data_ptr(),
            inner.data_ptr(),
            count,
            experts.num_experts,
            k,
            gates_ups.width,
            down.width,
            _ACTIVATIONS[experts.activation],
            x_dtype,
            gate_dtype,
            experts.limit,
        )
    )
    room = _room(count * k, down.width)
    out = torch.empty((count, k, down.channels))
    library.run(
        library.pack(
            "dense_experts_down",
            inner.data_ptr(),
            plan.data_ptr(),
            *_addresses(down),
            *_optional(experts.down_bias),
            room.data_ptr(),
            out.data_ptr(),
            count,
            experts.num_experts,
            k,
            down.channels,
            down.width,
            x_dtype,
            down_dtype,
        )
    )
    return out


def _room(rows: int, width: int) -> Tensor:
    """For ``rows`` packed rows of whichever dtype."""
    return torch.empty((rows, -(-width // _TILE_WIDTH) * _TILE_WIDTH))


def _addresses(table: ExpertTable) -> list[int]:
    return [part.data_ptr() for part in table.addresses]


def _optional(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _dtype(table: ExpertTable) -> int:
    weight = table.parts[0][0]
    assert isinstance(weight, DenseWeight)
    return WEIGHT_DTYPES[weight.parts[0].data.dtype]
