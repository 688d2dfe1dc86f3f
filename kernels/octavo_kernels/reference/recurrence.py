"""Gated delta rule, row after row, on states in the blocks of a pool."""

from __future__ import annotations

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


def causal_conv(x: Tensor, weight: Tensor, state: LayerState, metadata: StateMetadata) -> Tensor:
    """See `octavo_kernels.causal_conv`."""
    taps, out = len(weight), x.new_zeros(x.shape, dtype=torch.float32)
    starts = metadata.query_start_loc.tolist()
    for r, (begin, end) in enumerate(pairwise(starts)):
        pending, kept, row = (int(t[r]) for t in (metadata.num_pending, metadata.num_kept, metadata.batch_rows))
        if int(metadata.num_tokens[r]):
            window = read_window(state, metadata.read_pages[r], taps)
        else:
            window = out.new_zeros(taps - 1, x.shape[1])
        inputs = torch.cat([window, state.inputs[row, :pending], x[begin:end].float()])
        first = taps - 1 + pending  # of the step's own rows
        total = torch.zeros_like(inputs[first:])
        for tap in range(taps):
            total += weight[tap] * inputs[first - taps + 1 + tap : len(inputs) - taps + 1 + tap]
        for t, row_total in enumerate(total, begin):  # alone: torch's bits depend on how many elements there are
            out[t] = functional.silu(row_total)
        committed = pending + end - begin - kept
        if committed:
            write_window(state, metadata.write_pages[r], inputs[committed : committed + taps - 1])
        if before := int(metadata.num_before[r]):
            write_window(state, metadata.snapshot_pages[r], inputs[before : before + taps - 1])
        state.inputs[row, :kept] = inputs[len(inputs) - kept :]
    return out


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
    out = torch.zeros_like(values)
    shared = heads // key_heads
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
            query, key = (one.repeat_interleave(shared, 0) for one in scaled[t])
            decay = decays[t][:, None]
            update = betas[t][:, None] * (values[t] - decay * (key[:, :, None] * matrices).sum(1))
            out[t] = decay * (query[:, :, None] * matrices).sum(1) + (query * key).sum(-1, keepdim=True) * update
            matrices = _updated(matrices, decays[t], key, update)
            if (at := pending + t - begin - committed) >= 0:
                state.keys[row, at], state.updates[row, at], state.decays[row, at] = scaled[t][1], update, decays[t]
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


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `octavo_kernels.gated_norm`."""
    heads = x.unflatten(1, (-1, len(weight)))
    normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps) * weight
    gated: Tensor = normed.flatten(1) * functional.silu(gate.to(x.dtype))
    return gated.to(gate.dtype)
