"""Recurrent layers, row after row, on states in the blocks of a pool."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from octavo_kernels.recurrence import LayerState, StateMetadata


def _granules(state: LayerState, pages: Tensor, first: int, count: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """All granules of the pool ``[blocks, granules_of_block, numbers]``, and which ones ``count`` of a state are."""
    numbers = state.granule_bytes // 4
    pool = state.pool.view(torch.float32)[:, : state.granules_of_block * numbers]
    index = torch.arange(first, first + count, device=pool.device)
    return pool.unflatten(1, (state.granules_of_block, numbers)), (
        pages.long()[index // state.granules_of_block],
        index % state.granules_of_block,
    )


def _matrices(state: LayerState, pages: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor], int]:
    heads, size = state.updates.shape[2:]
    parts = -(-size // state.columns)
    pool, index = _granules(state, pages, state.first_matrix, heads * parts)
    return pool, index, parts


def read_matrices(state: LayerState, pages: Tensor) -> Tensor:
    """Read the matrices ``[value_heads, key_size, value_size]`` of the sequence whose state has these ``pages``."""
    heads, size = state.updates.shape[2:]
    pool, index, parts = _matrices(state, pages)
    found = pool[index].view(heads, parts, -1, state.columns).transpose(1, 2).flatten(2)
    return found[..., :size].contiguous()


def write_matrices(state: LayerState, pages: Tensor, matrices: Tensor) -> None:
    """The inverse of `read_matrices`."""
    size = state.updates.shape[3]
    pool, index, parts = _matrices(state, pages)
    padded = functional.pad(matrices, (0, parts * state.columns - size))
    pool[index] = padded.unflatten(2, (parts, state.columns)).transpose(1, 2).flatten(0, 1).flatten(1)


def _window(state: LayerState, pages: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    return _granules(state, pages, state.first_window, -(-state.inputs.shape[2] // state.channels_of_granule))


def read_window(state: LayerState, pages: Tensor, taps: int) -> Tensor:
    """``[taps - 1, channels]``, the oldest input first."""
    pool, index = _window(state, pages)
    found = pool[index][:, : (taps - 1) * state.channels_of_granule]
    return found.view(len(found), taps - 1, -1).transpose(0, 1).flatten(1)[:, : state.inputs.shape[2]]


def write_window(state: LayerState, pages: Tensor, window: Tensor) -> None:
    """The inverse of `read_window`."""
    pool, index = _window(state, pages)
    width = state.channels_of_granule
    padded = functional.pad(window, (0, len(index[0]) * width - window.shape[1]))
    parts = padded.unflatten(1, (-1, width)).transpose(0, 1).flatten(1)
    pool[*index, : parts.shape[1]] = parts


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, metadata: StateMetadata) -> Tensor:
    """Sums over the last inputs of each row, float32 ``[T, channels]``; rows of padding are zeros."""
    taps, out = len(weight), x.new_zeros(x.shape)
    starts = metadata.query_start_loc.tolist()
    for r, (begin, end) in enumerate(pairwise(starts)):
        pending, kept, row = (int(t[r]) for t in (metadata.num_pending, metadata.num_kept, metadata.batch_rows))
        if int(metadata.num_tokens[r]):
            window = read_window(state, metadata.read_pages[r], taps)
        else:
            window = out.new_zeros(taps - 1, x.shape[1])
        inputs = torch.cat([window, state.inputs[row, :pending], x[begin:end]])
        first = taps - 1 + pending  # of the step's own rows
        out[begin:end] = 0.0 if bias is None else bias
        for tap in range(taps):
            out[begin:end] += weight[tap] * inputs[first - taps + 1 + tap : len(inputs) - taps + 1 + tap]
        committed = pending + end - begin - kept
        if committed:
            write_window(state, metadata.write_pages[r], inputs[committed : committed + taps - 1])
        if before := int(metadata.num_before[r]):
            write_window(state, metadata.snapshot_pages[r], inputs[before : before + taps - 1])
        state.inputs[row, :kept] = inputs[len(inputs) - kept :]
    return out


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, metadata: StateMetadata) -> Tensor:
    """See `octavo_kernels.causal_conv`."""
    out = _convolve(x.float(), weight, bias, state, metadata)
    for row in out:  # alone: torch's bits depend on how many elements there are
        row.copy_(functional.silu(row))
    return out


def gated_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, metadata: StateMetadata) -> Tensor:
    """See `octavo_kernels.gated_conv`."""
    before, behind, inputs = x.float().chunk(3, dim=1)
    out = _convolve(before * inputs, weight, bias, state, metadata)
    rows = int(metadata.query_start_loc[-1])
    out[:rows] *= behind[:rows]
    return out.to(x.dtype)


def gated_delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor, state: LayerState, metadata: StateMetadata
) -> Tensor:
    """See `octavo_kernels.gated_delta_rule`."""
    (key_heads, key_size), (heads, size) = state.keys.shape[2:], state.updates.shape[2:]
    width = key_heads * key_size
    values = qkv[:, 2 * width :].unflatten(1, (heads, size))
    # Row by row: torch's bits depend on how many elements there are.
    scaled = [_scaled(row[: 2 * width].view(2, key_heads, key_size)) for row in qkv]
    decays = [torch.exp(rate * functional.softplus(row + dt_bias)) for row in a]
    betas = [torch.sigmoid(row) for row in b]

    def update(t: int, key: Tensor, matrices: Tensor) -> Tensor:
        found: Tensor = betas[t][:, None] * (values[t] - decays[t][:, None] * (key[:, :, None] * matrices).sum(1))
        return found

    return _scan([one[0] for one in scaled], [one[1] for one in scaled], decays, update, state, metadata)


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
    (key_heads, key_size), (heads, size) = state.keys.shape[2:], state.updates.shape[2:]
    values, keys, queries = x.split([heads * size, key_heads * key_size, key_heads * key_size], dim=1)
    values = values.unflatten(1, (heads, size))
    queries, keys = (one.unflatten(1, (key_heads, key_size)) for one in (queries, keys))
    steps = [functional.softplus(row.float() + dt_bias).clamp(*limits) for row in dt]
    decays = [torch.exp(rate * step) for step in steps]

    def update(t: int, key: Tensor, matrices: Tensor) -> Tensor:
        found: Tensor = steps[t][:, None] * values[t]
        return found

    out = _scan(list(queries), list(keys), decays, update, state, metadata)
    rows = int(metadata.query_start_loc[-1])
    out[:rows] += (skip[:, None] * values[:rows]).flatten(1)
    return out


def _scan(
    queries: list[Tensor],
    keys: list[Tensor],
    decays: list[Tensor],
    update_of: Callable[[int, Tensor, Tensor], Tensor],
    state: LayerState,
    metadata: StateMetadata,
) -> Tensor:
    """Results of rows with ``queries`` and ``keys [key_heads, key_size]`` and ``decays [value_heads]``; ``update_of``
    takes a row's number, its keys and the matrices before it, by value head."""
    (key_heads, key_size), (heads, size) = state.keys.shape[2:], state.updates.shape[2:]
    out, shared = state.updates.new_zeros(len(queries), heads, size), heads // key_heads
    starts = metadata.query_start_loc.tolist()
    for r, (begin, end) in enumerate(pairwise(starts)):
        pending, kept, row = (int(t[r]) for t in (metadata.num_pending, metadata.num_kept, metadata.batch_rows))
        if int(metadata.num_tokens[r]):
            matrices = read_matrices(state, metadata.read_pages[r])
        else:
            matrices = out.new_zeros(heads, key_size, size)
        committed = pending + end - begin - kept
        for i in range(pending):
            key = state.keys[row, i].repeat_interleave(shared, 0)
            matrices = _updated(matrices, state.decays[row, i], key, state.updates[row, i])
        for t in range(begin, end):
            if (at := pending + t - begin) and at in (committed, int(metadata.num_before[r])):
                pages = metadata.write_pages if at == committed else metadata.snapshot_pages
                write_matrices(state, pages[r], matrices)
            query, key = (one[t].repeat_interleave(shared, 0) for one in (queries, keys))
            update = update_of(t, key, matrices)
            known = decays[t][:, None] * (query[:, :, None] * matrices).sum(1)
            out[t] = known + (query * key).sum(-1, keepdim=True) * update
            matrices = _updated(matrices, decays[t], key, update)
            if (at := pending + t - begin - committed) >= 0:
                state.keys[row, at], state.updates[row, at], state.decays[row, at] = keys[t], update, decays[t]
        if not kept:
            write_matrices(state, metadata.write_pages[r], matrices)
    return out.flatten(1)


def _scaled(both: Tensor) -> Tensor:
    """Queries and keys ``[2, key_heads, key_size]`` of a row."""
    scaled: Tensor = both * torch.rsqrt((both * both).sum(-1, keepdim=True) + 1e-6)
    scaled[0] *= both.shape[2] ** -0.5
    return scaled


def _updated(matrices: Tensor, decay: Tensor, key: Tensor, update: Tensor) -> Tensor:
    return decay[:, None, None] * matrices + key[:, :, None] * update[:, None, :]


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, width: int, gates_first: bool = False
) -> Tensor:
    """See `octavo_kernels.gated_norm`."""
    factors = functional.silu(gate.to(x.dtype))
    normed = x * factors if gates_first else x
    if weight is not None:
        heads = normed.unflatten(1, (-1, width))
        of_heads = weight.view(-1, width)
        normed = (heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps) * of_heads).flatten(1)
    return (normed if gates_first else normed * factors).to(gate.dtype)
