"""Recurrent layers on CPU: convolutions, the gated delta rule, state spaces and the norm behind them."""

from __future__ import annotations

from collections.abc import Sequence

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
        state.inputs.shape[1],
    ]
    return [tensor.data_ptr() for tensor in tensors], numbers


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, metadata: StateMetadata) -> Tensor:
    """See `octavo_kernels.causal_conv`."""
    library = _conv_library(x, weight, state, metadata)
    if library is None:
        return reference.causal_conv(x, weight, bias, state, metadata)
    out = x.new_empty((len(x), weight.shape[1]), dtype=torch.float32)
    return _convolve(library, x, weight, bias, out, state, metadata, is_gated=False)


def gated_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, metadata: StateMetadata) -> Tensor:
    """See `octavo_kernels.gated_conv`."""
    library = _conv_library(x, weight, state, metadata)
    if library is None:
        return reference.gated_conv(x, weight, bias, state, metadata)
    out = x.new_empty((len(x), weight.shape[1]))
    return _convolve(library, x, weight, bias, out, state, metadata, is_gated=True)


def _conv_library(x: Tensor, weight: Tensor, state: LayerState, metadata: StateMetadata) -> Library | None:
    fits = x.dtype in DTYPES and x.stride(1) == 1 and 2 <= len(weight) <= MAX_TAPS
    return _library(state, metadata) if fits else None


def _convolve(
    library: Library,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    state: LayerState,
    metadata: StateMetadata,
    *,
    is_gated: bool,
) -> Tensor:
    taps, channels = weight.shape
    addresses, numbers = _arguments(state, metadata)
    op = library.pack(
        "causal_conv",
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
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
        is_gated,
        DTYPES[x.dtype],
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
    return _recur(library, "gated_delta_rule", as_contiguous(qkv), a, b, [rate, dt_bias, None], state, metadata)


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    limits: tuple[float, float],
    state: LayerState,
    metadata: StateMetadata,
) -> Tensor:
    """See `octavo_kernels.state_space_scan`."""
    library = _library(state, metadata)
    if library is None or dt.dtype not in DTYPES or dt.stride(-1) != 1 or x.dtype != torch.float32:
        return reference.state_space_scan(x, dt, rate, dt_bias, skip, limits, state, metadata)
    constants = [rate, dt_bias, skip]
    return _recur(library, "state_space_scan", as_contiguous(x), dt, None, constants, state, metadata, limits)


def _recur(
    library: Library,
    name: str,
    x: Tensor,
    a: Tensor,
    b: Tensor | None,
    constants: Sequence[Tensor | None],
    state: LayerState,
    metadata: StateMetadata,
    limits: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    (key_heads, key_size), (value_heads, value_size) = state.keys.shape[2:], state.updates.shape[2:]
    gates = x.new_empty((len(x), 2 * value_heads + key_heads))
    out = x.new_empty((len(x), value_heads * value_size))
    addresses, numbers = _arguments(state, metadata)
    op = library.pack(
        name,
        *(0 if one is None else one.data_ptr() for one in (x, a, b, *constants)),
        gates.data_ptr(),
        out.data_ptr(),
        state.keys.data_ptr(),
        state.updates.data_ptr(),
        state.decays.data_ptr(),
        *addresses,
        *numbers,
        len(x),
        key_heads,
        value_heads,
        key_size,
        value_size,
        a.stride(0),
        0 if b is None else b.stride(0),
        state.first_matrix,
        state.columns,
        DTYPES[a.dtype],
        *limits,
    )
    library.run(op, threads_for(len(x) * value_heads * value_size * key_size))
    return out


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, width: int, gates_first: bool = False
) -> Tensor:
    """See `octavo_kernels.gated_norm`."""
    library, dtype = get_library(), DTYPES.get(gate.dtype)
    if library is None or dtype is None or x.dtype != torch.float32 or gate.stride(1) != 1:
        return reference.gated_norm(x, gate, weight, eps, width, gates_first)
    x = as_contiguous(x)
    out = gate.new_empty(x.shape)
    op = library.pack(
        "gated_norm",
        x.data_ptr(),
        gate.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        out.data_ptr(),
        len(x),
        x.shape[1] // width,
        width,
        0 if weight is None or len(weight) == width else width,
        gate.stride(0),
        gates_first,
        dtype,
        eps,
    )
    library.run(op, threads_for(x.numel()))
    return out
