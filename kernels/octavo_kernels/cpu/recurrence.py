"""Gated delta rule, its convolution and its norm on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels import reference
from octavo_kernels.cpu.library import DTYPES, Library, as_contiguous, get_library, threads_for
from octavo_kernels.recurrence import LayerState, StateMetadata

MAX_TAPS = 8  # csrc/recurrence.c


def _library(state: LayerState, metadata: StateMetadata) -> Library | None:
    """None where plain torch is used."""
    tables = (metadata.read_pages, metadata.write_pages, metadata.snapshot_pages)
    fits = state.pool.is_contiguous() and all(t.dtype == torch.int32 and t.stride(1) == 1 for t in tables)
    return get_library() if fits and len({t.stride(0) for t in tables}) == 1 else None


def _arguments(state: LayerState, metadata: StateMetadata) -> tuple[list[int], list[int]]:
    """Addresses and numbers of csrc/recurrence_ops.h: state_args."""
    m = metadata
    tensors = (
        state.pool,
        m.query_start_loc,
        m.num_tokens,
        m.num_pending,
        m.num_kept,
        m.num_before,
        m.batch_rows,
        m.read_pages,
        m.write_pages,
        m.snapshot_pages,
    )
    numbers = [
        len(m.num_tokens),
        m.read_pages.stride(0),
        state.granules_of_block,
        state.granule_bytes,
        state.pool.shape[1],
        state.keys.shape[1],
    ]
    return [tensor.data_ptr() for tensor in tensors], numbers


def causal_conv(x: Tensor, weight: Tensor, state: LayerState, metadata: StateMetadata) -> Tensor:
    """See `octavo_kernels.causal_conv`."""
    library, dtype = _library(state, metadata), DTYPES.get(x.dtype)
    taps, channels = weight.shape
    if library is None or dtype is None or x.stride(1) != 1 or not 2 <= taps <= MAX_TAPS:
        return reference.causal_conv(x, weight, state, metadata)
    out = x.new_empty((len(x), channels), dtype=torch.float32)
    addresses, numbers = _arguments(state, metadata)
    op = library.pack(
        "causal_conv",
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        state.inputs.data_ptr(),
        *addresses,
        *numbers,
        len(x),
        channels,
        taps,
        x.stride(0),
        state.first_window,
        state.channels_of_granule,
        dtype,
    )
    library.run(op, threads_for(out.numel()))
    return out


def gated_delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor, state: LayerState, metadata: StateMetadata
) -> Tensor:
    """See `octavo_kernels.gated_delta_rule`."""
    library = _library(state, metadata)
    if library is None or any(t.dtype != torch.float32 or t.stride(-1) != 1 for t in (qkv, a, b)):
        return reference.gated_delta_rule(qkv, a, b, rate, dt_bias, state, metadata)
    (key_heads, key_size), (value_heads, value_size) = state.keys.shape[2:], state.updates.shape[2:]
    qkv = as_contiguous(qkv)
    gates = qkv.new_empty((len(qkv), 2 * value_heads + key_heads))
    out = qkv.new_empty((len(qkv), value_heads * value_size))
    addresses, numbers = _arguments(state, metadata)
    op = library.pack(
        "gated_delta_rule",
        qkv.data_ptr(),
        a.data_ptr(),
        b.data_ptr(),
        rate.data_ptr(),
        dt_bias.data_ptr(),
        gates.data_ptr(),
        out.data_ptr(),
        state.keys.data_ptr(),
        state.updates.data_ptr(),
        state.decays.data_ptr(),
        *addresses,
        *numbers,
        len(qkv),
        key_heads,
        value_heads,
        key_size,
        value_size,
        a.stride(0),
        b.stride(0),
        state.first_matrix,
        state.columns,
    )
    library.run(op, threads_for(len(qkv) * value_heads * value_size * key_size))
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `octavo_kernels.gated_norm`."""
    library, dtype = get_library(), DTYPES.get(gate.dtype)
    if library is None or dtype is None or x.dtype != torch.float32 or gate.stride(1) != 1:
        return reference.gated_norm(x, gate, weight, eps)
    x, width = as_contiguous(x), len(weight)
    out = gate.new_empty(x.shape)
    op = library.pack(
        "gated_norm",
        x.data_ptr(),
        gate.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        len(x),
        x.shape[1] // width,
        width,
        gate.stride(0),
        dtype,
        eps,
    )
    library.run(op, threads_for(x.numel()))
    return out
