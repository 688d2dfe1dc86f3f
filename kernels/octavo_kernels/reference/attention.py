"""Rotary embedding, cache writes and paged attention, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo_kernels.attention_metadata import AttentionMetadata
from octavo_kernels.attention_options import AttentionOptions
from octavo_kernels.reference.elementwise import rms_norm


def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor | None,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """See `octavo_kernels.rope_and_cache`."""
    rows = qkv.shape[0]
    heads: tuple[Tensor, ...] = qkv.view(rows, -1, head_size).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q, k, v = heads
    if q_norm_weight is not None:
        q = rms_norm(q, q_norm_weight, eps)
    if k_norm_weight is not None:
        k = rms_norm(k, k_norm_weight, eps)
    if cos_sin_cache is not None:
        # Rows of padding may carry any position; theirs is looked up as 0.
        table = cos_sin_cache[positions.clamp(0, cos_sin_cache.shape[0] - 1)]
        q, k = rotate(q, table), rotate(k, table)
    write_kv([k, v], kv_cache, slot_mapping, (k_scale, v_scale))
    return q.contiguous()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate ``x [T, heads, D]`` by ``table [T, rot_dim]`` (cosines, then sines): computed in float32, rounded once."""
    half = table.shape[-1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    x1, x2 = x[..., :half].to(table.dtype), x[..., half : 2 * half].to(table.dtype)
    return torch.cat(((x1 * cos - x2 * sin).to(x.dtype), (x2 * cos + x1 * sin).to(x.dtype), x[..., 2 * half :]), dim=-1)


def write_kv(
    parts: Sequence[Tensor], kv_cache: Tensor, slot_mapping: Tensor, scales: Sequence[float] = (1.0, 1.0)
) -> None:
    """Write ``parts``, keys and values ``[T, Hkv, D]``, divided by their scales, into the slots given, row by row; slot
    -1 is skipped."""
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[rows]
    block_size = kv_cache.shape[3]
    blocks, offsets = slots // block_size, slots % block_size
    for cache, part, scale in zip(kv_cache, parts, scales, strict=False):
        values = part[rows]
        if scale != 1.0:
            values = values.float() / scale
        if cache.dtype == torch.float8_e4m3fn:
            values = values.clamp(-448.0, 448.0)  # its largest; a conversion beyond it gives NaN
        cache[blocks, :, offsets] = values.to(cache.dtype)


def paged_attention(
    q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions, limit: Tensor | None = None
) -> Tensor:
    """See `octavo_kernels.paged_attention`."""
    num_heads = q.shape[1]
    num_kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
    scale, window, softcap = options.scale_of(q.shape[2]), options.window, options.softcap
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(q)
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for r, length in enumerate(lengths):
        start, end = starts[r], min(starts[r + 1], metadata.num_actual_tokens)
        if end <= start or length == 0:
            continue
        pages = metadata.block_table[r, : -(-length // block_size)].long()
        keys, values = (
            cache[pages].transpose(1, 2).reshape(-1, num_kv_heads, kv_cache.shape[4])[:length].to(wide) * factor
            for cache, factor in zip(kv_cache, (options.k_scale, options.v_scale), strict=True)
        )
        if window is not None:  # what no query sees may have been given back, and hold anything
            passed = max(0, _first_seen(length - (starts[r + 1] - start), window, options.chunked))
            keys[:passed], values[:passed] = 0, 0
        group = num_heads // num_kv_heads
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:end].to(wide), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query_positions = torch.arange(length - (starts[r + 1] - start), length, device=q.device)[: end - start, None]
        key_positions = torch.arange(length, device=q.device)[None]
        hidden = key_positions > (query_positions if limit is None else limit[start:end, None])
        if window is not None:
            hidden |= key_positions < _first_seen(query_positions, window, options.chunked)
        scores = scores.masked_fill(hidden, float("-inf"))
        if options.sinks is not None:  # one more key, whose value is zeros
            sink = options.sinks.to(wide)[:, None, None].expand(-1, end - start, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def _first_seen(position: Any, window: int, chunked: bool) -> Any:
    """The first key that a row at ``position``, or rows at those, may attend to; below 0 where that is all of them."""
    return position // window * window if chunked else position - window + 1


def copy_blocks(blocks: Tensor, pairs: Tensor) -> None:
    """See `octavo_kernels.copy_blocks`."""
    if pairs.numel() == 0:
        return
    source, destination = pairs.to(blocks.device).unbind(dim=1)
    blocks[destination] = blocks[source]
